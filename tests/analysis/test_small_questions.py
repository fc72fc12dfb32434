"""Entropy, distance, effective rank, head similarity, token norms and rollout against plain loops and limit cases."""

import math

import pytest
import torch
from looking import make_heads, make_site, slow_attention

from vitruvius._errors import UnsuitableSite
from vitruvius.analysis.distance import distance
from vitruvius.analysis.effective_rank import effective_rank, spread
from vitruvius.analysis.entropy import entropy
from vitruvius.analysis.head_similarity import head_similarity
from vitruvius.analysis.rollout import Rollout
from vitruvius.analysis.token_norms import token_norms
from vitruvius.models import create_model
from vitruvius.surgery import record, survey
from vitruvius.surgery.recording import map_of


def uniform(heads):
    return heads._replace(q=torch.zeros_like(heads.q))


def test_entropy_is_that_of_a_plain_loop():
    heads = make_heads()
    weights = slow_attention(heads, 1, 2)
    nats = [-sum(float(p) * math.log(p) for p in row) for row in weights]
    found = entropy(heads)
    assert float(found["nats"][1, 2]) == pytest.approx(sum(nats) / 9)
    assert float(found["relative"][1, 2]) == pytest.approx(sum(nats) / 9 / math.log(9))
    assert float(found["effective_keys"][1, 2]) == pytest.approx(sum(map(math.exp, nats)) / 9)
    assert float(found["largest_weight"][1, 2]) == pytest.approx(sum(float(row.max()) for row in weights) / 9)


def test_uniform_attention_looks_at_every_key_and_masked_keys_do_not_count():
    heads = uniform(make_heads())
    torch.testing.assert_close(entropy(heads)["effective_keys"], torch.full((2, 3), 9.0, dtype=torch.float64))
    few = entropy(heads._replace(q=heads.q[..., :2, :]))  # of two queries each can still look at nine keys
    torch.testing.assert_close(few["relative"], torch.ones(2, 3, dtype=torch.float64))
    bias = torch.zeros(1, 1, 1, 9, dtype=torch.float64)
    bias[..., 4:] = -torch.inf
    found = entropy(heads._replace(bias=bias))["effective_keys"]
    torch.testing.assert_close(found, torch.full((2, 3), 4.0, dtype=torch.float64))


def test_distance_is_that_of_a_plain_loop_over_patches():
    heads = make_heads(tokens=7)  # a class token and 2 x 3 patches
    site = make_site(heads, num_prefix_tokens=1, grid=(2, 3))
    weights = slow_attention(heads, 0, 1)[1:, 1:]
    total = around = 0.0
    for i in range(6):
        for j in range(6):
            share = float(weights[i, j] / weights[i].sum()) / 6
            down, right = (abs(a - b) for a, b in zip(divmod(i, 3), divmod(j, 3), strict=True))
            total += share * math.hypot(down, right)
            around += share * (down <= 1 and right <= 1)
    found = distance(heads, site)
    assert float(found["patches"][0, 1]) == pytest.approx(total)
    assert float(found["neighbours"][0, 1]) == pytest.approx(around)


def test_uniform_attention_has_relative_distance_one_and_looking_at_oneself_has_none():
    heads = make_heads(tokens=6)
    site = make_site(heads, grid=(2, 3))
    torch.testing.assert_close(distance(uniform(heads), site)["relative"], torch.ones(2, 3, dtype=torch.float64))
    own = torch.full((6, 6), -torch.inf, dtype=torch.float64).fill_diagonal_(0)
    found = distance(heads._replace(bias=own), site)
    assert (found["patches"] == 0).all()
    assert (found["neighbours"] == 1).all()


@pytest.mark.parametrize("changes", [{"grid": None}, {"grid": (3, 3), "num_queries": 1, "attends": "class"}])
def test_distance_refuses_sites_without_a_grid(changes):
    heads = make_heads()
    with pytest.raises(UnsuitableSite, match="grid of patches"):
        distance(heads, make_site(heads, **changes))


@pytest.mark.parametrize("shape", [(12, 5), (5, 12)])
def test_effective_rank_is_the_exponential_of_the_entropy_of_the_singular_values(shape):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sigma = torch.linalg.svdvals(x)
    p = sigma / sigma.sum()
    assert float(spread(x)) == pytest.approx(float((-(p * p.log()).sum()).exp()), rel=1e-6)


def test_effective_rank_counts_equal_directions():
    x = torch.eye(10, dtype=torch.float64)[:, :6] @ torch.diag(torch.tensor([1.0, 1, 1, 0, 0, 0], dtype=torch.float64))
    assert float(spread(x)) == pytest.approx(3)
    heads = make_heads()
    found = effective_rank(heads._replace(k=heads.k[..., :1].expand_as(heads.k)))
    torch.testing.assert_close(found["keys"], torch.ones(2, 3, dtype=torch.float64), rtol=0, atol=1e-5)
    torch.testing.assert_close(found["values"], spread(heads.v))


def test_heads_that_are_copies_are_alike_and_single_heads_are_refused():
    heads = make_heads()
    same = heads._replace(**{name: getattr(heads, name)[:, :1].expand(-1, 3, -1, -1) for name in ("q", "k", "v")})
    for values in head_similarity(same, make_site(same)).values():
        torch.testing.assert_close(values, torch.ones(2, 3, dtype=torch.float64))
    one = make_heads(heads=1)
    with pytest.raises(UnsuitableSite, match="two heads"):
        head_similarity(one, make_site(one))


