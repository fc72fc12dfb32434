"""How fast a model answers: images per second of the forward pass, in float32 and in bfloat16."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from vitruvius._checks import check_count, check_eval_mode, device_of
from vitruvius._files import atomic_write_text

WARM_UP = 5  # passes that are not timed: kernels are chosen and compiled in them


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One measurement."""

    precision: str  # float32, or bfloat16 by autocast
    batch_size: int
    milliseconds: float  # of a batch, the median
    images_per_second: float
    device: str


def measure_speed(
    model: nn.Module, input_size: Sequence[int], *, batch_size: int = 256, repeats: int = 20, seed: int = 0
) -> list[Speed]:
    """The forward pass of random images, first in float32, then in bfloat16; what else runs on the device counts too.

    model: in eval mode.
    input_size: of an image, (channels, rows, columns).
    batch_size: images at once; 256 by default.
    repeats: timed passes, of which the median counts; 20 by default.
    seed: of the images; 0 by default.
    """
    check_count(batch_size, "batch_size")
    check_count(repeats, "repeats")
    check_eval_mode(model)
    device = device_of(model)
    device_name = "cpu" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))
    images = torch.rand((batch_size, *input_size), generator=torch.Generator().manual_seed(seed)).to(device)
    found = []
    for precision in (torch.float32, torch.bfloat16):
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=precision != torch.float32):
            seconds = statistics.median([_timed(model, images) for _ in range(WARM_UP + repeats)][WARM_UP:])
        found.append(
            Speed(
                precision=str(precision).removeprefix("torch."),
                batch_size=batch_size,
                milliseconds=1000 * seconds,
                images_per_second=batch_size / seconds,
                device=device_name,
            )
        )
    return found


def save_speed(speeds: Sequence[Speed], path: str | Path) -> None:
    """As JSON, one object per precision."""
    atomic_write_text(path, json.dumps([asdict(speed) for speed in speeds], indent=1) + "\n")


def _timed(model: nn.Module, images: torch.Tensor) -> float:
    begun = time.perf_counter()
    float(model(images).float().sum())  # a number is read, so the device has done it all
    return time.perf_counter() - begun
