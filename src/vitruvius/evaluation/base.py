"""What evaluations, and the packages above, share: images with their numbers, answers as rows, and fingerprints.

B images in a batch, K classes.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius._checks import check_batch, check_eval_mode, check_head, check_labels, check_logits, check_model
from vitruvius._errors import ConfigError, DataError
from vitruvius._files import bytes_of
from vitruvius._processes import Process
from vitruvius.attacks.base import explain_images, in_one_precision
from vitruvius.attention.base import Core
from vitruvius.data import DataConfig
from vitruvius.data.identity import hash_tensors
from vitruvius.surgery.base import inner

Batch = tuple[Tensor, Tensor, Tensor]  # images (B, C, height, width) in [0, 1], labels (B), ids (B)
Columns = dict[str, Tensor]  # of a ledger, every column (n,), `id` among them
ALONE = Process(device=torch.device("cpu"))
DRAWS_RIGHT = "draws_right"  # column of random models: share of the draws in which an image is classified correctly
JUDGED = (  # settings of data that change what is judged
    "root", "val_split", "class_map", "val_num_samples", "image_size", "in_chans", "interpolation", "crop_pct",
    "crop_mode", "broken",
)  # fmt: skip
# attributes that change no answer
IGNORED = {*vars(nn.Module()), "fused_attn", "grad_checkpointing", "pretrained_cfg", "default_cfg"}


@runtime_checkable
class NumberedLoader(Protocol):
    """A loader that knows which image of the data set each one is."""

    def with_ids(self) -> Iterator[Batch]: ...


def check_judged(model: object) -> None:
    """Refuse what cannot be judged by its answers: no model, one in train mode, one without a head."""
    if not callable(model):
        check_model(model)
    check_eval_mode(model)
    check_head(model)


def numbered(loader: Iterable[Any], process: Process = ALONE) -> Iterator[Batch]:
    """Batches with ids: the loader's own, else counted in order of arrival, every process for itself."""
    if isinstance(loader, NumberedLoader):
        yield from loader.with_ids()
        return
    if not isinstance(loader, Iterable):
        raise DataError(f"the loader is {loader!r}; expected batches of tensors (images, labels).")
    start = 0
    for batch in loader:
        check_batch(batch)
        x, y, *rest = batch
        if x.ndim < 4 and y.ndim == 0:
            raise DataError(f"one image {tuple(x.shape)} without a batch; write x[None] and y.reshape(1).")
        if y.ndim == 0 or x.ndim < 2 or len(x) != len(y):
            shapes = f"images {tuple(x.shape)} and labels {tuple(y.shape)}"
            raise DataError(f"{shapes} do not pair; expected (B, ...) and (B,).")
        if rest:
            ids = _check_ids(rest[0], len(y))
        else:
            ids = torch.arange(start, start + len(y)) * process.world_size + process.rank
        start += len(y)
        yield x, y, ids


def _check_ids(ids: object, images: int) -> Tensor:
    """Refuse what does not number the images, such as the paths that some loaders yield; else the ids as they are."""
    kind = type(ids).__name__
    if isinstance(ids, Tensor):
        if ids.shape == (images,) and not ids.is_floating_point():
            return ids
        kind = f"{ids.dtype} {tuple(ids.shape)}"
    raise DataError(
        f"the third part of a batch is {kind}; expected ids, a tensor of one whole number per image. Leave it out, and "
        "images are numbered as they come."
    )


def answer_draws(model: nn.Module, x: Tensor, y: Tensor, batch_size: int, draws: int) -> Columns:
    """`answer`, a batch at a time; of several draws `correct` means in all, and the share of right ones is kept."""
    drawn = []
    for _ in range(draws):
        parts = [answer(model, *batch) for batch in zip(x.split(batch_size), y.split(batch_size), strict=True)]
        drawn.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    if draws == 1:
        return drawn[0]
    right = torch.stack([rows["correct"] for rows in drawn])  # (draws, B)
    return {**drawn[0], "correct": right.all(0), DRAWS_RIGHT: right.float().mean(0)}


def logits_of(model: nn.Module, x: Tensor, batch_size: int) -> Tensor:
    """(B, K) what the model says of images `x` (B, …), so many at a time, in its own precision or float32."""
    model, x = in_one_precision(model, x)
    parts = [model(part) for part in x.split(batch_size)]
    if not isinstance(parts[0], Tensor):
        raise ConfigError(
            f"the model returned {type(parts[0]).__name__}; expected one tensor of logits (images, classes). Wrap it "
            "in a module that returns them alone."
        )
    logits = torch.cat(parts)
    return logits if logits.dtype == torch.float64 else logits.float()  # in float64 where the model computes in it


