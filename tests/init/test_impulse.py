"""The closed form: what the issue asks of it, the formula it claims to solve, and what it refuses."""

from __future__ import annotations

import math
import time
from itertools import islice

import pytest
import torch
from beginnings import attention_of, make_layers, seeded, sincos

from vitruvius._errors import ConfigError, UnsuitableSite
from vitruvius.init import inits
from vitruvius.init.impulse import bump, draw_offsets, impulse_map, offset_of, quality

impulse = inits["impulse"]
RELEASED_PROBABILITY = 0.36  # best head of the released optimisation, and its norms on the 16×16 grid
RELEASED_NORM = 5.3 * 8.8


def qualities(layers, x, kernel, order="cycle", seed=0):
    taps = draw_offsets(kernel, order, seeded(seed))
    for layer in layers:
        maps = attention_of(layer, x)
        offsets = [offset_of(tap, kernel) for tap in islice(taps, len(maps))]
        yield from (quality(a, layer.site.grid, o) for a, o in zip(maps, offsets, strict=True))


@pytest.mark.parametrize("kernel", [3, 5])
def test_every_head_of_twelve_layers_finds_its_neighbour_better_than_the_optimisation_in_a_second(kernel):
    positions = sincos(16, 16, 192).float()
    layers = make_layers(positions, (16, 16), depth=12)
    began = time.process_time()
    impulse(layers, kernel=kernel, offsets="cycle", generator=seeded())
    assert time.process_time() - began < 1.0
    for found in qualities(layers, positions, kernel):
        assert found.hits == 1.0
        assert found.probability > 1.5 * RELEASED_PROBABILITY
    for layer in layers:
        assert (layer.weights.q.norm(dim=(1, 2)) * layer.weights.k.norm(dim=(1, 2)) < RELEASED_NORM).all()


def test_it_keeps_its_neighbour_under_content_where_the_optimisation_loses_it():
    positions = sincos(16, 16, 192).float()
    layers = make_layers(positions, (16, 16), depth=3)
    impulse(layers, offsets="cycle", generator=seeded())
    noise = torch.randn(positions.shape, generator=seeded(1))
    for std, released_hits, released_probability in ((0.1, 0.39, 0.24), (0.577, 0.09, 0.07)):
        found = torch.tensor(list(qualities(layers, positions + std * noise, 3)))
        assert found[:, 0].mean() > 2 * released_probability
        assert found[:, 1].mean() > 2 * released_hits


@pytest.mark.parametrize("grid", [(4, 4), (7, 5), (5, 12), (14, 14)])
@pytest.mark.parametrize("kind", ["sincos", "learned"])
def test_other_grids_and_learned_positions_work(grid, kind):
    tokens = grid[0] * grid[1]
    learned = 0.02 * torch.randn(tokens, 96, generator=seeded(), dtype=torch.float64)
    positions = sincos(*grid, 96) if kind == "sincos" else learned
    layers = make_layers(positions, grid, dim=96, depth=3)
    impulse(layers, generator=seeded(2))
    found = list(qualities(layers, positions, 3, "distinct", 2))
    assert min(f.hits for f in found) >= (1.0 if kind == "sincos" else 0.95)  # 196 random vectors in 96 dimensions
    assert min(f.probability for f in found) > 10 / tokens


def test_prefix_tokens_are_no_part_of_the_grid():
    positions = sincos(6, 6, 96)
    layers = make_layers(positions, (6, 6), dim=96, num_queries=41, num_keys=41, num_prefix_tokens=5)
    impulse(layers, generator=seeded(2))
    assert min(f.hits for f in qualities(layers, positions, 3, "distinct", 2)) == 1.0


def test_full_rank_weights_are_the_ridge_regression_they_claim_to_be():
    """With room for every direction, gradients of the expected error vanish."""
    content, grid = 0.7, (4, 5)
    positions = torch.randn(20, 12, generator=seeded(), dtype=torch.float64)
    layers = make_layers(positions, grid, num_heads=1, dim=12, depth=1)
    impulse(layers, kernel=1, content=content, width=0.6, generator=seeded())
    x = torch.nn.functional.layer_norm(positions, (12,))
    keys, wanted = x - x.mean(0), bump(grid, (0, 0), 0.6)
    wanted = wanted - wanted.mean(-1, keepdim=True)
    product = layers[0].weights.q[0].mT @ layers[0].weights.k[0]
    product.requires_grad_()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)  # the norm is ours to choose, not the regression's
    m = scale * product
    noise = 20 * content**2
    loss = (x @ m @ keys.mT - wanted).square().sum() + noise * ((m @ keys.mT).square().sum() + (x @ m).square().sum())
    loss = loss + noise**2 * m.square().sum()
    (slope,) = torch.autograd.grad(loss, scale, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, scale, retain_graph=True)
    best = scale.detach() - (slope / curvature).detach()
    m = (best * product.detach()).requires_grad_()
    loss = (x @ m @ keys.mT - wanted).square().sum() + noise * ((m @ keys.mT).square().sum() + (x @ m).square().sum())
    (gradient,) = torch.autograd.grad(loss + noise**2 * m.square().sum(), m)
    axes = torch.linalg.svd(keys, full_matrices=False)[2][:11]  # directions keys do not have stay free
    assert (gradient @ axes.mT).abs().max() < 1e-9


