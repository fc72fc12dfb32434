"""The variants of the field against slow loops written out, against upstream, and in their limits."""

import math

import pytest
import timm
import torch
from attending import CHAINS, make_core, make_heads, make_site
from timm.layers import Attention, DiffAttention
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitruvius._errors import UnsuitableSite
from vitruvius._registry import first_line
from vitruvius.attention import attentions, part
from vitruvius.attention.base import attention_map, build_core
from vitruvius.attention.chosen_keys import entmax
from vitruvius.attention.softmax import attend
from vitruvius.models import create_model
from vitruvius.surgery import rewire
from vitruvius.surgery.rewiring import plug

NEW = [
    name
    for name in CHAINS
    if name.split("_")[0] in ("differential", "sigmoid", "softpick", "twicing", "pro", "l2", "linear", "sink", "entmax")
    or name == "top_k"
]


def core_of(*parts):
    return build_core(parts, make_site()).double()


def rows_of(heads):
    """Scores of every query by a plain loop: {(b, h, i): [x_j]}."""
    found = {}
    for b in range(heads.q.shape[0]):
        for h in range(heads.q.shape[1]):
            for i in range(heads.q.shape[2]):
                pairs = [float(heads.q[b, h, i] @ heads.k[b, h, j]) * heads.scale for j in range(heads.k.shape[2])]
                found[b, h, i] = pairs
    return found


def assert_weights(core, heads, rule):
    found = core.map(heads)
    for (b, h, i), row in rows_of(heads).items():
        expected = torch.tensor(rule(row), dtype=torch.float64)
        torch.testing.assert_close(found[b, h, i], expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "parts",
    [
        [part("twicing", strength=0.0)],
        [part("pro", iterations=0)],
        [part("pro", penalty="huber", delta=1e6)],
        [part("sink", start=-40.0)],
        [part("top_k", share=1.0)],
        [part("scaled")],
        [part("scaled", form="alpha")],
        [part("mask", keep=torch.ones(3, 7, 7, dtype=torch.bool))],
        [part("mask", keep="all")],
        [part("truncated", mode="single_head", rank=4)],
        [part("truncated", mode="mix_head", rank=3)],
    ],
    ids=lambda parts: str(parts[0].func.__name__),
)
def test_with_neutral_settings_it_is_softmax(parts):
    heads = make_heads()
    torch.testing.assert_close(core_of(*parts)(heads), attend(heads))


def test_l2_of_keys_of_one_length_with_half_strength_is_softmax():
    heads = make_heads()
    heads = heads._replace(k=nn.functional.normalize(heads.k, dim=-1))
    torch.testing.assert_close(core_of(part("l2", tied=False, strength=0.5))(heads), attend(heads))


@pytest.mark.parametrize("tied", [True, False])
def test_l2_is_the_softmax_of_negative_squared_distances(tied):
    heads = make_heads()
    q = heads.k if tied else heads.q
    squares = (q[..., :, None, :] - heads.k[..., None, :, :]).square().sum(-1)
    expected = (-squares * heads.scale).softmax(-1)
    torch.testing.assert_close(core_of(part("l2", tied=tied)).map(heads), expected)


def test_sigmoid_treats_every_pair_by_itself():
    assert_weights(core_of("sigmoid"), make_heads(), lambda row: [1 / (1 + 7 * math.exp(-x)) for x in row])
    assert_weights(
        core_of(part("sigmoid", offset=0.0)), make_heads(), lambda row: [1 / (1 + math.exp(-x)) for x in row]
    )


def test_softpick_is_its_formula_and_a_query_may_look_nowhere():
    def rule(row):
        total = sum(abs(math.exp(x) - 1) for x in row)
        return [max(math.exp(x) - 1, 0) / total for x in row]

    heads = make_heads()
    assert_weights(core_of("softpick"), heads, rule)
    away = heads._replace(q=torch.ones_like(heads.q), k=-torch.ones_like(heads.k))
    assert (core_of("softpick")(away) == 0).all()
    assert (core_of("softpick")(heads._replace(q=0 * heads.q)) == 0).all()


@pytest.mark.parametrize("hiding", [-torch.inf, -100.0])
def test_softpick_counts_hidden_pairs_nowhere(hiding):
    heads = make_heads()
    bias = torch.zeros(7, 7, dtype=torch.float64)
    bias[:, 4:] = hiding
    fewer = heads._replace(k=heads.k[:, :, :4], v=heads.v[:, :, :4])
    torch.testing.assert_close(core_of("softpick")(heads._replace(bias=bias)), core_of("softpick")(fewer))


