"""From ours to plain timm: weights that compute the same without this package."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from vitruvius._errors import SurgeryError
from vitruvius.attention.low_rank import LowRank
from vitruvius.attention.mask import Mask
from vitruvius.attention.softmax import Softmax
from vitruvius.attention.symmetric import Symmetric
from vitruvius.surgery import head_weights, restore
from vitruvius.surgery.base import cores_of, inner
from vitruvius.surgery.folding import fold

PREPROCESSING = ("input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation")


def to_timm(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a plain timm model that computes what `model` does; the model itself stays as it is.

    Auto-encoders are folded, symmetric attention gets queries equal to its keys, masks that keep everything vanish;
    what timm's attention cannot do (rpc, scaled, a mask …) is an error that names it.
    """
    return _plain(model).state_dict()


def save_for_hub(model: nn.Module, folder: str | Path, *, arguments: Mapping[str, Any] | None = None) -> Path:
    """Write `model` as a plain timm model in the layout of the Hugging Face hub, its preprocessing in config.json.

    `folder` is where; `timm.create_model("local-dir:<folder>", pretrained=True)` reads it. `arguments` are those of
    the constructor, where timm has not recorded them. Returns its path.
    """
    plain = _plain(model)
    if "architecture" not in getattr(plain, "pretrained_cfg", {}):
        raise SurgeryError(
            f"{type(plain).__name__} is not a model that timm makes by name; export it as safetensors or torch-export."
        )
    data = {key: value for key, value in getattr(model, "data_config", {}).items() if key in PREPROCESSING}
    arguments = dict(arguments or {})
    built_for = getattr(getattr(plain, "patch_embed", None), "img_size", None)
    if built_for is not None:  # timm 1.0.29 records no arguments and would resample the positions
        arguments.setdefault("img_size", list(built_for))
    timm.models.save_for_hf(
        plain,
        str(folder),
        model_config={"pretrained_cfg": data},
        model_args=arguments,
        safe_serialization=True,
    )
    return Path(folder)


def _plain(model: nn.Module) -> nn.Module:
    root = copy.deepcopy(inner(model))
    cores = cores_of(root)
    for name, core in cores.items():
        strange = [key for key, part in core.parts.items() if not _has_timm_form(part)]
        if strange:
            raise SurgeryError(
                f"{name!r} attends by {core.describe()}; timm's attention cannot do {', '.join(strange)}. "
                "restore(model) gives its weights back to timm, with another function."
            )
    if any(isinstance(module, LowRank) for module in root.modules()):
        fold(root)
    for name, core in cores.items():
        if any(isinstance(part, Symmetric) for part in core.children()):
            _copy_keys_to_queries(root, name)
    if cores:
        restore(root)
    return root


def _has_timm_form(part: nn.Module) -> bool:
    return bool(part.keep.all()) if isinstance(part, Mask) else isinstance(part, LowRank | Symmetric | Softmax)


@torch.no_grad()
def _copy_keys_to_queries(root: nn.Module, name: str) -> None:
    module: Any = root.get_submodule(name)
    if not isinstance(getattr(module, "q_norm", nn.Identity()), nn.Identity):
        raise SurgeryError(
            f"{name!r} normalises q and k by weights of their own; symmetric attention has no timm form."
        )
    _, weights = head_weights(root, name)[name]
    if weights.q_bias is not None and weights.k_bias is None:
        weights.q_bias.zero_()
    elif weights.q_bias is not None and weights.k_bias is not None:
        weights.q_bias.copy_(weights.k_bias)
    weights.q.copy_(weights.k)
