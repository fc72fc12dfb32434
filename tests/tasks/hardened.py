"""What the tests of adversarial tasks share: the golden network, an attack with a given start, a small model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from golden_files import read_golden
from vitruvius.attacks.norms import L2Norm
from vitruvius.attacks.pgd import PGD
from vitruvius.models import PixelModel, create_model


def golden(name: str) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Tensors and cases of a golden file."""
    tensors, metadata = read_golden(name)
    return tensors, metadata["cases"]


class NormedNet(nn.Module):
    """conv, batch norm, GELU, strided conv, GELU, linear: the network of the golden losses, in train mode."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        weights = {key[4:]: value for key, value in tensors.items() if key.startswith("net.")}
        out, channels = weights["fc.weight"].shape[0], weights["conv1.weight"].shape[:2]
        self.conv1 = nn.Conv2d(channels[1], channels[0], 3, padding=1)
        self.bn1 = nn.BatchNorm2d(channels[0])
        self.conv2 = nn.Conv2d(channels[0], weights["conv2.weight"].shape[0], 3, stride=2, padding=1)
        self.fc = nn.Linear(weights["fc.weight"].shape[1], out)
        self.double().load_state_dict(weights)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.bn1(self.conv1(x)))
        return self.fc(F.gelu(self.conv2(x)).flatten(1))


@dataclass(frozen=True, kw_only=True)
class FromStart(PGD):
    """PGD from a given start, with the guards of the released code in L2."""

    begin: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm.name == "l2":
            object.__setattr__(self, "norm", L2Norm(floor=1e-10, slack=1e-7))

    def start(self, x: Tensor, dice: Any, restart: int = 0) -> Tensor:
        return self.begin


def small(*parts: Any, seed: int = 3, **kwargs: Any) -> PixelModel:
    """A small ViT for the digits, in train mode."""
    settings = {"depth": 1, "embed_dim": 24, **kwargs}
    return create_model("vitruvius/vit_digits", attention=parts, seed=seed, **settings).train()


def some_digits(count: int = 6, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Random images and labels."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 3, 8, 8, generator=generator), torch.randint(classes, (count,), generator=generator)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients of all parameters that have one."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def grad_of(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """The gradient of a loss, by name."""
    model.zero_grad()
    loss.backward()
    return gradients(model)