@torch.no_grad()
def answer(model: nn.Module, x: Tensor, y: Tensor) -> Columns:
    """What the model says of a batch of images `x` (B, C, H, W) with labels `y` (B,)."""
    try:
        logits = logits_of(model, x, max(len(x), 1))  # (B, K)
    except (AssertionError, RuntimeError, ValueError) as error:
        explain_images(model, x, error)
        raise
    return read_logits(logits, y)


def read_logits(logits: Tensor, y: Tensor) -> Columns:
    """Columns of a ledger from logits (B, K) and labels (B,), which are checked.

    `top5`: whether the label is among the five best guesses. Classes are ranked by logits, whose small differences a
    softmax rounds away, and equal ones in their order.
    """
    check_logits(logits, len(y))
    check_labels(y, logits.shape[1])
    log_p = logits.log_softmax(-1)  # (B, K)
    guesses = logits.argsort(dim=-1, descending=True, stable=True)[:, :5]  # (B, 5), or all K where they are fewer
    prediction = guesses[:, 0]
    return {
        "prediction": prediction.int(),
        "confidence": logits.softmax(-1).amax(-1),
        "correct": prediction == y,
        "loss": F.cross_entropy(logits, y, reduction="none"),
        "top5": (guesses == y[:, None]).any(-1),
        "max_logit": logits.amax(-1),
        "energy": logits.logsumexp(-1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
    }


def subject_of(model: nn.Module, loader: Any) -> dict[str, Any]:
    """What an evaluation is about: enough to notice that a ledger belongs to other weights or images.

    Data, number of images, architecture with its cores, and fingerprints of weights and of settings. Which images they
    are is checked one by one: a ledger keeps a hash of each.
    """
    cores = Counter(module.describe() for module in model.modules() if isinstance(module, Core))
    attention = "".join(f", {core} at {count} sites" for core, count in cores.items())
    return {
        "data": str(getattr(loader, "name", "unnamed")),
        "images": getattr(loader, "num_images", None),
        "model": f"{type(inner(model)).__name__}{attention}",
        "weights": fingerprint(model),
        "settings": settings_fingerprint(model),
    }


def data_settings(config: DataConfig) -> dict[str, Any]:
    """What the data section of a target says about the images to judge, where it differs from the defaults."""
    defaults = DataConfig()
    values = {name: getattr(config, name) for name in JUDGED if getattr(config, name) != getattr(defaults, name)}
    return {f"data.{name}": value for name, value in values.items()}


def fingerprint(model: nn.Module) -> str:
    """A hash of every parameter and buffer (normalisation included) and of the settings of the cores.

    Equal weights on another device have the same.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    for core in model.modules():
        if isinstance(core, Core):
            digest.update(repr([(name, _settings(part)) for name, part in core.named_modules()]).encode())
    return digest.hexdigest()[:16]


def _settings(part: nn.Module) -> list[tuple[str, Any]]:
    """Numbers and words among the attributes of a part: its hyper-parameters."""
    plain = {key: value for key, value in vars(part).items() if isinstance(value, bool | int | float | str | tuple)}
    return sorted((key, value) for key, value in plain.items() if key != "training" and not key.startswith("_"))


def settings_fingerprint(model: nn.Module) -> str:
    """A hash of the plain attributes of every module, and of their classes.

    Plain are numbers, words, functions by their names, tensors that are no buffers, and lists and dictionaries of them.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        plain = []
        for key, value in sorted(vars(module).items()):
            if key not in IGNORED and "cache" not in key:  # a pass fills a cache, as LeViT's
                with contextlib.suppress(_NotPlain):
                    plain.append((key, _described(value)))
        digest.update(repr((name, type(module).__name__, plain)).encode())
    return digest.hexdigest()[:16]


class _NotPlain(Exception):
    """An object that describes itself otherwise in every process."""


def _described(value: Any) -> object:
    """What prints alike in every process."""
    if isinstance(value, tuple | list):
        return [_described(item) for item in value]
    if isinstance(value, dict):
        return [(_described(key), _described(item)) for key, item in value.items()]
    if isinstance(value, Tensor):
        return hash_tensors(value)
    if inspect.isfunction(value) or inspect.isbuiltin(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return value
    raise _NotPlain
