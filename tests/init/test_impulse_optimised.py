"""The released optimisation, step by step against the golden run, and its statistics over seeds."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from beginnings import attention_of, make_layers, seeded, sincos

from golden_files import read_golden
from vitruvius._errors import ConfigError
from vitruvius.init import inits
from vitruvius.init.impulse import Task, offset_of, quality
from vitruvius.init.impulse_optimised import attention, optimise, start

RUN, RUN_META = read_golden("impulse_opt")
STATS, STATS_META = read_golden("impulse_stats")
LAYOUT, LAYOUT_META = read_golden("impulse_layout")
impulse_optimised = inits["impulse_optimised"]
MODULE = sys.modules[optimise.__module__]


def golden_problem():
    dim = RUN_META["dim"]
    return F.layer_norm(RUN["pos_embed"], (dim,)), RUN["target"].double(), RUN["Q_init"], RUN["K_init"]


@pytest.mark.parametrize("steps", [2, 101])
def test_weights_follow_the_released_run_through_a_renormalisation(steps):
    q, k, _ = optimise(*golden_problem(), steps=steps, learning_rate=RUN_META["lr"])
    torch.testing.assert_close(q, RUN[f"Q_after{steps}"], rtol=0, atol=1e-12)
    torch.testing.assert_close(k, RUN[f"K_after{steps}"], rtol=0, atol=1e-12)


def test_losses_are_those_of_the_released_run():
    wanted = {int(i): float(loss) for i, loss in zip(RUN["loss_iters"], RUN["loss_at"], strict=True) if i <= 101}
    seen = {}
    optimise(*golden_problem(), steps=102, watch=lambda step, loss: seen.__setitem__(step, float(loss)))
    for step, loss in wanted.items():
        assert seen[step] == pytest.approx(loss, rel=1e-12)


def test_the_released_final_weights_have_the_statistics_we_measure():
    """Our measures agree with those stored beside the run."""
    x, target, *_ = golden_problem()
    maps = attention(x, RUN["Q_final"], RUN["K_final"])
    grid, kernel = tuple(RUN_META["grid"]), RUN_META["kernel"]
    found = [quality(a, grid, offset_of(int(k), kernel)) for a, k in zip(maps, RUN["k"], strict=True)]
    torch.testing.assert_close(torch.tensor([f.mse for f in found]).double(), RUN["mse_final_per_head"])
    rows = target.sum((1, 2))
    probability = (torch.tensor([f.probability for f in found]) * rows).sum() / rows.sum()
    hits = (torch.tensor([f.hits for f in found]) * rows).sum() / rows.sum()
    assert float(probability) == pytest.approx(float(RUN["mass_on_target_mean"]), rel=1e-6)
    assert float(hits) == pytest.approx(float(RUN["argmax_agreement"]), rel=1e-6)


@pytest.mark.parametrize("row", range(len(STATS_META["seeds"])))
def test_a_seed_draws_the_offsets_and_weights_it_drew_in_the_released_code(row):
    grid, dim, heads, kernel = (STATS_META[key] for key in ("grid", "dim", "heads", "kernel"))
    generator = seeded(STATS_META["seeds"][row])
    taps = [int(torch.randint(kernel**2, (1,), generator=generator)) for _ in range(heads)]
    assert taps == STATS["k"][row].tolist()
    inputs = F.layer_norm(sincos(*grid, dim).float(), (dim,))
    offsets = [offset_of(tap, kernel) for tap in taps]
    q, k = start(Task(inputs, tuple(grid), offsets, dim // heads, "here"), generator)
    maps = attention(inputs, q, k)
    mse = sum(quality(a, tuple(grid), o).mse for a, o in zip(maps, offsets, strict=True)) / heads
    assert mse == pytest.approx(float(STATS["mse_init"][row]), rel=1e-5)


def test_a_thousand_steps_from_a_seed_reach_the_released_loss():
    grid, dim, heads = (STATS_META[key] for key in ("grid", "dim", "heads"))
    positions = sincos(*grid, dim).float()
    layers = make_layers(positions, tuple(grid), dim=dim, num_heads=heads)
    impulse_optimised(layers, steps=1000, kernel=STATS_META["kernel"], generator=seeded(0))
    maps = attention_of(layers[0], positions)
    offsets = [offset_of(int(tap), 3) for tap in STATS["k"][0]]
    mse = sum(quality(a, tuple(grid), o).mse for a, o in zip(maps, offsets, strict=True)) / heads
    assert mse < float(STATS["loss_every_1000"][0, 1])  # measured just after a renormalisation, which lifts it
    assert mse == pytest.approx(float(STATS["loss_every_1000"][0, 1]), rel=0.05)
    assert torch.equal(layers[0].weights.q, layers[1].weights.q)


def test_q_and_k_are_written_where_the_released_code_writes_them(monkeypatch):
    made = LAYOUT["made0.Q"], LAYOUT["made0.K"], 0.0
    monkeypatch.setattr(MODULE, "optimise", lambda *args, **kwargs: made)
    side = LAYOUT_META["img"] // LAYOUT_META["patch"]
    layers = make_layers(
        LAYOUT["pos_embed"], (side, side), dim=LAYOUT_META["dim"], num_heads=LAYOUT_META["heads"],
        depth=LAYOUT_META["depth"],
    )  # fmt: skip
    impulse_optimised(layers, kernel=LAYOUT_META["kernel"], generator=seeded())
    for i, layer in enumerate(layers):
        written = torch.cat([layer.weights.q.flatten(0, 1), layer.weights.k.flatten(0, 1)])
        assert torch.equal(written, LAYOUT[f"blocks.{i}.qk_weight"])
        assert (layer.weights.q_bias == 7).all()
        assert (layer.weights.v == 7).all()


def test_the_symmetric_variant_keeps_q_and_k_of_one_size():
    problem = golden_problem()
    sizes = {}
    for variant in ("released", "symmetric"):
        q, k, _ = optimise(*problem, steps=1, variant=variant)
        sizes[variant] = float(k.norm() / q.norm())
    assert sizes["symmetric"] == pytest.approx(1.0, abs=0.01)
    assert sizes["released"] == pytest.approx(3**0.5, abs=0.01)  # √(C/D)


def test_it_stops_when_the_loss_no_longer_falls(monkeypatch):
    monkeypatch.setattr(MODULE, "WINDOW", 2)
    x, target = sincos(2, 2, 4), torch.eye(4, dtype=torch.float64)[None]
    q, k = torch.randn(2, 1, 4, 4, generator=seeded(), dtype=torch.float64)
    counts = []
    for tolerance in (0.0, 0.5):
        steps: list[int] = []
        optimise(x, target, q, k, steps=500, tolerance=tolerance, watch=lambda step, _, into=steps: into.append(step))
        counts.append(len(steps))
    assert counts == [500, 300]  # a window of two hundred after the first hundred


def test_impossible_settings_are_refused():
    layers = make_layers(sincos(6, 6, 48), (6, 6), dim=48)
    for settings, match in (({"steps": 0}, "steps=0"), ({"variant": "mine"}, "'released' or 'symmetric'")):
        with pytest.raises(ConfigError, match=match):
            impulse_optimised(layers, generator=seeded(), **settings)
    with pytest.raises(ConfigError, match="odd number"):
        impulse_optimised(layers, kernel=2, steps=1, generator=seeded())
