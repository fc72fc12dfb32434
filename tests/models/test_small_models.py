"""The small-image models: sizes as published, patches as named, weights of the large ones."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch

from vitruvius._errors import ConfigError
from vitruvius.models import create_model, models
from vitruvius.models.small import restride
from vitruvius.surgery import survey


def ghost(name: str, **settings: Any) -> Any:
    """The model without its numbers."""
    with torch.device("meta"):
        return create_model(name, **settings).model


def number(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("patch", [1, 2, 4, 8])
def test_a_restrided_xcit_has_as_many_tokens_as_its_name_says(patch: int) -> None:
    """The published code gives patch 2 the tokens of patch 1, and its validation script those of patch 4."""
    model = ghost(f"vitruvius/xcit_small_12_p{patch}_32", num_classes=10)
    rows = 32 // patch
    tokens, (height, width) = model.patch_embed(torch.empty(1, 3, 32, 32, device="meta"))
    assert tokens.shape[1] == rows * rows
    assert (height, width) == (rows, rows)
    assert model.patch_embed.num_patches == rows * rows
    strides = [layer[0].stride[0] for layer in model.patch_embed.proj if isinstance(layer, torch.nn.Sequential)]
    assert strides == sorted(strides)
    assert torch.tensor(strides).prod() == patch


def test_weights_of_the_sixteen_pixel_model_load_unchanged() -> None:
    large = timm.create_model("xcit_nano_12_p16_224", num_classes=10, depth=1, embed_dim=32, num_heads=2).eval()
    small = timm.create_model("xcit_nano_12_p16_224", num_classes=10, depth=1, embed_dim=32, num_heads=2).eval()
    restride(small, 4)
    small.load_state_dict(large.state_dict(), strict=True)
    x = torch.rand(1, 3, 64, 64)
    assert large.patch_embed(x)[1] == (4, 4)
    assert small.patch_embed(x)[1] == (16, 16)
    torch.testing.assert_close(restride(small, 16)(x), large(x))
    names = list(ghost("xcit_small_12_p16_224").state_dict())
    assert list(ghost("vitruvius/xcit_small_12_p4_32").state_dict()) == names


def test_a_patch_that_no_stride_makes_is_refused_and_changes_nothing() -> None:
    model = ghost("xcit_nano_12_p16_224")
    with pytest.raises(ConfigError, match=r"patch 3 cannot be reached by re-striding; possible: \[1, 2, 4, 8, 16\]"):
        restride(model, 3)
    assert model.patch_embed.num_patches == 196


@pytest.mark.parametrize(
    ("name", "patch", "width", "heads"),
    [
        ("vitruvius/vit_tiny_patch2_32", 2, 192, 3),
        ("vitruvius/vit_tiny_patch4_32", 4, 192, 3),
        ("vitruvius/vit_base_patch2_32", 2, 768, 12),
    ],
)
def test_small_vits_see_32_pixels(name: str, patch: int, width: int, heads: int) -> None:
    tokens = (32 // patch) ** 2 + 1
    blocks = 12 * (12 * width**2 + 13 * width)
    embedding = 3 * patch**2 * width + width + (tokens + 1) * width
    assert number(ghost(name, num_classes=10)) == blocks + embedding + 2 * width + 10 * width + 10
    small = ghost(name, num_classes=10, depth=1)
    assert small(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)
    site = survey(small)["blocks.0.attn"]
    assert (site.num_keys, site.num_heads) == (tokens, heads)


def test_the_model_for_digits_is_small_and_takes_any_channels() -> None:
    model = create_model("vitruvius/vit_digits", in_chans=1)
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    assert 75_000 < number(model) < 85_000
    assert model.data_config["input_size"] == (1, 8, 8)
    assert next(iter(survey(model).values())).num_keys == 16


def test_every_transformer_of_ours_can_be_made_and_rewired() -> None:
    for name in (name for name in models if "vit_" in name or "xcit_" in name):
        with torch.device("meta"):
            model = create_model(name, num_classes=10, depth=1)
        assert survey(model)
        assert model.data_config["input_size"][0] == 3
        assert model.num_classes == 10
