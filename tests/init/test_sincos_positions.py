"""Fixed sin-cos positions: the golden table, upstream's key, any device, any grid."""

from __future__ import annotations

import pytest
import timm
import torch
from beginnings import sincos, small_vit

from golden_files import read_golden
from vitruvius._errors import SurgeryError
from vitruvius.surgery.positions import use_sincos_positions

TABLES, META = read_golden("sincos_pe")


@pytest.mark.parametrize("case", META["cases"], ids=lambda case: case["id"])
def test_the_table_is_the_golden_one(case):
    (rows, columns), dim = case["grid"], case["dim"]
    kwargs = {"img_size": (2 * rows, 2 * columns), "embed_dim": dim, "num_heads": 2, "depth": 1}
    model = use_sincos_positions(small_vit(class_token=False, global_pool="avg", **kwargs))
    torch.testing.assert_close(model.pos_embed[0], TABLES[case["id"]], rtol=0, atol=1e-6)
    torch.testing.assert_close(model.pos_embed[0], sincos(rows, columns, dim).float(), rtol=0, atol=2e-6)


def distilled():
    return timm.create_model("deit_tiny_distilled_patch16_224", img_size=12, patch_size=2, embed_dim=48, depth=1)


@pytest.mark.parametrize(
    "make", [small_vit, lambda: small_vit(reg_tokens=3), distilled], ids=["class", "registers", "distilled"]
)
def test_prefix_tokens_get_rows_of_zeros(make):
    model = use_sincos_positions(make())
    prefix = model.num_prefix_tokens
    assert not model.pos_embed[0, :prefix].any()
    torch.testing.assert_close(model.pos_embed[0, prefix:], sincos(6, 6, 48).float(), rtol=0, atol=1e-6)


def test_positions_for_patches_only_have_no_rows_to_spare():
    model = use_sincos_positions(small_vit(reg_tokens=3, no_embed_class=True))
    assert model.pos_embed.shape == (1, 36, 48)


def test_it_keeps_upstreams_key_is_saved_moves_and_gets_no_gradient():
    model, other = use_sincos_positions(small_vit()), small_vit()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.pos_embed, model.pos_embed)
    assert model.to(torch.float64).pos_embed.dtype == torch.float64
    assert model.to("meta").pos_embed.is_meta
    model = use_sincos_positions(small_vit())
    model(torch.rand(2, 3, 12, 12)).sum().backward()
    assert model.pos_embed.grad is None
    assert model.cls_token.grad is not None


def test_the_forward_pass_adds_the_table():
    model, expected = use_sincos_positions(small_vit()), small_vit()
    expected.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected.pos_embed[0, 1:] = sincos(6, 6, 48)
    x = torch.rand(2, 3, 12, 12)
    torch.testing.assert_close(model(x), expected(x))


def test_after_another_resolution_it_is_made_anew():
    model = use_sincos_positions(small_vit())
    model.set_input_size((8, 20))
    use_sincos_positions(model)
    torch.testing.assert_close(model.pos_embed[0, 1:], sincos(4, 10, 48).float(), rtol=0, atol=1e-6)
    assert not model.pos_embed.requires_grad
    assert model(torch.rand(1, 3, 8, 20)).shape == (1, 5)


def test_another_temperature_is_another_table():
    a, b = (use_sincos_positions(small_vit(), temperature=t).pos_embed for t in (10_000.0, 100.0))
    assert not torch.equal(a, b)


def test_models_it_cannot_serve_are_refused():
    with pytest.raises(SurgeryError, match="width that 4 divides"):
        use_sincos_positions(small_vit(embed_dim=54))
    with pytest.raises(SurgeryError, match="pos_embed is none"):
        use_sincos_positions(small_vit(pos_embed="none"))
    with pytest.raises(SurgeryError, match="a module, PositionalEncodingFourier"):
        use_sincos_positions(timm.create_model("xcit_nano_12_p16_224", depth=1))
