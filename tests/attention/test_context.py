"""What a core may know besides Heads: the tokens that ask, what the layer before handed on; and fewer tokens."""

import copy

import pytest
import torch
from attending import make_heads, make_site
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import nn
from torch.autograd import gradcheck

from families import FAMILIES, vit
from vitruvius._errors import SurgeryError, UnsuitableSite
from vitruvius.analysis import analyse
from vitruvius.attention import part
from vitruvius.attention.across_layers import stretch
from vitruvius.attention.base import attention_map, build_core
from vitruvius.attention.softmax import attend
from vitruvius.attention.tome import merge
from vitruvius.models import create_model
from vitruvius.surgery import record, restore, rewire, survey
from vitruvius.surgery.base import inner
from vitruvius.surgery.recording import map_of
from vitruvius.surgery.rewiring import plug
from vitruvius.surgery.vit import BlockSocket

TALKING = {"elliptical": "elliptical", "value_residual": "value_residual", "tome": part("tome", r=3)}


def tiny(depth=3, seed=0, **settings):
    torch.manual_seed(seed)
    model = vit(depth=depth, **settings)().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, torch.randn(2, 3, 32, 32)


def heads_of(model, x):
    with torch.no_grad(), record(model) as seen:
        model(x)
    return seen


@pytest.mark.parametrize(
    "piece",
    [part("gated", start=40.0), part("value_residual", share=0.0), part("tome", r=0)],
    ids=["gated", "value_residual", "tome"],
)
def test_with_neutral_settings_it_is_softmax(piece):
    model, x = tiny()
    expected = model(x)
    torch.testing.assert_close(rewire(model, piece)(x), expected, rtol=1e-5, atol=1e-5)


def test_gated_is_upstreams_gate():
    torch.manual_seed(0)
    upstream = Attention(24, 3, qkv_bias=True, gated=True).double().eval()
    plain = Attention(24, 3, qkv_bias=True).double().eval()
    plain.load_state_dict({name: value for name, value in upstream.state_dict().items() if "gate" not in name})
    core = build_core(["gated"], make_site(heads=3, queries=5, key_dim=8)).double()
    core.kernel.weight.data.copy_(upstream.gate.weight)
    core.kernel.bias.data.copy_(torch.zeros(24) if upstream.gate.bias is None else upstream.gate.bias)
    plug({"attn": plain}, {"attn": core})
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    torch.testing.assert_close(plain(x), upstream(x))


def test_a_gate_reaches_every_family_whose_socket_tells_the_tokens():
    told = {}
    for family in FAMILIES:
        model, x = family.randomised()
        for name, site in survey(model, input_size=family.input_size).items():
            told.setdefault(site.family, set()).add(site.knows_input)
            if site.knows_input:
                assert rewire(model, "gated", where=name)(x).isfinite().all()
                restore(model)
    assert {family for family, known in told.items() if known == {True}} >= {
        "vit",
        "rope",
        "eva",
        "beit",
        "swin",
        "cait_class",
    }


def test_elliptical_stretches_q_by_how_values_moved_since_the_layer_before():
    model, x = tiny()
    rewire(model, "elliptical")
    seen = heads_of(model, x)
    first, second = seen["blocks.0.attn"], seen["blocks.1.attn"]
    torch.testing.assert_close(second.states["elliptical"], first.v)
    moved = torch.zeros(2, 2, 1, 16)
    for b in range(2):
        for h in range(2):
            for d in range(16):
                steps = [abs(float(second.v[b, h, n, d] - first.v[b, h, n, d])) for n in range(17)]
                moved[b, h, 0, d] = sum(steps) / 17
    m = moved / moved.amax(-1, keepdim=True)
    torch.testing.assert_close(stretch(second.v, first.v), m)
    torch.testing.assert_close(map_of(model, "blocks.1.attn", second), attention_map(second._replace(q=second.q * m)))
    torch.testing.assert_close(map_of(model, "blocks.0.attn", first), attention_map(first))


def test_values_that_do_not_move_leave_q_as_it_is():
    v = make_heads().v
    assert torch.equal(stretch(v, v), torch.ones(2, 3, 1, 4, dtype=torch.float64))


def test_value_residual_takes_half_of_the_first_layers_values():
    model, x = tiny()
    rewire(model, "value_residual")
    outputs = {}
    for name in ("blocks.1.attn", "blocks.2.attn"):
        core = model.get_submodule(name).core
        core.register_forward_hook(lambda _, __, out, name=name: outputs.__setitem__(name, out))
    seen = heads_of(model, x)
    first = seen["blocks.0.attn"].v
    for name, out in outputs.items():
        torch.testing.assert_close(out, attend(seen[name]._replace(v=(seen[name].v + first) / 2)))
        torch.testing.assert_close(map_of(model, name, seen[name]), attention_map(seen[name]))