def test_twicing_is_two_a_minus_a_squared():
    heads = make_heads()
    a = attention_map(heads)
    torch.testing.assert_close(core_of("twicing")(heads), (2 * a - a @ a) @ heads.v)


@pytest.mark.parametrize("penalty", ["mcp", "l1", "huber", "huber_mcp"])
def test_pro_is_its_iteration_written_out(penalty):
    gamma, delta, epsilon = 3.0, 0.7, 1e-2

    def weigh(far):
        far = far + epsilon
        return {
            "mcp": max(1 / far - 1 / gamma, epsilon),
            "l1": 1 / far,
            "huber": min(delta / far, 1.0),
            "huber_mcp": min(max(delta / (gamma - delta) * (gamma / far - 1), epsilon), 1.0),
        }[penalty]

    heads = make_heads()
    core = core_of(part("pro", penalty=penalty, gamma=gamma, delta=delta, iterations=2))
    a, v = attention_map(heads)[1, 2, 3], heads.v[1, 2]
    z = a @ v
    for _ in range(2):
        w = torch.tensor([float(a[j]) * weigh(float((v[j] - z).norm())) for j in range(7)], dtype=torch.float64)
        z = (w / w.sum()) @ v
    torch.testing.assert_close(core(heads)[1, 2, 3], z)


def test_pro_comes_near_the_weighted_median_where_an_outlier_draws_softmax_away():
    heads = make_heads()
    far = heads.v.clone()
    far[:, :, 0] += 1000
    disturbed = heads._replace(v=far)
    moved = {}
    for name, kernel in {"softmax": part("softmax"), "pro": part("pro", penalty="l1", iterations=60)}.items():
        core = core_of(kernel)
        moved[name] = float((core(disturbed) - core(heads)).abs().median())
    assert moved["pro"] < moved["softmax"] / 10


def test_linear_is_its_formula():
    heads = make_heads()
    q, k = (nn.functional.elu(x * heads.scale**0.5) + 1 for x in heads[:2])
    pairs = q @ k.mT
    torch.testing.assert_close(
        core_of("linear")(heads), pairs / pairs.sum(-1, keepdim=True) @ heads.v, rtol=1e-5, atol=1e-6
    )


def test_linear_with_many_random_features_comes_near_softmax():
    heads = make_heads(scale=0.1)
    errors = [
        (core_of(part("linear", features="favor", count=n))(heads) - attend(heads)).abs().mean() for n in (8, 4096)
    ]
    assert errors[1] < 0.03 < errors[0]


def test_sink_is_its_formula_with_a_logit_for_each_head():
    core, heads = core_of("sink"), make_heads()
    with torch.no_grad():
        core.kernel.logit.copy_(torch.tensor([0.0, 1.0, -2.0]))
    exponentials = (heads.q @ heads.k.mT * heads.scale).exp()
    total = exponentials.sum(-1, keepdim=True) + core.kernel.logit.exp()[:, None, None]
    torch.testing.assert_close(core(heads), exponentials / total @ heads.v)
    bias = torch.randn(7, 7, dtype=torch.float64)
    exponentials = exponentials * bias.exp()
    total = exponentials.sum(-1, keepdim=True) + core.kernel.logit.exp()[:, None, None]
    torch.testing.assert_close(core(heads._replace(bias=bias)), exponentials / total @ heads.v)


def test_top_k_keeps_the_largest_scores_of_each_query():
    def rule(row):
        kept = sorted(row)[-4:]
        total = sum(math.exp(x) for x in kept)
        return [math.exp(x) / total if x in kept else 0.0 for x in row]

    assert_weights(core_of("top_k"), make_heads(), rule)


@pytest.mark.parametrize("features", ["elu", "favor"])
def test_the_weights_of_linear_attention_sum_to_one_for_large_scores_too(features):
    core = core_of(part("linear", features=features))
    heads = make_heads(batch=4, scale=12.0)  # so that scores have a deviation of 24
    torch.testing.assert_close(core.map(heads).sum(-1), torch.ones(4, 3, 7, dtype=torch.float64))
    torch.testing.assert_close(core(heads), core.map(heads) @ heads.v)


