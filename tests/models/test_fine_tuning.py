"""Fine-tuning: a new head, other sizes, other patches, frozen parts; and everything else strict as ever."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from torch import Tensor

from small_run import small_run
from vitruvius._errors import CheckpointError, ConfigError
from vitruvius.models import create_model, freeze, load_model, load_weights
from vitruvius.models.config import ModelConfig
from vitruvius.models.create import create_from_config
from vitruvius.models.weights import head_keys
from vitruvius.surgery import survey

SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 5}


def state_of(name: str, **settings: Any) -> dict[str, Tensor]:
    return create_model(name, seed=1, **settings).model.state_dict()


def recipe(weights: dict[str, Tensor], tmp_path: Path, name: str = "test_vit", **settings: Any) -> Any:
    save_file({key: value.contiguous() for key, value in weights.items()}, tmp_path / "w.safetensors")
    own = {key: settings.pop(key) for key in ("reset_head", "freeze", "restride", "positions") if key in settings}
    config = ModelConfig(name=name, weights=str(tmp_path / "w.safetensors"), kwargs=settings, **own)
    return create_from_config(config, seed=2)


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("test_vit", ["head."]),
        ("resnet18", ["fc."]),
        ("convnext_tiny", ["head.fc."]),
        ("deit_tiny_distilled_patch16_224", ["head.", "head_dist."]),
        ("levit_128s", ["head.", "head_dist."]),
        ("vitruvius/preact_resnet_18", ["linear."]),
        ("vitruvius/poolformer_m12", ["head.fc."]),
    ],
)
def test_the_head_is_found_in_every_family(name: str, heads: list[str]) -> None:
    with torch.device("meta"):
        model = create_model(name).model
    keys = head_keys(model)
    assert keys
    assert all(any(key.startswith(head) for head in heads) for key in keys)
    assert {key for key in model.state_dict() if key.startswith(tuple(heads))} == set(keys)


@pytest.mark.parametrize("classes", [7, 5])
def test_a_new_head_is_left_as_it_began_even_where_the_old_one_would_fit(classes: int, tmp_path: Path) -> None:
    old = state_of("test_vit", **{**SMALL, "num_classes": classes})
    model = recipe(old, tmp_path, reset_head=True, **SMALL).model
    fresh = create_model("test_vit", seed=2, **SMALL).model.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, fresh[key] if key.startswith("head.") else old[key])


def test_with_a_new_head_every_other_key_is_still_strict(tmp_path: Path) -> None:
    old = state_of("test_vit", **SMALL)
    with pytest.raises(CheckpointError, match=r"1 keys the weights lack \(norm.bias\)"):
        recipe({key: value for key, value in old.items() if key != "norm.bias"}, tmp_path, reset_head=True, **SMALL)
    with pytest.raises(CheckpointError, match=r"1 keys the model does not have \(extra\)"):
        recipe({**old, "extra": torch.ones(1)}, tmp_path, reset_head=True, **SMALL)
    with pytest.raises(CheckpointError, match=r"1 keys the model does not have \(head_dist.weight\)"):
        recipe({**old, "head_dist.weight": torch.ones(1)}, tmp_path, reset_head=True, **SMALL)


def test_pretrained_weights_lose_their_head_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real = timm.create_model

    def pretend(name: str, pretrained: bool = False, **kwargs: Any) -> Any:
        model = real(name, **kwargs)
        if pretrained:
            torch.nn.init.ones_(model.head.weight)
            torch.nn.init.ones_(model.norm.weight.data.mul_(0))
        return model

    monkeypatch.setattr(timm, "create_model", pretend)
    kept = create_from_config(ModelConfig(name="test_vit", pretrained=True, kwargs=SMALL)).model
    new = create_from_config(ModelConfig(name="test_vit", pretrained=True, reset_head=True, kwargs=SMALL)).model
    assert (kept.head.weight == 1).all()
    assert torch.equal(new.head.weight, create_model("test_vit", **SMALL).model.head.weight)
    assert torch.equal(new.norm.weight, kept.norm.weight)


@pytest.mark.parametrize("name", ["test_vit", "cait_xxs24_224"])
def test_positions_of_another_image_size_are_resampled_by_timm(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"embed_dim": 24, "num_heads": 2} if "cait" in name else {}
    old = state_of(name, **{**SMALL, **extra})
    with caplog.at_level(logging.DEBUG, logger="vitruvius"):
        model = recipe(old, tmp_path, name, **{**SMALL, **extra, "img_size": 48}).model
    prefix = old["pos_embed"].shape[1] - 16
    expected = resample_abs_pos_embed(old["pos_embed"], [6, 6], num_prefix_tokens=prefix)
    torch.testing.assert_close(model.pos_embed, expected, rtol=0, atol=0)
    assert torch.equal(model.pos_embed[:, :prefix], old["pos_embed"][:, :prefix])
    assert "pos_embed" in caplog.text
    assert all(torch.equal(value, old[key]) for key, value in model.state_dict().items() if key != "pos_embed")


def test_patches_of_another_size_are_resampled_by_timm(tmp_path: Path) -> None:
    old = state_of("test_vit", **SMALL)
    model = recipe(old, tmp_path, **{**SMALL, "patch_size": 4}).model
    expected = resample_patch_embed(old["patch_embed.proj.weight"], [4, 4])
    torch.testing.assert_close(model.patch_embed.proj.weight, expected, rtol=0, atol=0)
    assert model.pos_embed.shape[1] == old["pos_embed"].shape[1] + 48


def test_relative_positions_are_resampled_by_the_familys_own_filter(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"depths": (1, 1), "embed_dim": 24, "num_heads": (2, 2), "patch_size": 4, "num_classes": 5}
    name, key = "swin_tiny_patch4_window7_224", "layers.0.blocks.0.attn.relative_position_bias_table"
    old = state_of(name, img_size=32, window_size=4, **sizes)
    model = recipe(old, tmp_path, name, img_size=64, window_size=8, **sizes).model
    assert old[key].shape == (49, 2)
    assert model.state_dict()[key].shape == (225, 2)
    torch.testing.assert_close(model.state_dict()[key][112], old[key][24])  # the middle: no distance at all


def test_a_fixed_table_is_made_anew_for_the_new_grid(tmp_path: Path) -> None:
    settings = {**SMALL, "class_token": False, "global_pool": "avg"}
    old = state_of("test_vit", positions="sincos", **settings)
    model = recipe(old, tmp_path, positions="sincos", **{**settings, "img_size": 64}).model
    fresh = create_model("test_vit", positions="sincos", **{**settings, "img_size": 64}).model
    assert torch.equal(model.pos_embed, fresh.pos_embed)


def test_the_first_convolution_of_a_resnet_goes_from_seven_to_three_pixels(tmp_path: Path) -> None:
    with torch.device("meta"):
        large, small = create_model("vitruvius/resnet50_gelu").model, create_model("vitruvius/resnet50_32").model
    state = {key: torch.zeros(()).expand(value.shape) for key, value in large.state_dict().items()}
    state["conv1.weight"] = torch.randn(64, 3, 7, 7)
    small.to_empty(device="cpu")
    load_weights(small, state, reset_head=True, resample=True)
    torch.testing.assert_close(small.conv1.weight, resample_patch_embed(state["conv1.weight"], [3, 3]))


def test_oblong_and_foreign_tables_are_refused(tmp_path: Path) -> None:
    old = state_of("test_vit", **{**SMALL, "img_size": (32, 64)})
    with pytest.raises(CheckpointError, match=r"pos_embed has 33 rows.*32 are left, which is not a square grid"):
        recipe(old, tmp_path, **SMALL)
    with pytest.raises(CheckpointError, match="shapes that differ"):
        recipe(state_of("test_vit", **{**SMALL, "embed_dim": 32, "num_heads": 2}), tmp_path, **SMALL)


def test_resampling_must_be_asked_for_outside_a_recipe() -> None:
    with pytest.raises(CheckpointError, match=r"shapes that differ \(pos_embed"):
        load_weights(create_model("test_vit", **{**SMALL, "img_size": 48}), state_of("test_vit", **SMALL))


def test_a_recipe_restrides_any_xcit(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"depth": 1, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
    old = state_of("xcit_nano_12_p16_224", **sizes)
    model = recipe(old, tmp_path, "xcit_nano_12_p16_224", restride=4, img_size=32, **sizes)
    assert model.model.patch_embed(torch.rand(1, 3, 32, 32))[1] == (8, 8)
    assert model.data_config["input_size"] == (3, 32, 32)
    assert all(torch.equal(value, old[key]) for key, value in model.model.state_dict().items())
    with pytest.raises(ConfigError, match=r"VisionTransformer has no patch embedding of several strided convolutions"):
        create_model("test_vit", restride=4, **SMALL)


def trainable(model: Any) -> set[str]:
    return {name for name, parameter in model.model.named_parameters() if parameter.requires_grad}


def test_frozen_parts_get_no_gradient_and_the_last_glob_wins() -> None:
    model = freeze(create_model("test_vit", **SMALL), ["*", "!head", "!blocks.1.attn.*", "blocks.1.attn.qkv.bias"])
    left = {
        "head.weight",
        "head.bias",
        "blocks.1.attn.qkv.weight",
        "blocks.1.attn.proj.weight",
        "blocks.1.attn.proj.bias",
    }
    assert trainable(model) == left
    model(torch.rand(2, 3, 32, 32)).sum().backward()
    assert {name for name, parameter in model.model.named_parameters() if parameter.grad is not None} == left


def test_a_glob_may_name_modules(tmp_path: Path) -> None:
    model = recipe(state_of("test_vit", **SMALL), tmp_path, freeze=("patch_embed", "blocks.[0-0]"), **SMALL)
    assert not any(name.startswith(("patch_embed.", "blocks.0.")) for name in trainable(model))
    assert "blocks.1.mlp.fc1.weight" in trainable(model)


def test_batch_norms_of_frozen_modules_keep_their_statistics() -> None:
    model = create_model("test_resnet", num_classes=5)
    freeze(model, ["conv1", "bn1", "layer1"])
    before = {key: value.clone() for key, value in model.model.state_dict().items() if "running" in key}
    model.train()
    model(torch.rand(2, 3, 32, 32))
    after = model.model.state_dict()
    still = {key for key in before if torch.equal(before[key], after[key])}
    assert still == {key for key in before if key.startswith(("conv1.", "bn1.", "layer1."))}
    assert still != set(before)
    assert model.training
    assert model.model.layer2.training
    assert not model.model.bn1.training


def test_half_a_frozen_batch_norm_goes_on_learning() -> None:
    model = freeze(create_model("test_resnet", num_classes=5), ["bn1.weight"])
    model.train()
    assert model.model.bn1.training


@pytest.mark.parametrize(
    ("globs", "letter"),
    [
        (["block.*"], r"model.freeze: 'block.\*' matches no parameter of VisionTransformer. It has .*patch_embed"),
        (["*", "!heads"], r"'!heads' matches no parameter"),
        (["*"], r"leaves nothing to train. Thaw something, e.g. with '!head'"),
    ],
)
def test_a_glob_that_cannot_be_meant_is_refused_and_freezes_nothing(globs: list[str], letter: str) -> None:
    model = create_model("test_vit", **SMALL)
    with pytest.raises(ConfigError, match=letter):
        freeze(model, globs)
    assert len(trainable(model)) == len(list(model.parameters()))


def test_a_fine_tuned_run_is_a_model(tmp_path: Path) -> None:
    first = small_run(tmp_path / "first", "train.epochs=1")
    second = small_run(
        tmp_path / "second",
        "train.epochs=1",
        f"model.weights={first}",
        "model.reset_head=true",
        "model.freeze=[blocks]",
    )
    old, new = load_model(first, best=False).model, load_model(second).model
    assert torch.equal(new.blocks[0].attn.qkv.weight, load_model(first).model.blocks[0].attn.qkv.weight)
    assert not torch.equal(new.head.weight, old.head.weight)


def test_a_model_for_another_image_size_is_surveyed_and_fed_at_that_size() -> None:
    """LeViT keeps its image size nowhere."""
    tokens = []
    for size in (128, 64):
        with torch.device("meta"):
            model = create_model("levit_128s", img_size=size, attention=["softmax"])
        assert model.data_config["input_size"] == (3, size, size)
        tokens.append(survey(model)["stages.0.blocks.0.attn"].num_keys)
    assert tokens == [64, 16]


def test_a_model_that_sees_any_size_is_fed_at_the_size_it_was_asked_for() -> None:
    with torch.device("meta"):
        assert create_model("twins_pcpvt_small", img_size=96).data_config["input_size"] == (3, 96, 96)
        assert create_model("twins_pcpvt_small").data_config["input_size"] == (3, 224, 224)
