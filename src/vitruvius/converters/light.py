"""Checkpoints of dedeswim/vits-robustness-torch (Debenedetti et al. 2023, arXiv:2209.07399): robust XCiTs and others.

Its models were trained on pixels in [0, 1], normalised inside the model or not at all; the statistics were never saved
with the weights, only in the run's settings.
"""

from __future__ import annotations

from typing import Any

from vitruvius.converters.base import UNTOUCHED, Checkpoint, Converted, converters, finish
from vitruvius.converters.plain import adapt, class_count, known_name, stored_statistics
from vitruvius.models import models

RENAMED = {name.removeprefix("vitruvius/"): name for name in models} | {
    "xcit_small_12_p2_32": "vitruvius/xcit_small_12_p1_32",  # its re-striding took all four strides
}


@converters.register("light")
def light(
    checkpoint: Checkpoint,
    *,
    model_name: str | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> Converted:
    """vits-robustness-torch: XCiT p16/224 and p4/32 (re-strided), its ResNets, and timm models it trained.

    `checkpoint` is the file as it was read; `model_name` is that of the model, by default the one it names itself;
    `mean` and `std` are those it was evaluated with; without them, and without stored settings, pixels go in as they
    are.
    """
    inside = {name: checkpoint.state.pop(f"normalize.{name}", None) for name in ("mean", "std")}
    checkpoint.state = {key.removeprefix("model."): value for key, value in checkpoint.state.items()}
    model: dict[str, Any] = {"name": known_name(checkpoint, model_name, RENAMED)}
    model |= _statistics(checkpoint, {"mean": mean, "std": std}, inside) | class_count(checkpoint)
    adapt(checkpoint, model)
    return finish(checkpoint, model)


def _statistics(checkpoint: Checkpoint, given: dict[str, Any], inside: dict[str, Any]) -> dict[str, Any]:
    """Mean and std: as given, else from inside the model, else as its settings say."""
    if None not in given.values():
        return given
    if all(value is not None for value in inside.values()):
        return {name: tuple(value.flatten().tolist()) for name, value in inside.items()}
    if "normalize_model" not in checkpoint.args:
        checkpoint.notes.append(
            "nothing says how the pixels were normalised: taken as not at all, right for its ImageNet XCiTs. "
            "Its CIFAR, Flowers, Caltech and ResNet models need mean and std."
        )
        return UNTOUCHED
    if not checkpoint.args["normalize_model"]:
        return UNTOUCHED
    if len(stored := stored_statistics(checkpoint)) == 2:
        return stored
    checkpoint.notes.append("normalised by the model's default statistics.")
    return {}
