"""Mimetic: the released weights from numpy's seed, and the transposed pair of the paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from beginnings import make_layers, seeded

from golden_files import read_golden
from vitruvius._errors import ConfigError, UnsuitableSite
from vitruvius.init import inits
from vitruvius.init.mimetic import near_identity, write_queries_and_keys, write_values

GOLDEN, META = read_golden("mimetic")
mimetic = inits["mimetic"]


def from_numpy(seed):
    """The released source of noise: numpy's legacy stream."""
    stream = np.random.RandomState(seed)
    return lambda dim: torch.from_numpy(stream.uniform(-((3 / dim) ** 0.5), (3 / dim) ** 0.5, (dim, dim)))


def released_layers(dtype=torch.float64):
    sizes = {"dim": META["dim"], "num_heads": META["heads"], "depth": META["depth"]}
    layers = make_layers(torch.empty(0, dtype=dtype), (4, 4), **sizes)
    noise = from_numpy(META["numpy_seed"])
    write_queries_and_keys(layers, META["alpha"], META["beta"], noise)
    write_values(layers, META["alpha_v"], META["beta_v"], noise, transpose=False)
    return layers


def test_the_released_variant_matches_the_released_weights_from_numpys_seed():
    for i, layer in enumerate(released_layers()):
        q, k, v, out = layer.weights[:4]
        for h in range(META["heads"]):
            torch.testing.assert_close(q[h].mT @ k[h], GOLDEN[f"blocks.{i}.head{h}.qk_product"], rtol=0, atol=1e-6)
        v, out = v.flatten(0, 1), out.flatten(1)
        torch.testing.assert_close(v @ out, GOLDEN[f"blocks.{i}.V_times_proj"], rtol=0, atol=1e-6)
        torch.testing.assert_close(out @ v, GOLDEN[f"blocks.{i}.proj_times_V"], rtol=0, atol=1e-6)
        torch.testing.assert_close(v @ out, GOLDEN["A_vproj"][i], rtol=0, atol=1e-12)


def test_weights_agree_entry_by_entry_up_to_the_signs_of_singular_vectors():
    dim = META["dim"]
    for i, layer in enumerate(released_layers(torch.float32)):
        ours = torch.cat([w.flatten(0, 1) for w in layer.weights[:3]])
        theirs = GOLDEN[f"blocks.{i}.qkv.weight"]
        torch.testing.assert_close(ours[: 2 * dim].abs(), theirs[: 2 * dim].abs(), rtol=0, atol=1e-6)
        torch.testing.assert_close(ours[2 * dim :].abs(), theirs[2 * dim :].abs(), rtol=0, atol=1e-6)


def test_noise_and_identity_are_the_golden_ones():
    noise = from_numpy(META["numpy_seed"])
    for expected in (*GOLDEN["A_qk"].flatten(0, 1), *GOLDEN["A_vproj"]):
        sign = 1 if expected.trace() > 0 else -1
        weight = (META["alpha"], META["beta"]) if sign > 0 else (META["alpha_v"], META["beta_v"])
        assert torch.equal(near_identity(noise(META["dim"]), weight[0], sign * weight[1]), expected)


def test_the_paper_variant_applies_the_negative_identity_and_the_released_one_a_falling_diagonal():
    diagonals = {}
    for variant in ("paper", "released"):
        (layer,) = make_layers(torch.empty(0, dtype=torch.float64), (4, 4), dim=96, depth=1)
        mimetic([layer], variant=variant, generator=seeded())
        applied = layer.weights.out.flatten(1) @ layer.weights.v.flatten(0, 1)  # what the network does to a token
        diagonals[variant] = applied.diagonal()
    assert diagonals["paper"].mean() == pytest.approx(-0.4, abs=0.02)
    assert diagonals["released"].mean() == pytest.approx(float(diagonals["paper"].mean()), abs=1e-6)
    assert diagonals["paper"].std() < 0.06
    assert diagonals["released"][:8].mean() < -0.7
    assert diagonals["released"][-8:].mean() > -0.1


def test_statistics_are_those_of_the_specification():
    (layer,) = make_layers(torch.empty(0, dtype=torch.float64), (4, 4), depth=1)  # C = 192, D = 64
    mimetic([layer], generator=seeded())
    for q, k in zip(layer.weights.q, layer.weights.k, strict=True):
        product = q.mT @ k
        assert product.diagonal().mean() == pytest.approx(0.398, abs=0.02)
        assert (product - product.diagonal().diag()).std() == pytest.approx(0.052, abs=0.005)
        assert q.norm() == pytest.approx(9.5, abs=0.2)
        values = torch.linalg.svdvals(product)
        assert values[0] == pytest.approx(1.79, abs=0.1)
        assert values[63] == pytest.approx(1.13, abs=0.05)
    assert (layer.weights.q_bias == 7).all()


def test_settings_do_what_they_say():
    made = []
    for settings in ({}, {"beta": 0.0}, {"value_beta": 0.0}, {"alpha": 0.1}, {"value_alpha": 0.1}):
        (layer,) = make_layers(torch.empty(0, dtype=torch.float64), (4, 4), dim=48, depth=1)
        mimetic([layer], generator=seeded(), **settings)
        qk = layer.weights.q[0].mT @ layer.weights.k[0]
        applied = layer.weights.out.flatten(1) @ layer.weights.v.flatten(0, 1)
        made.append((float(qk.trace()) / 48, float(applied.trace()) / 48))
    plain = made[0]
    assert abs(made[1][0]) < 0.5 * plain[0]
    assert made[1][1] == plain[1]
    assert made[2][0] == plain[0]
    assert abs(made[2][1]) < 0.2 * abs(plain[1])
    assert made[3] != plain
    assert made[3][1] == plain[1]
    assert made[4][0] == plain[0]
    assert made[4][1] != plain[1]


def test_unsuitable_sites_and_settings_are_refused():
    positions = torch.empty(0)
    with pytest.raises(ConfigError, match="'paper' or 'released'"):
        mimetic(make_layers(positions, (4, 4), dim=48), variant="other", generator=seeded())
    with pytest.raises(UnsuitableSite, match="attends over channels"):
        mimetic(make_layers(positions, (4, 4), dim=48, attends="channels"), generator=seeded())
    with pytest.raises(UnsuitableSite, match="as wide as the model"):
        mimetic(make_layers(positions, (4, 4), dim=48, value_dim=32), generator=seeded())
