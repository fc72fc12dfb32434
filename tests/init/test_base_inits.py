"""Base inits: timm's own rules to the bit where timm has them, and what they leave alone."""

from __future__ import annotations

import copy

import pytest
import torch
from beginnings import seeded, small_vit
from torch import nn

from vitruvius._errors import ConfigError
from vitruvius.init import bases
from vitruvius.surgery.initialising import initialise
from vitruvius.surgery.positions import use_sincos_positions
from vitruvius.surgery.rewiring import rewire

WHOLE = [name for name in bases if name != "impulse_filters"]  # which starts depth-wise convolutions alone
UPSTREAM = {  # our name and settings, timm's mode
    "timm": ("timm", {}, ""),
    "jax": ("jax", {}, "jax"),
    "jax_nlhb": ("jax", {"negative_log_head_bias": True}, "jax_nlhb"),
    "moco": ("moco", {}, "moco"),
}


def spoilt(model):
    """Every parameter at three, so that what a start leaves alone is seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    return model


@pytest.mark.parametrize(("name", "settings", "mode"), UPSTREAM.values(), ids=UPSTREAM)
def test_a_seed_gives_the_weights_timm_draws_from_it(name, settings, mode):
    theirs, ours = small_vit(reg_tokens=2), spoilt(small_vit(reg_tokens=2))
    theirs.weight_init_mode = ""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        theirs.init_weights(mode, needs_reset=True)
    initialise(ours, name, generator=seeded(11), **settings)
    for (key, expected), found in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")


def test_skip_is_what_constructors_draw():
    model = spoilt(nn.Sequential(nn.Conv2d(3, 8, 2), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 4, bias=False)))
    bases["skip"](model, generator=seeded(5))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        expected = nn.Sequential(nn.Conv2d(3, 8, 2), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 4, bias=False))
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_skip_zeroes_tokens_and_draws_positions():
    model = spoilt(small_vit(reg_tokens=2))
    initialise(model, "skip", generator=seeded())
    assert not model.cls_token.any()
    assert not model.reg_token.any()
    assert model.pos_embed.detach().std() == pytest.approx(0.02, rel=0.1)


def test_trunc_normal_has_its_std_and_its_cut():
    model = spoilt(small_vit())
    initialise(model, "trunc_normal", std=0.1, generator=seeded())
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            assert module.weight.abs().max() <= 0.2
            assert not module.bias.any()
    assert model.blocks[0].mlp.fc1.weight.detach().std() == pytest.approx(
        0.088, rel=0.03
    )  # the std after cutting at two std


def test_no_number_drawn_makes_a_weight_of_a_hundred_deviations():
    layer = nn.Linear(64, 64, bias=False)
    generator = torch.Generator().manual_seed(2313)  # one of its first 4,096 uniform numbers is -1 itself
    assert torch.empty(4096).uniform_(-1, 1, generator=generator).min() == -1
    initialise(layer, "timm", generator=generator.manual_seed(2313))
    assert layer.weight.abs().max() < 6 * 0.02


def test_orthogonal_makes_orthonormal_rows_or_columns_and_q_k_v_apart():
    model = spoilt(small_vit())
    initialise(model, "orthogonal", gain=2.0, generator=seeded())
    block = model.blocks[0]
    for part in block.attn.qkv.weight.chunk(3):
        torch.testing.assert_close(part @ part.mT, 4 * torch.eye(48), rtol=0, atol=1e-5)
    wide = block.mlp.fc1.weight  # (192, 48)
    torch.testing.assert_close(wide.mT @ wide, 4 * torch.eye(48), rtol=0, atol=1e-5)
    tall = block.mlp.fc2.weight  # (48, 192)
    torch.testing.assert_close(tall @ tall.mT, 4 * torch.eye(48), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", WHOLE)
def test_every_base_is_reproducible_and_reaches_every_weight_it_knows(name):
    first, again, other = (spoilt(small_vit(init_values=1e-5)) for _ in range(3))
    for model, seed in ((first, 1), (again, 1), (other, 2)):
        initialise(model, name, generator=seeded(seed))
    for (key, a), b in zip(first.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
        assert key.endswith("gamma") or not (a == 3).all(), f"{key} was left alone"
    assert not torch.equal(first.blocks[0].attn.qkv.weight, other.blocks[0].attn.qkv.weight)
    assert (first.blocks[0].ls1.gamma == 3).all(), "layer scales are not a base's business"


@pytest.mark.parametrize("name", WHOLE)
def test_frozen_positions_and_plugged_parts_are_left_alone(name):
    model = use_sincos_positions(small_vit())
    table = model.pos_embed.clone()
    rewire(model, "low_rank")
    parts = copy.deepcopy({key: p for key, p in model.named_parameters() if ".core." in key})
    initialise(model, name, generator=seeded())
    assert torch.equal(model.pos_embed, table)
    assert parts
    assert all(torch.equal(p, model.get_parameter(key)) for key, p in parts.items())


def test_impossible_sizes_are_refused():
    for name, settings in (("trunc_normal", {"std": 0.0}), ("orthogonal", {"gain": -1.0})):
        with pytest.raises(ConfigError, match="expected a positive number"):
            bases[name](small_vit(), generator=seeded(), **settings)