def test_the_expected_error_is_the_one_the_docstring_states():
    """A Monte-Carlo check of the sentence the regression rests on."""
    gen = seeded(5)
    x, m, target = (torch.randn(*s, generator=gen, dtype=torch.float64) for s in ((6, 4), (4, 4), (6, 6)))
    content, draws = 0.5, 40_000
    left, right = (x + content * torch.randn(draws, 6, 4, generator=gen, dtype=torch.float64) for _ in range(2))
    sampled = (left @ m @ right.mT - target).square().sum((1, 2)).mean()
    noise = 6 * content**2
    stated = (x @ m @ x.mT - target).square().sum() + noise * ((m @ x.mT).square().sum() + (x @ m).square().sum())
    assert float(sampled) == pytest.approx(float(stated + noise**2 * m.square().sum()), rel=0.02)


def test_q_and_k_are_balanced_and_of_the_norm_asked_for():
    layers = make_layers(sincos(8, 8, 96), (8, 8), dim=96)
    for norm, expected in ((None, math.sqrt(32 * 96) / 3), (5.0, 5.0)):
        impulse(layers, norm=norm, generator=seeded())
        for w in (layers[0].weights.q, layers[1].weights.k):
            torch.testing.assert_close(w.norm(dim=(1, 2)), torch.full((3,), expected**0.5, dtype=w.dtype))
    for q, k in zip(layers[0].weights.q, layers[0].weights.k, strict=True):
        torch.testing.assert_close(q @ q.mT, k @ k.mT)
        assert torch.linalg.svdvals(q.mT @ k).sum() == pytest.approx(5.0)


def test_without_width_the_target_is_the_plain_impulse():
    assert torch.equal(bump((3, 4), (1, 0), 0.0), impulse_map((3, 4), (1, 0)))
    torch.testing.assert_close(bump((3, 4), (1, 0), 1e-3), impulse_map((3, 4), (1, 0)))
    assert bump((3, 4), (1, 0), 0.5)[0, 5] == pytest.approx(math.exp(-2))  # one column beside the target 4


def test_only_q_k_and_their_biases_change():
    (layer,) = make_layers(sincos(6, 6, 96), (6, 6), dim=96, depth=1)
    impulse([layer], generator=seeded())
    assert (layer.weights.v == 7).all()
    assert (layer.weights.out == 7).all()
    assert (layer.weights.v_bias == 7).all()
    assert not layer.weights.q_bias.any()
    assert not layer.weights.k_bias.any()


def test_shared_offsets_make_equal_layers_and_others_do_not():
    positions = sincos(6, 6, 96)
    for shared in (True, False):
        layers = make_layers(positions, (6, 6), dim=96)
        impulse(layers, shared=shared, generator=seeded(1))
        assert torch.equal(layers[0].weights.q, layers[1].weights.q) is shared


@pytest.mark.parametrize("kind", ["U", "G", "A", "B"])
def test_pseudo_inputs_change_the_fit_from_the_second_layer_on_or_in_the_first_alone(kind):
    positions = sincos(6, 6, 96)
    plain, first, rest = (make_layers(positions, (6, 6), dim=96) for _ in range(3))
    impulse(plain, shared=True, offsets="cycle", generator=seeded(1))
    impulse(first, shared=True, offsets="cycle", first=kind, generator=seeded(1))
    impulse(rest, offsets="cycle", rest=kind, generator=seeded(1))
    assert not torch.equal(first[0].weights.q, plain[0].weights.q)
    assert torch.equal(rest[0].weights.q, plain[0].weights.q)
    assert not torch.equal(rest[1].weights.q, plain[1].weights.q)


def refused(layers, error, match, **settings):
    with pytest.raises(error, match=match):
        impulse(layers, generator=seeded(), **settings)
    assert all((layer.weights.q == 7).all() for layer in layers), "a refusal must leave the weights alone"


def test_impossible_settings_are_refused():
    layers = make_layers(sincos(6, 4, 96), (6, 4), dim=96)
    refused(layers, ConfigError, "kernel=4, expected an odd number", kernel=4)
    refused(layers, ConfigError, "kernel=0", kernel=0)
    refused(layers, ConfigError, r"kernel=5 does not fit on the 6×4 grid", kernel=5)
    refused(layers, ConfigError, "content=-1", content=-1.0)
    refused(layers, ConfigError, "norm=0", norm=0.0)
    refused(layers, ConfigError, "pseudo-input 'Q'", first="Q")
    wide = make_layers(sincos(16, 16, 192), (16, 16))
    refused(wide, UnsuitableSite, "content=0: .* content near 1", content=0.0, width=0.0)


def test_unsuitable_layers_are_refused():
    positions = sincos(6, 6, 96)
    refused(
        make_layers(positions, (6, 6), dim=96, head_dim=2), UnsuitableSite, "heads of width 2 .* cannot hold an impulse"
    )
    refused(make_layers(positions, (6, 6), dim=96, num_queries=40, num_keys=40), UnsuitableSite, "40 tokens, but a 6×6")
    refused(make_layers(positions, (6, 5), dim=96), UnsuitableSite, r"\(36, 96\); a 6×5 grid")
    refused(make_layers(None, (6, 6), dim=96), UnsuitableSite, "adds no position table")
    refused(make_layers(positions, None, dim=96), UnsuitableSite, "no known grid")
    refused(make_layers(torch.ones(36, 96), (6, 6), dim=96), UnsuitableSite, "are all the same")
    refused(make_layers(positions, (6, 6), dim=96, attends="channels"), UnsuitableSite, "needs attention over tokens")
    refused(make_layers(positions, (6, 6), dim=96, num_queries=1), UnsuitableSite, "self-attention")


def test_sharing_among_layers_of_different_size_is_refused():
    layers = make_layers(sincos(6, 6, 96), (6, 6), dim=96, depth=1) + make_layers(sincos(4, 4, 96), (4, 4), dim=96)
    refused(layers, ConfigError, "layers of one size", shared=True)
