"""ConvMixer's filters: their shapes and norms, sharing that survives a checkpoint, freezing."""

from __future__ import annotations

import copy

import pytest
import torch
from beginnings import seeded, small_vit
from timm.models.convmixer import ConvMixer

from vitruvius._errors import ConfigError, SurgeryError
from vitruvius.init.filters import filters
from vitruvius.surgery.convmixer import SharedFilters, plain_filters, use_filters

SETTINGS = {"random": {}, "softmax": {}, "impulse": {}, "box": {"taps": 4}, "gauss": {"variance": 0.5}}


def mixer(**kwargs):
    return ConvMixer(dim=12, depth=2, kernel_size=3, patch_size=2, num_classes=4, **kwargs).eval()


def depthwise(model, block=0):
    return model.blocks[block][0].fn[0]


X = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(9))


def test_every_kind_is_covered_here():
    assert set(filters) == set(SETTINGS)


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("kind", ["impulse", "box", "gauss"])
def test_structured_filters_have_a_mean_squared_norm_of_one_over_their_size(kind, size):
    made = filters[kind](500, size, generator=seeded(), **SETTINGS[kind])
    assert made.square().sum((1, 2)).mean() == pytest.approx(1 / size, rel=1e-5)


def test_random_filters_have_a_squared_norm_of_one_third():
    made = filters["random"](4000, 5, generator=seeded())
    assert made.square().sum((1, 2)).mean() == pytest.approx(1 / 3, rel=0.02)
    assert made.abs().max() <= 1 / 5


def test_boxes_have_distinct_taps_and_one_tap_is_an_impulse():
    made = filters["box"](200, 3, taps=4, generator=seeded())
    assert ((made != 0).sum((1, 2)) == 4).all()
    assert len({tuple(f.flatten().tolist()) for f in made}) > 60
    assert torch.equal(filters["box"](9, 3, taps=1, generator=seeded(1)), filters["impulse"](9, 3, generator=seeded(1)))
    assert (filters["box"](2, 3, taps=9, generator=seeded()) == 27**-0.5).all()


def test_gauss_is_a_bump_around_a_tap():
    made = filters["gauss"](50, 5, variance=0.5, generator=seeded())
    for bump in made:
        y, x = divmod(int(bump.argmax()), 5)
        for row in range(5):
            for column in range(5):
                expected = torch.exp(torch.tensor(-((row - y) ** 2 + (column - x) ** 2) / 1.0))
                torch.testing.assert_close(bump[row, column] / bump[y, x], expected)
    assert len({int(b.argmax()) for b in made}) > 15


@pytest.mark.parametrize("kind", [k for k in SETTINGS if k != "softmax"])
def test_one_filter_a_channel_keeps_upstreams_modules_and_keys(kind):
    model = use_filters(mixer(), kind, generator=seeded(), **SETTINGS[kind])
    mixer().load_state_dict(model.state_dict())
    assert type(depthwise(model)) is torch.nn.Conv2d
    assert not torch.equal(depthwise(model, 0).weight, depthwise(model, 1).weight)


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_reloaded_model_is_the_model_that_was_saved_and_so_is_one_with_its_filters_written_out(kind):
    saved = use_filters(mixer(), kind, num_filters=3, generator=seeded(1), **SETTINGS[kind])
    loaded = use_filters(mixer(), kind, num_filters=3, generator=seeded(2), **SETTINGS[kind])
    assert not torch.equal(depthwise(saved).choice, depthwise(loaded).choice)
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(loaded(X), saved(X))
    plain = mixer()  # which timm alone reads
    plain.load_state_dict(plain_filters(copy.deepcopy(saved)).state_dict())
    torch.testing.assert_close(plain(X), saved(X))


def test_each_channel_is_convolved_with_the_filter_it_chose():
    model = use_filters(mixer(), "random", num_filters=3, generator=seeded())
    layer, x = depthwise(model), torch.randn(1, 12, 6, 6)
    out = layer(x)
    assert isinstance(layer, SharedFilters)
    for c in range(12):
        kernel = layer.weight[layer.choice[c]][None]
        expected = torch.nn.functional.conv2d(x[:, c : c + 1], kernel, layer.bias[c : c + 1], padding=1)
        torch.testing.assert_close(out[:, c : c + 1], expected)
    assert set(layer.choice.tolist()) <= {0, 1, 2}


def test_softmax_filters_are_averages_and_learn():
    model = use_filters(mixer(), "softmax", generator=seeded())
    layer = depthwise(model)
    torch.testing.assert_close(layer.taps().sum((1, 2, 3)), torch.ones(12))
    model(X).sum().backward()
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("num_filters", [None, 4])
def test_frozen_filters_and_biases_get_no_gradient_and_all_else_does(num_filters):
    model = use_filters(mixer(), "impulse", num_filters=num_filters, trainable=False, generator=seeded())
    model(X).sum().backward()
    without = [key for key, p in model.named_parameters() if p.grad is None]
    assert without == [f"blocks.{i}.0.fn.0.{kind}" for i in range(2) for kind in ("weight", "bias")]


def test_filters_can_be_chosen_anew():
    model = use_filters(mixer(), "softmax", num_filters=3, trainable=False, generator=seeded())
    use_filters(model, "box", taps=2, generator=seeded())
    mixer().load_state_dict(model.state_dict())
    assert depthwise(model).weight.requires_grad


def test_impossible_requests_are_refused():
    with pytest.raises(SurgeryError, match="this is a VisionTransformer"):
        use_filters(small_vit(), "impulse", generator=seeded())
    for match, kind, settings in (
        ("num_filters=13, expected 1 to 12", "impulse", {"num_filters": 13}),
        ("num_filters=0", "impulse", {"num_filters": 0}),
        ("taps=10, expected 1 to 9", "box", {"taps": 10}),
        ("box.taps is missing", "box", {}),
        ("variance=0", "gauss", {"variance": 0.0}),
    ):
        with pytest.raises(ConfigError, match=match):
            use_filters(mixer(), kind, generator=seeded(), **settings)
    with pytest.raises(ConfigError, match="generator="):
        use_filters(mixer(), "impulse")
