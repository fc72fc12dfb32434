"""create_model and PixelModel: timm's model, timm's keys, timm's normalisation, and nobody's dice disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.data import resolve_data_config

import vitruvius
from vitruvius._errors import ConfigError, NoSiteError, UnknownName
from vitruvius.analysis import explain
from vitruvius.attention import part
from vitruvius.models import PixelModel, create_model, models
from vitruvius.models.config import AttentionRule
from vitruvius.models.wiring import wire
from vitruvius.surgery import attention_of, restore, rewire
from vitruvius.surgery.base import Socket

SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 5}


def tiny(**settings: Any) -> PixelModel:
    return create_model("test_vit", **{**SMALL, **settings})


@pytest.mark.parametrize("name", ["test_vit", "vit_tiny_patch16_224.augreg_in21k", "beit_base_patch16_224", "resnet18"])
def test_normalisation_is_what_timm_resolves(name: str) -> None:
    with torch.device("meta"):
        model = create_model(name)
    config = resolve_data_config(
        {}, model=timm.create_model(name, num_classes=1) if name == "test_vit" else model.model
    )
    assert model.statistics == (tuple(config["mean"]), tuple(config["std"]))


def test_pixels_are_normalised_before_the_model() -> None:
    model, x = tiny(), torch.rand(2, 3, 32, 32)
    mean, std = model.statistics
    slow = torch.stack([(x[:, c] - mean[c]) / std[c] for c in range(3)], 1)
    torch.testing.assert_close(model(x), model.model(slow))
    assert not model.training


def test_statistics_follow_the_model_but_stay_out_of_its_weights() -> None:
    model = tiny()
    assert not [key for key in model.state_dict() if "mean" in key or "std" in key]
    assert model.double().mean.dtype == torch.float64
    assert list(model.model.state_dict()) == list(timm.create_model("test_vit", **SMALL).state_dict())


def test_given_statistics_win_and_are_checked() -> None:
    assert tiny(mean=(0.1, 0.2, 0.3), std=(1, 1, 1)).statistics == ((0.1, 0.2, 0.3), (1.0, 1.0, 1.0))
    with pytest.raises(ConfigError, match=r"model.mean has 1 values, the model takes 3 channels"):
        tiny(mean=(0.5,))
    with pytest.raises(ConfigError, match=r"model.std = .*, expected positive numbers"):
        tiny(std=(1, 1, 0))


def test_grey_models_get_one_mean() -> None:
    model = tiny(in_chans=1)
    colour = resolve_data_config({}, model=tiny().model)["mean"]
    assert model.statistics[0] == (pytest.approx(sum(colour) / 3),)
    assert model.data_config["input_size"] == (1, 32, 32)
    with torch.device("meta"):
        convolutional = create_model("resnet18", in_chans=2)
    assert convolutional.data_config["input_size"] == (2, 224, 224)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_dice_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, two, other = tiny(seed=5), tiny(seed=5), tiny(seed=6)
    assert torch.equal(torch.get_rng_state(), before)
    for key, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[key])
    assert not torch.equal(one.model.head.weight, other.model.head.weight)


def test_attention_is_rewired_everywhere_or_by_rules() -> None:
    model = tiny(attention=["rpc"])
    assert all(isinstance(block.attn, Socket) for block in model.model.blocks)
    model = tiny(attention=[AttentionRule(where="blocks.1.attn", parts=[{"use": "rpc", "iterations": 2}])])
    assert not isinstance(model.model.blocks[0].attn, Socket)
    assert model.model.blocks[1].attn.core.rpc.iterations == 2


@pytest.mark.parametrize(
    ("rules", "error", "letter"),
    [
        ([{"parts": ["rcp"]}], UnknownName, r"no attention named 'rcp'; did you mean 'rpc'\? Known: "),
        ([{"where": "block.*", "parts": ["rpc"]}], NoSiteError, r"where='block.\*' matches none of the 2 attention"),
        ([{"parts": ["rpc"]}, {"where": "*.1.*", "parts": ["rpc"]}], ConfigError, "'blocks.1.attn' is matched by two"),
        ([{"parts": [{"use": "rpc", "iteration": 2}]}], ConfigError, r"attention.0: unknown key 'rpc.iteration'"),
        ([{"parts": [{"use": "rpc", "iterations": "x"}]}], ConfigError, r"rpc.iterations = 'x', expected a whole num"),
        ([{"parts": [{"iterations": 2}]}], ConfigError, "does not say which piece to use"),
        ([{"where": "blocks.0.attn", "parts": ["rpc"]}, {"where": "x", "parts": ["rpc"]}], NoSiteError, "where='x'"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused_and_changes_nothing(rules: Any, error: type, letter: str) -> None:
    model = tiny()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(error, match=letter):
        wire(model, [AttentionRule(**rule) for rule in rules])
    assert [type(module) for module in model.modules()] == kinds


def test_a_later_rule_that_fails_undoes_the_earlier_ones() -> None:
    model = tiny()
    rules = [
        AttentionRule(where="blocks.0.attn", parts=["rpc"]),
        AttentionRule(where="blocks.1.attn", parts=[{"use": "low_rank", "rank": 99}]),
    ]
    with pytest.raises(ConfigError, match="rank=99"):
        wire(model, rules)
    assert not any(isinstance(module, Socket) for module in model.modules())


def test_parts_and_rules_do_not_mix() -> None:
    with pytest.raises(ConfigError, match="attention mixes parts and rules"):
        tiny(attention=["rpc", AttentionRule(parts=["rpc"])])


def test_bound_parts_are_taken_too() -> None:
    model = tiny(attention=[part("low_rank", rank=1, tensors="k"), "rpc"])
    assert model.model.blocks[0].attn.core.describe() == "low_rank → rpc"


@pytest.mark.parametrize(
    ("name", "letter"),
    [
        ("deit_tiny_patch61_224", r"no model named 'deit_tiny_patch61_224'; did you mean 'deit_tiny_patch16_224'\?"),
        ("vitruvius/vit_digit", r"no model named 'vitruvius/vit_digit'; did you mean 'vitruvius/vit_digits'\? Known"),
    ],
)
def test_an_unknown_model_is_answered_with_the_nearest(name: str, letter: str) -> None:
    with pytest.raises(UnknownName, match=letter):
        create_model(name)


SENSELESS = [
    {"depth": 0},
    {"num_heads": 0},
    {"num_heads": [2, 0]},
    {"img_size": 1},
    {"img_size": "large"},
    {"patch_size": 100},
    {"num_classes": -1},
    {"num_classes": True},
    {"in_chans": 0},
    {"embed_dim": 0},
    {"drop_path_rate": 2},
    {"attn_drop_rate": 1.0},
    {"blocks": 3},
]


@pytest.mark.parametrize("settings", SENSELESS, ids=str)
@pytest.mark.parametrize("name", ["test_vit", "vitruvius/vit_digits"])
def test_settings_that_make_no_model_are_refused(name: str, settings: dict[str, Any]) -> None:
    shown = {"img_size": 32} if name == "test_vit" else {}
    with pytest.raises(ConfigError, match=rf"'{name}' cannot be made with .*{next(iter(settings))}"):
        create_model(name, **{**shown, **settings})


def test_a_model_without_a_head_is_refused_wherever_classes_count() -> None:
    model, images = create_model("vitruvius/vit_digits", num_classes=0), torch.rand(2, 3, 8, 8)
    for asked in (
        lambda: vitruvius.evaluate(model, [(images, torch.zeros(2, dtype=torch.int64))]),
        lambda: vitruvius.analyse(model, [images], "relevance"),
        lambda: explain(model, images),
    ):
        with pytest.raises(ConfigError, match=r"no head \(num_classes = 0\)"):
            asked()
    vitruvius.analyse(model, [images], "rollout")


def test_our_models_have_no_pretrained_weights_and_no_name_of_timms() -> None:
    with pytest.raises(ConfigError, match=r"has no pretrained weights; start from a run with model.weights"):
        create_model("vitruvius/vit_digits", pretrained=True)
    with pytest.raises(ConfigError, match="models of this package are named vitruvius/…"):
        models.add("resnet50", timm.create_model, "no")
    assert not set(models) & set(timm.list_models())


@pytest.mark.parametrize(
    "parts", [["rpc:iterations=2"], [part("low_rank", rank=1), "softmax"]], ids=["rpc", "low_rank"]
)
def test_a_folder_of_timm_with_its_attention_noted_is_rewired_again(parts: list[Any], tmp_path: Path) -> None:
    model = create_model("test_vit", img_size=32, patch_size=8, num_classes=10, seed=3)
    rewire(model, *parts, where="blocks.0.attn")
    noted = {"vitruvius": {"attention": attention_of(model)}}
    timm.models.save_for_hf(
        model.model,
        str(tmp_path),
        model_config=noted,
        model_args={"img_size": 32, "patch_size": 8},
        safe_serialization=True,
    )
    again = create_model(f"local-dir:{tmp_path}", pretrained=True)
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(again(x), model(x))
    assert attention_of(again) == attention_of(model)
    assert attention_of(restore(again)) == []