def test_value_residual_learns_its_share_where_asked():
    model, x = tiny()
    rewire(model, part("value_residual", learned=True))
    model(x).square().sum().backward()
    shares = {name: p for name, p in model.named_parameters() if name.endswith("value_residual.share")}
    assert len(shares) == 3
    assert shares["blocks.2.attn.core.value_residual.share"].grad.abs() > 0


def slow_merge(tokens, sizes, keys, r, prefix):
    """One image, tokens as a list: ties of every second patch to the most similar of the others."""
    patches = list(range(prefix, len(tokens)))
    others, ones = patches[::2], patches[1::2]
    ties = []
    for i in ones:
        cosines = [float(nn.functional.cosine_similarity(keys[i], keys[j], dim=0)) for j in others]
        ties.append((max(cosines), i, others[cosines.index(max(cosines))]))
    ties.sort(reverse=True)
    groups = {j: [j] for j in others}
    for _, i, j in ties[:r]:
        groups[j].append(i)
    staying = sorted(i for _, i, _ in ties[r:])
    members = [[i] for i in range(prefix)] + [[i] for i in staying] + [groups[j] for j in others]
    total = [sum(float(sizes[i]) for i in group) for group in members]
    means = [sum(tokens[i] * sizes[i] for i in group) / size for group, size in zip(members, total, strict=True)]
    return torch.stack(means), torch.tensor(total)


@pytest.mark.parametrize(("r", "prefix"), [(3, 1), (4, 0), (100, 2)])
def test_merging_is_that_of_a_plain_loop(r, prefix):
    generator = torch.Generator().manual_seed(r)
    tokens, keys = torch.randn(2, 11, 5, generator=generator), torch.randn(2, 11, 4, generator=generator)
    sizes = torch.randint(1, 4, (2, 11), generator=generator).float()
    merged, counts = merge(tokens, sizes, keys, r, prefix)
    for b in range(2):
        expected, total = slow_merge(tokens[b], sizes[b], keys[b], r, prefix)
        torch.testing.assert_close(merged[b], expected)
        torch.testing.assert_close(counts[b], total)
    torch.testing.assert_close(counts.sum(1), sizes.sum(1))


def test_tome_leaves_fewer_tokens_in_every_block_and_attention_knows_their_sizes():
    model, x = tiny()
    rewire(model, part("tome", r=3))
    seen = heads_of(model, x)
    assert [heads.k.shape[-2] for heads in seen.values()] == [17, 14, 11]
    sizes = seen["blocks.2.attn"].states["tome"]
    assert torch.equal(sizes.sum(1), torch.full((2,), 17.0))
    found = map_of(model, "blocks.2.attn", seen["blocks.2.attn"])
    expected = attention_map(seen["blocks.2.attn"]._replace(bias=sizes.log()[:, None, None]))
    torch.testing.assert_close(found, expected)


