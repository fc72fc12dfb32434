"""initialise on timm's models: where it writes, what it leaves, what it refuses."""

from __future__ import annotations

import functools
import logging
from itertools import islice

import pytest
import timm
import torch
from beginnings import seeded, small_vit

from vitruvius._errors import ConfigError, NoSiteError, UnknownName, UnsuitableSite
from vitruvius.attention.base import attention_map
from vitruvius.init import bases
from vitruvius.init.impulse import draw_offsets, offset_of, quality
from vitruvius.surgery import record, rewire
from vitruvius.surgery.initialising import initialise, layers
from vitruvius.surgery.positions import use_sincos_positions


def state(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def first_maps(model):
    """Attention of the first block on an image whose patches are all black and weigh nothing: positions alone."""
    with torch.no_grad():
        model.patch_embed.proj.weight.zero_()
        model.patch_embed.proj.bias.zero_()
        with record(model, "blocks.0.attn") as seen:
            model(torch.zeros(1, 3, *model.patch_embed.img_size))
    return attention_map(seen["blocks.0.attn"])[0]  # (H, N, N)


MODELS = {
    "class token": {},
    "no class token": {"class_token": False, "global_pool": "avg"},
    "register tokens": {"reg_tokens": 4},
    "positions for patches only": {"reg_tokens": 2, "no_embed_class": True},
    "not square": {"img_size": (12, 16)},
    "normalised queries and keys": {"qk_norm": True},
    "no biases": {"qkv_bias": False},
}


@pytest.mark.parametrize("kwargs", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("sincos", [True, False], ids=["sincos", "learned"])
def test_in_the_model_every_head_attends_to_its_neighbour(kwargs, sincos):
    torch.manual_seed(1)
    model = small_vit(**kwargs)
    if sincos:
        use_sincos_positions(model)
    initialise(model, "impulse", offsets="cycle", generator=seeded())
    taps = draw_offsets(3, "cycle", seeded())
    prefix, grid = model.num_prefix_tokens, model.patch_embed.grid_size
    for attention, tap in zip(first_maps(model), islice(taps, 3), strict=True):
        assert quality(attention[prefix:, prefix:], grid, offset_of(tap, 3)).hits == 1.0
        if prefix:
            assert attention[prefix:, :prefix].sum(-1).mean() < 0.2


def test_without_a_base_nothing_but_q_k_and_their_biases_changes():
    model = small_vit()
    before = state(model)
    initialise(model, "impulse", generator=seeded())
    for key, value in model.state_dict().items():
        changed = not torch.equal(value, before[key])
        assert changed == (".attn.qkv." in key) or key.endswith("qkv.bias"), key
        if key.endswith("qkv.weight"):
            assert torch.equal(value[96:], before[key][96:])


def test_where_chooses_layers():
    model = small_vit()
    before = state(model)
    initialise(model, "mimetic", where="blocks.1.*", generator=seeded())
    changed = [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]
    assert changed == ["blocks.1.attn.qkv.weight", "blocks.1.attn.proj.weight"]


def test_a_base_comes_first_and_the_structure_on_top():
    model, alone = small_vit(), small_vit()
    initialise(model, "mimetic", base="skip", generator=seeded(3))
    initialise(alone, "skip", generator=seeded(3))
    assert torch.equal(model.blocks[0].mlp.fc1.weight, alone.blocks[0].mlp.fc1.weight)
    assert torch.equal(model.blocks[0].attn.qkv.bias, alone.blocks[0].attn.qkv.bias)
    assert not torch.equal(model.blocks[0].attn.qkv.weight, alone.blocks[0].attn.qkv.weight)


def test_a_base_may_carry_settings():
    model = small_vit()
    initialise(model, "impulse", base=functools.partial(bases["jax"], negative_log_head_bias=True), generator=seeded())
    torch.testing.assert_close(model.head.bias, torch.full((5,), -1.6094379))


def test_a_function_of_layers_is_an_init_too():
    def zeros(layers, *, value: float = 0.0, generator):
        for layer in layers:
            layer.weights.q.fill_(value)

    model = initialise(small_vit(), zeros, value=2.0, generator=seeded())
    assert (model.blocks[1].attn.qkv.weight[:48] == 2).all()


@pytest.mark.parametrize("name", ["impulse", "mimetic"])
def test_the_same_generator_gives_the_same_weights_and_global_randomness_is_not_touched(name):
    results = []
    for seed in (7, 7, 8):
        torch.manual_seed(0)
        model = small_vit()
        luck = torch.random.get_rng_state()
        initialise(model, name, generator=seeded(seed))
        assert torch.equal(torch.random.get_rng_state(), luck)
        results.append(model.blocks[1].attn.qkv.weight)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_without_a_generator_the_seed_is_zero():
    torch.manual_seed(0)
    expected, actual = small_vit(), small_vit()
    actual.load_state_dict(expected.state_dict())
    initialise(expected, "mimetic:alpha=0.6", generator=seeded(0))
    initialise(actual, "mimetic:alpha=0.6")
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[key], value, rtol=0, atol=0)


def test_half_precision_and_rewired_models_are_started_alike():
    torch.manual_seed(0)
    plain, half, rewired = small_vit(), small_vit(), small_vit()
    for model in (half, rewired):
        model.load_state_dict(plain.state_dict())
    half.bfloat16()
    rewire(rewired, "rpc", where="blocks.0.attn")
    for model in (plain, half, rewired):
        initialise(model, "mimetic", generator=seeded())
    expected = plain.blocks[0].attn.qkv.weight
    assert torch.equal(half.blocks[0].attn.qkv.weight, expected.bfloat16())
    assert torch.equal(rewired.blocks[0].attn.qkv.weight, expected)


def test_settings_of_a_recipe_are_checked():
    model = small_vit()
    for match, init, settings in (
        ("impulse.kernle'; did you mean 'kernel'", "impulse", {"kernle": 3}),
        ("offsets", "impulse", {"offsets": "sideways"}),
        ("base init: it starts the whole model", "jax", {"where": "blocks.0.attn"}),
        ("base init: it starts the whole model", "jax", {"base": "skip"}),
    ):
        with pytest.raises(ConfigError, match=match):
            initialise(model, init, generator=seeded(), **settings)
    with pytest.raises(UnknownName, match=r"no init named 'impuls'; did you mean 'impulse'\?.*Base inits: .*jax"):
        initialise(model, "impuls", generator=seeded())
    with pytest.raises(UnknownName, match="no base init named 'impulse'"):
        initialise(model, "mimetic", base="impulse", generator=seeded())
    with pytest.raises(NoSiteError, match="matches none"):
        initialise(model, "mimetic", where="block.*", generator=seeded())


def test_a_refusal_leaves_the_model_as_it_was_even_after_its_base():
    model = small_vit()
    before = state(model)
    with pytest.raises(ConfigError, match="kernel=7 does not fit on the 6×6 grid"):
        initialise(model, "impulse", kernel=7, base="skip", generator=seeded())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


NO_POSITIONS = {
    "built without": (lambda: small_vit(pos_embed="none"), "no table of absolute positions"),
    "windows": (lambda: timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1)), "needs attention over"),
    "rotary": (
        lambda: timm.create_model("eva02_tiny_patch14_224", depth=1, img_size=56),
        "turns queries and keys by rotary positions",
    ),
    "talking heads": (
        lambda: timm.create_model("cait_xxs24_224", depth=1, img_size=64),
        "mixes the logits of its heads",
    ),
    "channels": (lambda: timm.create_model("xcit_nano_12_p16_224", depth=1), "attends over channels"),
}


