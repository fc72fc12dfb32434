"""The sanity checks as a command runs them: a few hundred images, twins of the model's attention, findings kept.

Attention may hide its gradient (thresholds, hidden keys, saturation), so the model is also attacked through twins:
copies with the same weights in which each part is replaced as it declares itself (`Stage.twins`), and in float32
where the model computes in less. Points found there are tried on the real model, and its forward pass is attacked
with their gradients (straight through).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._checks import Progress, device_of
from vitruvius._errors import ConfigError
from vitruvius._files import atomic_write_text
from vitruvius._yaml import parse_value
from vitruvius.attacks import LINF, Norm, as_norm
from vitruvius.attention import Core, build_twin
from vitruvius.evaluation._evaluate import numbered
from vitruvius.evaluation.findings import Finding
from vitruvius.evaluation.sanity import Sanity
from vitruvius.surgery import Socket, inner, survey
from vitruvius.surgery.blocks import link_blocks


def examine(
    model: nn.Module,
    loader: Iterable[Any],
    eps: float,
    *,
    norm: Norm | str = LINF,
    images: int = 256,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Finding]:
    """Every check on the first images of a loader, through the twins of the model's attention too.

    `eps` is the radius in pixels, in `norm` (linf, l2 or l1); `images` how many are looked at, `seed` that of the
    attacks. `progress` is told which check is being made.

    `model` is in eval mode; `loader` yields (images, labels, …).
    """
    batches = list(_first(loader, images))
    x, y, ids = (torch.cat(column)[:images] for column in zip(*batches, strict=True))
    device = device_of(model)
    twins = make_twins(model, tuple(x.shape[1:]))
    checks = Sanity(eps=eps, norm=as_norm(norm), seed=seed, twins=twins, batch_size=len(batches[0][1]))
    return checks(model, x.to(device), y.to(device), ids=ids, progress=progress)


def read_ball(text: str | float | None) -> tuple[Norm, float] | None:
    """Norm and radius as a command writes them: 8/255 in linf, l2:0.5, l1:12; None for a `text` of None."""
    if text is None:
        return None
    norm, colon, radius = str(text).rpartition(":")
    if not colon:
        norm = "linf"
    value = parse_value(radius)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            f"--sanity {text} is not a number; write a strength in pixels such as 8/255, or with its norm, l2:0.5."
        )
    checks = Sanity(eps=float(value), norm=as_norm(norm))  # which refuses what is no radius
    return checks.norm, checks.eps


def make_twins(model: nn.Module, input_size: tuple[int, ...] | None = None) -> dict[str, nn.Module]:
    """Copies of `model` to attack through, by name; none where its attention declares none.

    `input_size` is that of an image, (channels, rows, columns), for models that do not know it themselves (default:
    None).
    """
    names: set[str] = set()
    for core in _cores(model).values():
        for part in core.parts.values():
            names.update(_twins_of(part))
    twins = {name: _twin(model, name, input_size) for name in sorted(names)}
    if any(map(_is_half, model.parameters())):
        twins["float32"] = InFloat32(copy.deepcopy(model).float())
    return twins


def plain_surrogate(model: nn.Module) -> nn.Module | None:
    """The twin with plain softmax attention; None where no part declares one.

    `model` is rewired or bare, and stays as it is.
    """
    return make_twins(model).get("plain")


class InFloat32(nn.Module):
    """A model in float32 that answers in the precision of its images.

    `model` is taken as it is.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K) for images `x` (B, C, H, W) of any floating-point type."""
        answer: Tensor = self.model(x.float())
        return answer.to(x.dtype)


def save_findings(findings: list[Finding], path: str | Path) -> None:
    """As JSON, one object per check.

    `findings` are those of `Sanity` or an examination; `path` is the file to write.
    """
    atomic_write_text(path, json.dumps([finding.to_dict() for finding in findings], indent=1) + "\n")


def _cores(model: nn.Module) -> dict[str, Core]:
    sockets = {name: module for name, module in inner(model).named_modules() if isinstance(module, Socket)}
    return {name: socket.core for name, socket in sockets.items() if isinstance(socket.core, Core)}


def _twins_of(part: Any) -> Iterable[str]:
    return tuple(part.twins)


def _twin(model: nn.Module, name: str, input_size: Any) -> nn.Module:
    """A copy in which every part that declares this twin is replaced by it."""
    twin = copy.deepcopy(model)
    sites = survey(twin, input_size=input_size)
    for place, core in _cores(twin).items():
        replaced = build_twin(core, name, sites[place])
        if replaced is None:
            continue
        socket: Any = inner(twin).get_submodule(place)
        weight = next(p for p in socket.parameters() if p.is_floating_point())
        socket.core = replaced.to(weight).train(socket.training)
    link_blocks(inner(twin))
    return twin


def _first(loader: Iterable[Any], images: int) -> Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    seen = 0
    for batch in numbered(loader):
        yield batch
        seen += len(batch[1])
        if seen >= images:
            return


def _is_half(parameter: Tensor) -> bool:
    """Whether it has fewer bits than float32."""
    return parameter.is_floating_point() and parameter.dtype.itemsize < torch.float32.itemsize