def test_merging_equal_tokens_changes_nothing_with_proportional_attention():
    model, _ = tiny(depth=2, no_embed_class=True)
    nn.init.zeros_(model.pos_embed)
    x = torch.full((1, 3, 32, 32), 0.3)  # all patches are alike
    expected = model(x)
    torch.testing.assert_close(rewire(model, part("tome", r=5))(x), expected, rtol=1e-4, atol=1e-4)
    restore(model)
    assert not torch.allclose(rewire(model, part("tome", r=5, proportional=False))(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TALKING)
def test_blocks_are_swapped_only_where_layers_talk_and_given_back_exactly(name):
    model, x = tiny()
    with torch.no_grad():
        expected, keys = model(x), set(model.state_dict())
    rewire(model, TALKING[name], where=["blocks.0.attn", "blocks.1.attn"])
    assert [type(block) for block in model.blocks] == [BlockSocket, BlockSocket, Block]
    assert [block.passes_on for block in model.blocks[:2]] == [True, False]
    assert set(model.state_dict()) == keys
    assert model(x).shape == expected.shape
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    restore(model, "blocks.0.attn")
    assert [type(block) for block in model.blocks] == [Block, BlockSocket, Block]
    restore(model)
    assert all(type(block) is Block and not hasattr(block, "passes_on") for block in model.blocks)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", ["gated", *TALKING])
def test_models_whose_layers_talk_train_compiled_and_checkpointed(name):
    model, x = tiny(depth=2)
    rewire(model, TALKING.get(name, name))

    def gradients(run):
        model.zero_grad()
        out = run(x)
        out.square().sum().backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    expected = gradients(model)
    torch.compiler.reset()
    compiled = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    model.set_grad_checkpointing()
    for found in (compiled, gradients(model)):
        for key, gradient in expected.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", TALKING)
def test_blocks_that_do_not_hand_on_refuse_by_name(name):
    swin = next(family for family in FAMILIES if family.name == "swin")
    model, _ = swin.randomised()
    with pytest.raises(UnsuitableSite, match=f"'{name}' needs a state from the block before"):
        rewire(model, TALKING[name])


def test_what_merges_and_what_hands_on_tokens_do_not_go_together():
    with pytest.raises(SurgeryError, match="one of them merges tokens"):
        build_core(["tome", "value_residual"], make_site())


def test_analyses_of_merged_tokens_measure_what_can_be_measured_and_say_the_rest():
    model = create_model("vitruvius/vit_digits", attention=[part("tome", r=2)], seed=1).eval()
    table = analyse(model, [torch.rand(3, 3, 8, 8)], "entropy", "distance", "rollout", nulls=False)
    assert {row.analysis for row in table.rows} >= {"entropy"}
    assert any("distance" in remark for remark in table.remarks)


def told(name, dtype=torch.float64):
    """A core, its Heads, and what it is told besides them."""
    parts = {"value_residual": part("value_residual", learned=True)}
    core = build_core([parts.get(name, name)], make_site()).double()
    generator = torch.Generator().manual_seed(2)
    for parameter in core.parameters():
        nn.init.uniform_(parameter, 0.2, 0.8, generator=generator)
    x = torch.randn(2, 7, 12, generator=generator, dtype=torch.float64).to(dtype)
    before = {"tome": torch.randint(1, 4, (2, 7), generator=generator).to(dtype)}
    handed = {name: before.get(name, make_heads(seed=8, dtype=dtype).v)}
    return core.to(dtype), make_heads(dtype=dtype), x, handed


@pytest.mark.parametrize("name", ["gated", *TALKING])
def test_gradients_with_context_are_those_of_the_formula(name):
    core, heads, x, handed = told(name)
    names = [key for key, _ in core.named_parameters()]

    def run(q, k, v, x, before, *parameters):
        own = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(core, own, (heads._replace(q=q, k=k, v=v), x, {name: before}))

    leaves = [y.detach().clone().requires_grad_() for y in (*heads[:3], x, handed[name], *core.parameters())]
    if name == "elliptical":  # whose M is a constant, as in the authors' code
        for constant in (leaves[2], leaves[4]):
            constant.requires_grad_(False)
    assert gradcheck(run, leaves, atol=1e-5, rtol=1e-3)


def test_the_gradient_of_merging_is_that_of_the_formula():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 11, 5, generator=generator, dtype=torch.float64).requires_grad_()
    sizes = torch.randint(1, 4, (2, 11), generator=generator).double()
    keys = torch.randn(2, 11, 4, generator=generator, dtype=torch.float64)
    assert gradcheck(lambda tokens: merge(tokens, sizes, keys, 3, 1)[0], [tokens])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gated", *TALKING])
def test_context_in_half_precision_stays_near_float64(name, dtype):
    (core, *given), (half, *given_half) = told(name), told(name, dtype)
    out = half(*given_half)
    assert out.dtype == dtype
    tolerance = {torch.float16: 3e-2, torch.bfloat16: 2e-1}[dtype]
    assert (out.double() - core(*given)).abs().max() < tolerance


@pytest.mark.parametrize("name", ["gated", *TALKING])
def test_models_whose_layers_talk_run_in_bfloat16_and_under_autocast(name):
    model, x = tiny()
    rewire(model, TALKING.get(name, name))
    with torch.no_grad():
        expected = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = model(x)
        half = model.bfloat16()(x.bfloat16())
    for found in (mixed, half):
        assert found.isfinite().all()
        assert (found.float() - expected).norm() < 0.5 * expected.norm()


@pytest.mark.parametrize("name", ["tome:r=2", "value_residual", "elliptical"])
@pytest.mark.parametrize(
    "asked", [{}, {"norm": True}, {"output_fmt": "NLC"}, {"stop_early": True, "indices": [0]}], ids=str
)
def test_forward_intermediates_of_blocks_that_hand_on_says_why_it_cannot_be(name, asked):
    settings = {"class_token": True, "global_pool": "token"} if "output_fmt" in asked else {}
    model = create_model("vitruvius/vit_digits", attention=[name], seed=1, depth=3, **settings).eval()
    with pytest.raises(SurgeryError, match=r"give a Stream, not tokens.*forward_features"):
        inner(model).forward_intermediates(torch.rand(2, 3, 8, 8), **asked)