@pytest.mark.parametrize("case", NO_POSITIONS)
def test_models_without_a_table_of_positions_are_refused_with_a_reason(case):
    make, reason = NO_POSITIONS[case]
    with pytest.raises(UnsuitableSite, match=reason):
        initialise(make(), "impulse", where="blocks.0.*" if case == "talking heads" else "*", generator=seeded())


def test_a_model_that_sees_another_grid_than_its_table_is_refused():
    model = small_vit(dynamic_img_size=True)
    with pytest.raises(UnsuitableSite, match="made for a 6×6 grid"):
        initialise(model, "impulse", input_size=(3, 16, 16), generator=seeded())


def test_it_says_what_stayed_as_it_was(caplog):
    with caplog.at_level(logging.DEBUG, logger="vitruvius"):
        initialise(small_vit(init_values=1.0), "timm", generator=seeded())
    assert "blocks.0.ls1.gamma" in caplog.text
    assert "qkv.weight" not in caplog.text


def test_layers_of_one_model_share_one_table():
    first, second = layers(small_vit())
    assert first.positions is second.positions
    assert first.positions.shape == (36, 48)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("name", ["impulse", "mimetic", "impulse_optimised", "timm", "skip", "jax", "orthogonal"])
def test_an_accelerator_gets_the_weights_a_cpu_gets(name):
    torch.manual_seed(0)
    here, there = small_vit(), small_vit()
    there.load_state_dict(here.state_dict())
    there.to(torch.accelerator.current_accelerator())
    settings = {"steps": 5} if name == "impulse_optimised" else {}
    for model in (here, there):
        initialise(model, name, generator=seeded(), **settings)
    for (key, expected), found in zip(here.named_parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(
            found.cpu(), expected, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )
