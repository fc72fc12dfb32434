"""Eight ghost batch norms: their formula, their keys, and the ResNet-50 of Bai et al. that is made of them."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from vitruvius._errors import ConfigError
from vitruvius.converters import convert
from vitruvius.models import create_model
from vitruvius.models.resnet_gelu_adv import EightNorms, GhostNorm
from vitruvius.tasks.adversarial import Adversarial

NAME = "vitruvius/resnet50_gelu_adv"
SMALL = {"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8], "num_classes": 3}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moved(module: nn.Module) -> Any:
    """Every parameter and every statistic of its own value."""
    for number, (key, value) in enumerate(module.state_dict().items()):
        if value.is_floating_point():
            drawn = noise(*value.shape, seed=number)
            value.copy_(0.5 + drawn.abs() if key.endswith("var") else value + 0.1 * drawn)
    return module


def test_training_normalises_even_and_odd_images_apart_as_a_slow_loop_does() -> None:
    norm, x = GhostNorm(3).train(), 2 * noise(6, 3, 4, 5) + 1
    expected = torch.empty_like(x)
    means, variances = torch.empty(6), torch.empty(6)
    for part in range(2):
        for channel in range(3):
            values = torch.cat([x[image, channel].flatten() for image in range(part, 6, 2)])
            for image in range(part, 6, 2):
                spread = (values.var(unbiased=False) + 1e-5).sqrt()
                expected[image, channel] = (x[image, channel] - values.mean()) / spread
            means[3 * part + channel], variances[3 * part + channel] = values.mean(), values.var()
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(norm.proxy_bn.running_mean, 0.1 * means)
    torch.testing.assert_close(norm.proxy_bn.running_var, 0.9 + 0.1 * variances)


def test_a_batch_in_which_every_image_comes_twice_is_normalised_as_ever() -> None:
    x = noise(4, 3, 5, 5)
    plain = nn.BatchNorm2d(3).train()(x)
    torch.testing.assert_close(EightNorms(3).train()(x.repeat_interleave(2, 0))[::2], plain)


def test_evaluation_uses_the_first_half_of_the_first_norm_and_nothing_else() -> None:
    norm, x = moved(EightNorms(3)).eval(), noise(5, 3, 4, 4)
    first, affine = norm.bn0.proxy_bn, norm.aff.bnconv
    mean, variance = (v[:3].view(3, 1, 1) for v in (first.running_mean, first.running_var))
    weight, bias = affine.weight.view(3, 1, 1), affine.bias.view(3, 1, 1)
    expected = weight * (x - mean) / (variance + 1e-5).sqrt() + bias
    torch.testing.assert_close(norm(x), expected)
    before = norm(x)
    first.running_mean[3:] += 7
    first.running_var[3:] += 7
    for number in range(1, 8):
        norm.get_submodule(f"bn{number}.proxy_bn").running_mean.add_(7)
    assert torch.equal(norm(x), before)


def test_training_moves_the_statistics_of_the_first_norm_alone() -> None:
    norm = EightNorms(3).train()
    norm(noise(4, 3, 5, 5) + 1)
    moved_ones = [n for n in range(8) if norm.get_submodule(f"bn{n}.proxy_bn").running_mean.any()]
    assert moved_ones == [0]


def test_a_batch_that_cannot_be_halved_is_refused_in_training_and_welcome_in_evaluation() -> None:
    norm = EightNorms(3)
    with pytest.raises(ConfigError, match="takes batches of 5 images apart into 2; choose a batch_size that 2 divides"):
        norm.train()(noise(5, 3, 4, 4))
    assert norm.eval()(noise(5, 3, 4, 4)).shape == (5, 3, 4, 4)


def test_the_model_sees_the_images_that_are_published() -> None:
    with torch.device("meta"):
        config = create_model(NAME).data_config
    assert (config["interpolation"], config["mean"], config["std"]) == ("bilinear", (0.5,) * 3, (0.5,) * 3)


def published_shapes() -> dict[str, tuple[int, ...]]:
    """torchvision's ResNet-50; each norm is eight of twice the width without weights, and a convolution with them."""
    shapes: dict[str, tuple[int, ...]] = {}
    with torch.device("meta"):
        plain = torchvision.models.resnet50()
    for name, module in plain.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            width = module.num_features
            for number in range(8):
                place = f"{name}.bn{number}.proxy_bn"
                shapes |= {f"{place}.running_mean": (2 * width,), f"{place}.running_var": (2 * width,)}
                shapes[f"{place}.num_batches_tracked"] = ()
            shapes |= {f"{name}.aff.bnconv.weight": (width, 1, 1, 1), f"{name}.aff.bnconv.bias": (width,)}
        elif isinstance(module, (nn.Conv2d, nn.Linear)):
            shapes |= {f"{name}.{key}": tuple(p.shape) for key, p in module.named_parameters()}
    return shapes


def test_a_published_checkpoint_is_converted_key_by_key(tmp_path: Any) -> None:
    zero = torch.zeros(1)
    state = {
        key: torch.tensor(0) if key.endswith("tracked") else zero.expand(shape)
        for key, shape in published_shapes().items()
    }
    settings = argparse.Namespace(model="resnet50")  # what their script was told; the norms were another option
    torch.save({"model": state, "epoch": 99, "args": settings}, tmp_path / "advres50_gelu.pth")
    half = (0.5, 0.5, 0.5)
    found = convert(tmp_path / "advres50_gelu.pth", "light", model_name="resnet50_gelu_adv", mean=half, std=half)
    assert found.state_dict.keys() == state.keys()
    assert found.model == {"name": NAME, "mean": half, "std": half, "num_classes": 1000}


def test_in_evaluation_it_is_torchvisions_resnet_with_gelu_and_folded_norms() -> None:
    model = moved(create_model(NAME, layers=[1, 2, 1, 1], num_classes=5).model).eval()
    plain: Any = torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [1, 2, 1, 1], num_classes=5).eval()
    state = model.state_dict()
    for name, module in plain.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            for key in ("running_mean", "running_var"):
                state[f"{name}.{key}"] = state[f"{name}.bn0.proxy_bn.{key}"][: module.num_features]
            for key in ("weight", "bias"):
                state[f"{name}.{key}"] = state[f"{name}.aff.bnconv.{key}"].flatten()
        if hasattr(module, "relu"):
            module.relu = nn.GELU()
    plain.load_state_dict({key: state[key] for key in plain.state_dict() if key in state}, strict=False)
    x = noise(2, 3, 64, 64)
    expected = plain(x)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4 * float(expected.detach().abs().max()))


def test_a_new_model_has_neutral_norms_and_convolutions_begun_as_timm_begins_them() -> None:
    model = create_model(NAME, **SMALL).model
    for module in model.modules():
        if isinstance(module, EightNorms):
            assert (module.aff.bnconv.weight == 1).all()
            assert (module.aff.bnconv.bias == 0).all()
    fan_out = 64 * 7 * 7
    assert model.conv1.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)


def test_adversarial_training_makes_two_steps() -> None:
    model = create_model(NAME, **SMALL)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    task = Adversarial(model, eps=4 / 255, attack={"use": "pgd", "steps": 2}).train()
    x, y = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])
    tracked = model.model.bn1.bn0.proxy_bn.num_batches_tracked
    losses = []
    for step in range(2):
        optimiser.zero_grad()
        loss = task(x, y)["loss"]
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimiser.step()
        losses.append(loss.item())
        assert tracked == step + 1  # the attack, in evaluation, counts nothing
    assert losses[0] != losses[1]