def test_entmax_is_what_bisection_finds_and_can_be_zero():
    def rule(row):
        low, high = max(row) / 2 - 1, max(row) / 2
        for _ in range(200):
            tau = (low + high) / 2
            total = sum(max(x / 2 - tau, 0) ** 2 for x in row)
            low, high = (tau, high) if total > 1 else (low, tau)
        return [max(x / 2 - low, 0) ** 2 for x in row]

    heads = make_heads(scale=2.0)
    assert_weights(core_of("entmax"), heads, rule)
    assert (core_of("entmax").map(heads) == 0).any()
    x = torch.tensor([[1.0, -torch.inf, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(entmax(x)[:, [0, 2]], entmax(x[:, [0, 2]]))


def test_differential_equals_upstream():
    torch.manual_seed(0)
    upstream = DiffAttention(24, 3, qkv_bias=True, depth=4).double().eval()
    nn.init.normal_(upstream.sub_norm.weight)
    plain = Attention(24, 3, qkv_bias=True).double().eval()
    plain.load_state_dict({name: value for name, value in upstream.state_dict().items() if name in plain.state_dict()})
    site = make_site(heads=3, queries=5, key_dim=8, name="blocks.4.attn")
    core = build_core(["differential"], site).double()
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
        getattr(core.kernel, name).data.copy_(getattr(upstream, name))
    core.kernel.norm.weight.data.copy_(upstream.sub_norm.weight)
    model = nn.Sequential(plain)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    plug({"0": plain}, {"0": core})
    torch.testing.assert_close(model(x), upstream(x))


def test_upstreams_differential_models_are_rewired_and_keep_their_keys():
    model = timm.create_model("test_vit", img_size=32, patch_size=8, attn_layer="diff", num_classes=10).eval()
    x = torch.randn(2, 3, 32, 32)
    expected, keys = model(x), set(model.state_dict())
    rewire(model, "softmax")
    torch.testing.assert_close(model(x), expected)
    assert set(model.state_dict()) == keys
    with pytest.raises(UnsuitableSite, match="one width"):
        rewire(create_model("test_vit", img_size=32, patch_size=8, attn_layer="diff", num_classes=10), "rpc")


def test_differential_at_the_depth_of_its_block_or_as_told():
    starts = [
        build_core([part("differential", **more)], make_site(name="blocks.3.attn")).kernel.lambda_start
        for more in ({}, {"depth": 0})
    ]
    assert starts == pytest.approx([0.8 - 0.6 * math.exp(-0.9), 0.2])


INEXACT = ("truncated", "elliptical", "value_residual", "tome")  # or tested with their context


@pytest.mark.parametrize("name", [name for name in CHAINS if name not in INEXACT])
def test_gradients_are_those_of_the_formula(name):
    core = make_core(name)
    heads = make_heads(batch=1, seed=4)

    def run(q, k, v, *parameters):
        return torch.func.functional_call(
            core, dict(zip(names, parameters, strict=True)), (heads._replace(q=q, k=k, v=v),)
        )

    names = [key for key, _ in core.named_parameters()]
    leaves = [x.detach().clone().requires_grad_() for x in (*heads[:3], *core.parameters())]
    assert gradcheck(run, leaves, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", NEW)
def test_second_gradients_are_those_of_the_formula(name):
    """Gradient alignment in training (`fast`, `align`) differentiates twice."""
    core, heads = make_core(name), make_heads(batch=1, tokens=4)
    tensors = [x[:, :1].clone().requires_grad_() for x in heads[:3]]  # one head, three times: it is slow

    def run(*tensors):
        q, k, v = (x.expand(-1, 3, -1, -1) for x in tensors)
        return core(heads._replace(q=q, k=k, v=v))

    with sdpa_kernel(SDPBackend.MATH):
        assert gradgradcheck(run, tensors, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", NEW)
def test_it_trains_compiled_without_graph_breaks(name):
    core, heads = make_core(name), make_heads()
    results = []
    torch.compiler.reset()
    for run in (core, torch.compile(core, fullgraph=True, backend="aot_eager")):
        leaves = [x.detach().clone().requires_grad_() for x in heads[:3]]
        out = run(heads._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
        out.square().sum().backward()
        results.append((out.detach(), *[leaf.grad for leaf in leaves if leaf.grad is not None]))
    assert len(results[0]) == len(results[1])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_every_attention_is_listed_with_its_paper():
    lines = {
        name: first_line(attentions[name])
        for name in attentions
        if attentions[name].__module__.startswith("vitruvius.")
    }
    assert {name: line for name, line in lines.items() if "arXiv:" not in line} == {}