def test_head_similarity_is_the_mean_cosine_with_the_other_maps_and_the_mean_cka_with_the_other_outputs():
    heads = make_heads()
    found = head_similarity(heads, make_site(heads))
    maps = [slow_attention(heads, 0, head) for head in range(3)]
    pairs = [float(torch.cosine_similarity(maps[0].flatten(), maps[h].flatten(), dim=0)) for h in (1, 2)]
    assert float(found["maps"][0, 0]) == pytest.approx(sum(pairs) / 2)
    outputs = [maps[h] @ heads.v[0, h] for h in range(3)]
    outputs = [x - x.mean(0) for x in outputs]

    def cka(x, y):
        return float((x.T @ y).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm()))

    expected = (cka(outputs[0], outputs[1]) + cka(outputs[0], outputs[2])) / 2
    assert float(found["outputs"][0, 0]) == pytest.approx(expected)


def test_a_token_that_all_look_at_is_a_sink_and_a_long_value_an_outlier():
    heads = uniform(make_heads(tokens=50))
    bias = torch.zeros(50, 50, dtype=torch.float64)
    bias[:, 7] = 50
    v = heads.v.clone()
    v[..., 3, :] *= 1e3
    site = make_site(heads, num_prefix_tokens=8)
    found = token_norms(heads._replace(bias=bias, v=v), site)
    torch.testing.assert_close(found["sink"], torch.ones(2, 3, dtype=torch.float64))
    torch.testing.assert_close(found["prefix"], torch.ones(2, 3, dtype=torch.float64))
    assert (found["outliers"] >= 1 / 50).all()
    assert (found["value_peak"] > 100).all()
    lengths = heads.k.square().sum(-1).sqrt()
    torch.testing.assert_close(found["key"], lengths.mean(-1))
    assert "prefix" not in token_norms(heads, make_site(heads))


def test_rollout_multiplies_the_layers_with_their_residual_paths():
    first, second = make_heads(seed=1, tokens=5), make_heads(seed=2, tokens=5)
    site = make_site(first, num_prefix_tokens=1, grid=(2, 2))
    analysis = Rollout(residual=0.4)
    analysis.see(first, site)
    analysis.see(second, site)
    found = analysis.result()
    steps = []
    for heads in (first, second):
        mean = torch.stack([slow_attention(heads, 1, h) for h in range(3)]).mean(0)
        steps.append(0.4 * torch.eye(5, dtype=torch.float64) + 0.6 * mean)
    seen = (steps[1] @ steps[0])[0]
    share = seen[1:] / seen[1:].sum()
    torch.testing.assert_close(found["map"][1], share)
    assert float(found["prefix"][1]) == pytest.approx(float(seen[0]))
    nats = -sum(float(p) * math.log(p) for p in share)
    assert float(found["effective_patches"][1]) == pytest.approx(math.exp(nats))


@pytest.mark.parametrize(
    ("settings", "answering"),
    [
        ({"global_pool": "avg", "class_token": True}, slice(1, None)),
        ({"global_pool": "avg", "class_token": False, "reg_tokens": 2}, slice(2, None)),
        ({"global_pool": "token", "class_token": True, "reg_tokens": 2}, slice(0, 1)),
    ],
    ids=["averaged", "registers", "class token and registers"],
)
def test_rollout_begins_at_the_tokens_that_the_head_sees(settings, answering):
    model = create_model("vitruvius/vit_digits", seed=2, depth=1, **settings).eval()
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), record(model) as seen:
        model(x)
    ((name, site),) = survey(model).items()
    weights = map_of(model, name, seen[name]).mean(1)
    flow = 0.5 * torch.eye(weights.shape[-1]) + 0.5 * weights
    share = flow[:, answering, site.num_prefix_tokens :].mean(1)
    analysis = Rollout()
    analysis.see(seen[name], site)
    torch.testing.assert_close(analysis.result()["map"].float(), share / share.sum(-1, keepdim=True))


def test_rollout_refuses_sites_that_do_not_carry_the_same_tokens_on():
    analysis, heads = Rollout(), make_heads(tokens=5)
    with pytest.raises(UnsuitableSite, match="attention over tokens"):
        analysis.see(heads, make_site(heads, attends="windows"))
    analysis.see(heads, make_site(heads))
    other = make_heads(tokens=4)
    with pytest.raises(UnsuitableSite, match="follows 5 tokens"):
        analysis.see(other, make_site(other))


def test_without_a_class_token_rollout_averages_the_tokens():
    heads = uniform(make_heads(tokens=4))
    analysis = Rollout(residual=0.0)
    analysis.see(heads, make_site(heads))
    torch.testing.assert_close(analysis.result()["map"], torch.full((2, 4), 0.25, dtype=torch.float64))


def test_outliers_are_more_than_five_robust_deviations_longer_than_the_median():
    heads = make_heads(batch=1, heads=2)
    v = torch.zeros_like(heads.v)
    v[..., 0] = torch.tensor(
        [1, 2, 3, 4, 5, 6, 7, 8, 0], dtype=v.dtype
    )  # median 5 and median deviation 2 with a longer one
    v[0, 0, -1, 0], v[0, 1, -1, 0] = 5 + 14, 5 + 15  # 5 · 1.4826 · 2 = 14.8
    assert token_norms(heads._replace(v=v), make_site(heads))["outliers"].tolist() == [[0, pytest.approx(1 / 9)]]
