"""The light recipe's other models: sizes as published, timm's methods, one prediction for an image of any size."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch

from vitruvius.attacks.pgd import PGD
from vitruvius.models import create_model
from vitruvius.models.resnets import PreActResNet, WideResNet
from vitruvius.tasks.adversarial import Adversarial

PUBLISHED = {  # millions of parameters, classes, image size, crop
    "xcit_medium_12_p16_224": (46.40, 1000, 224, 1.0),
    "xcit_large_12_p16_224": (103.79, 1000, 224, 1.0),
    "xcit_large_12_h8_p16_224": (103.79, 1000, 224, 1.0),
    "cait_s12_224": (25.61, 1000, 224, 1.0),
    "poolformer_m12": (21.57, 1000, 224, 0.95),
    "resnet18_gelu": (11.69, 1000, 224, 0.875),
    "resnet50_gelu": (25.56, 1000, 224, 0.95),
    "resnet152_gelu": (60.19, 1000, 224, 0.95),
    "resnext152_32x8d": (119.97, 1000, 380, 0.95),
    "resnet50_32": (23.52, 10, 32, 1.0),
    "wide_resnet28_10": (36.48, 10, 32, 1.0),
    "wide_resnet34_10": (46.16, 10, 32, 1.0),
    "wide_resnet70_16": (266.80, 10, 32, 1.0),
    "preact_resnet_18": (11.68, 1000, 32, 1.0),
    "resnet50_gelu_adv": (25.56, 1000, 224, 0.875),
    "xcit_small_12_p4_32": (25.87, 10, 32, 1.0),
    "xcit_small_12_p8_32": (25.87, 10, 32, 1.0),
    "xcit_medium_12_p4_32": (45.89, 10, 32, 1.0),
    "xcit_large_12_p4_32": (103.03, 10, 32, 1.0),
    "symvit_tiny_patch16_224": (5.27, 1000, 224, 0.9),
    "symvit_small_patch16_224": (20.28, 1000, 224, 0.9),
    "symvit_base_patch16_224": (79.48, 1000, 224, 0.9),
}


def ghost(name: str, **settings: Any) -> Any:
    with torch.device("meta"):
        return create_model(f"vitruvius/{name}", **settings)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_images_and_classes_are_as_published(name: str) -> None:
    millions, classes, size, crop = PUBLISHED[name]
    model = ghost(name, num_classes=classes)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == millions
    config = model.data_config
    assert (config["input_size"], config["crop_pct"]) == ((3, size, size), crop)
    assert model.num_classes == classes
    if millions < 60:  # the larger ones differ in numbers only
        assert model(torch.empty(2, 3, size, size, device="meta")).shape == (2, classes)


@pytest.mark.parametrize(
    "name", ["xcit_nano_12_p16_224", "xcit_small_12_p16_224", "convnext_tiny", "deit_small_patch16_224"]
)
def test_the_recipes_other_models_are_timms_own(name: str) -> None:
    sizes = {"xcit_nano": 3.05, "xcit_small": 26.25, "convnext_tiny": 28.59, "deit_small": 22.05}
    with torch.device("meta"):
        model = create_model(name)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == next(
        size for start, size in sizes.items() if name.startswith(start)
    )


@pytest.mark.parametrize(
    "name", ["resnet50_32", "wide_resnet28_10", "preact_resnet_18", "resnet50_gelu", "poolformer_m12"]
)
def test_a_model_without_a_size_of_its_own_says_the_size_it_is_asked_for(name: str) -> None:
    """The published wide ResNets take one image of 224 pixels for 49, the published PreAct ResNet fails on it."""
    model = ghost(name, num_classes=7, img_size=64)
    assert model.data_config["input_size"] == (3, 64, 64)
    assert model(torch.empty(2, 3, 64, 64, device="meta")).shape == (2, 7)


@pytest.mark.parametrize("kind", [lambda: WideResNet(depth=10, width=1), PreActResNet])
def test_a_new_head_is_the_one_that_answers(kind: Any) -> None:
    """The published code makes a head that its forward never uses."""
    model = kind().eval()
    x = torch.rand(2, 3, 16, 16)
    features = model.forward_head(model.forward_features(x), pre_logits=True)
    assert features.shape == (2, model.num_features)
    torch.testing.assert_close(model(x), model.get_classifier()(features))
    model.reset_classifier(7)
    assert model(x).shape == (2, 7)
    assert model.num_classes == 7
    model.reset_classifier(0)
    torch.testing.assert_close(model(x), features)


def test_a_wide_resnet_is_its_formula_written_out() -> None:
    model = WideResNet(depth=10, width=2, drop_path_rate=0.5).eval()
    x = torch.rand(2, 3, 8, 8)
    relu = torch.nn.functional.relu
    value = model.conv1(x)
    for group, stride in ((model.block1, 1), (model.block2, 2), (model.block3, 2)):
        (block,) = group.layer
        ready = relu(block.bn1(value))
        out = torch.nn.functional.conv2d(ready, block.conv1.weight, stride=stride, padding=1)
        out = block.conv2(relu(block.bn2(out)))
        value = torch.nn.functional.conv2d(ready, block.convShortcut.weight, stride=stride) + out
    expected = model.fc(relu(model.bn1(value)).mean((2, 3)))
    torch.testing.assert_close(model(x), expected)
    assert model.train()(x).shape == (2, 10)


def test_wide_resnets_and_preact_keep_the_keys_of_robustbench() -> None:
    wide = set(ghost("wide_resnet28_10").model.state_dict())
    assert {"conv1.weight", "block1.layer.0.convShortcut.weight", "block3.layer.3.bn2.weight", "fc.bias"} <= wide
    assert "block1.layer.1.convShortcut.weight" not in wide
    preact = set(ghost("preact_resnet_18").model.state_dict())
    assert {"layer2.0.shortcut.0.weight", "layer4.1.conv2.weight", "linear.weight"} <= preact
    assert "layer1.0.shortcut.0.weight" not in preact


def test_gelu_resnets_have_no_relu_left_and_timms_keys() -> None:
    model = ghost("resnet50_gelu").model
    assert not [m for m in model.modules() if isinstance(m, torch.nn.ReLU)]
    assert list(model.state_dict()) == list(timm.create_model("resnet50", device="meta").state_dict())


def test_resnet_for_small_images_keeps_every_pixel_until_its_second_stage() -> None:
    model = ghost("resnet50_32", num_classes=10).model
    seen = {}
    model.layer1.register_forward_hook(lambda _, inputs, output: seen.update(i=inputs[0].shape, o=output.shape))
    model(torch.empty(1, 3, 32, 32, device="meta"))
    assert seen == {"i": (1, 64, 32, 32), "o": (1, 256, 32, 32)}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("wide_resnet28_10", {"depth": 10, "width": 1}),
        ("preact_resnet_18", {}),
        ("resnet50_32", {"layers": [1, 1, 1, 1]}),
    ],
)
def test_models_without_attention_are_trained_and_attacked_like_others(name: str, sizes: dict[str, Any]) -> None:
    model = create_model(f"vitruvius/{name}", num_classes=3, drop_path_rate=0.1, **sizes)
    x, y = torch.rand(2, 3, 16, 16), torch.tensor([0, 2])
    attacked = PGD(eps=8 / 255, steps=2)(model, x, y)
    assert 0 < (attacked - x).abs().max() <= 8 / 255 + 1e-6
    task = Adversarial(model, eps=8 / 255, attack={"use": "pgd", "steps": 1}).train()
    task(x, y)["loss"].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
