"""What the attack tests share: golden files, the networks they belong to, and small random models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from golden_files import read_golden


def golden(name: str) -> tuple[dict[str, Tensor], list[dict[str, Any]], dict[str, Any]]:
    """Tensors, cases and metadata of a golden file."""
    tensors, metadata = read_golden(name)
    return tensors, metadata.get("cases", []), metadata


class GoldenNet(nn.Module):
    """conv, GELU, strided conv, GELU, linear: the network of the deterministic golden files."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.weights = {key[4:]: value for key, value in tensors.items() if key.startswith("net.")}
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        w = self.weights
        x = F.gelu(F.conv2d(x, w["conv1.weight"], w["conv1.bias"], padding=1))
        x = F.gelu(F.conv2d(x, w["conv2.weight"], w["conv2.bias"], stride=2, padding=1))
        return F.linear(x.flatten(1), w["fc.weight"], w["fc.bias"])


def digits_cnn() -> tuple[nn.Module, Tensor, Tensor]:
    """The adversarially trained CNN of the golden runs, with 60 of its images and labels."""
    tensors, _, _ = golden("aa_model_cnn")
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    return _filled(model, tensors)


def digits_vit() -> tuple[nn.Module, Tensor, Tensor]:
    """The adversarially trained ViT of the golden runs, with 60 of its images and labels."""
    from timm.models import VisionTransformer

    tensors, _, metadata = golden("aa_model_vit")
    return _filled(VisionTransformer(**metadata["arch"]["timm_kwargs"]), tensors)


def _filled(model: nn.Module, tensors: dict[str, Tensor]) -> tuple[nn.Module, Tensor, Tensor]:
    model.load_state_dict({key[4:]: value for key, value in tensors.items() if key.startswith("net.")})
    return model.eval(), tensors["x"], tensors["y"]


def small_net(classes: int = 5, seed: int = 0, size: int = 6) -> nn.Module:
    """A random network for images (3, size, size)."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, 16), nn.GELU(), nn.Linear(16, classes))
    return net.eval()


def some_images(count: int = 6, classes: int = 5, seed: int = 0, size: int = 6) -> tuple[Tensor, Tensor]:
    """Random images with pixels at both ends of the range among them, and random labels."""
    generator = torch.Generator().manual_seed(seed)
    x = (1.4 * torch.rand(count, 3, size, size, generator=generator) - 0.2).clamp(0, 1)
    return x, torch.randint(classes, (count,), generator=generator)


def linear_problem() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A linear binary classifier, images near grey, labels, and the weights' difference (1, D)."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(27, 2)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        net[1].weight.copy_(torch.randn(2, 27, generator=generator))
        net[1].bias.zero_()
    x = 0.5 + 0.1 * torch.randn(6, 3, 3, 3, generator=generator)
    return net, x, labels_of(net, x), (net[1].weight[0] - net[1].weight[1]).detach()[None]


def labels_of(model: nn.Module, x: Tensor) -> Tensor:
    """What the model says, so that every image is right untouched."""
    with torch.no_grad():
        return model(x).argmax(1)


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())
