"""Let timm bring old keys of a model family into its present order, and notice what it leaves out."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import timm
import torch
from timm.models import is_model
from torch import Tensor

from vitruvius._errors import CheckpointError
from vitruvius.converters._checkpoint import Checkpoint
from vitruvius.models import create_model, models
from vitruvius.surgery.base import inner

HEADS = ("head.weight", "head.fc.weight", "head.linear.weight", "fc.weight", "classifier.weight")


def known_name(checkpoint: Checkpoint, model_name: str | None, renamed: dict[str, str] | None = None) -> str:
    """The model a checkpoint belongs to, under its present name."""
    name = model_name or checkpoint.args.get("model") or checkpoint.args.get("arch")
    if name is None:
        raise CheckpointError(f"{checkpoint.name} does not say which model it is. Set model_name.")
    present = (renamed or {}).get(str(name), str(name))
    if present not in models and not is_model(present.split(".")[0]):
        raise CheckpointError(f"{checkpoint.name} is a {name!r}, which neither timm {timm.__version__} nor we have.")
    return present


def class_count(checkpoint: Checkpoint) -> dict[str, int]:
    """num_classes, where the head says it."""
    for key in HEADS:
        if key in checkpoint.state:
            return {"num_classes": checkpoint.state[key].shape[0]}
    return {}


def adapt(checkpoint: Checkpoint, model: dict[str, Any]) -> None:
    """Bring the keys into the order of the timm model that `model` describes, by timm's own filter; in place."""
    with torch.device("meta"):  # shapes are enough to compare
        target = inner(create_model(**model))
    if checkpoint.state.keys() == target.state_dict().keys():
        return
    module = importlib.import_module(type(target).__module__)
    change = getattr(module, "checkpoint_filter_fn", None)
    if change is None:
        return
    if "adapt_layer_scale" in inspect.signature(change).parameters:
        change = functools.partial(change, adapt_layer_scale=True)
    before = dict(checkpoint.state)
    checkpoint.state = dict(change(dict(before), target))
    _note_lost(checkpoint, before)


def _note_lost(checkpoint: Checkpoint, before: dict[str, Tensor]) -> None:
    """Name the keys whose numbers timm's filter has left out."""
    kept = {tensor.untyped_storage().data_ptr() for tensor in checkpoint.state.values()}
    lost = [key for key, tensor in before.items() if tensor.untyped_storage().data_ptr() not in kept]
    if lost:
        checkpoint.notes.append(f"left behind by timm's own filter: {', '.join(lost)}.")
