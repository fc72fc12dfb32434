"""Does the model answer alike when it is asked again? A copy taken before the attack judges x' and the clean images.

An attack asks a model hundreds of times. One that remembers images, adapts to batches or counts its calls then answers
otherwise than it would answer a stranger, and the attack's figure is too high. What the model's functions hold outside
of it (closures, globals, attributes of classes) is copied too, and put back for the question. B images, K classes.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius.evaluation.base import Columns, logits_of

ROUNDING = 1e-3  # of the largest logit: between logits that are closer, batches of another size may decide otherwise
SAME, MEMORY, BATCH = 0, 1, 2  # in the columns `again` and `clean_again` of a ledger
AGAIN, CLEAN_AGAIN = "again", "clean_again"
ALONE = 4  # images asked about one by one, to tell a memory from a dependence on the batch
UNCOPIED = (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError, copy.Error)
LIBRARIES = {*sys.stdlib_module_names, "numpy", "torch", "torchvision", "timm", "transformers", "vitruvius"}
Slot = tuple[Any, str]  # an object, or a dictionary, and the name of what it holds


class SecondOpinion:
    """Asks copies of a `model` as it is now; where it cannot be copied, the model itself, in another order."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        weights = [p.dtype for p in model.parameters() if p.is_floating_point()] if isinstance(model, nn.Module) else []
        self.rounding = max([ROUNDING, *(4 * torch.finfo(dtype).eps for dtype in weights)])
        self.why_not_copied = ""
        self.held: list[tuple[Slot, Any]] = []  # a copy of what functions of the model hold
        self.not_copied: list[str] = []  # kinds of what they hold and a copy shares
        memo: dict[int, Any] = {}  # two that hold the same object do so in the copy
        try:
            self.pristine = copy.deepcopy(getattr(model, "_orig_mod", model), memo)  # what torch.compile has wrapped
        except UNCOPIED as error:
            self.why_not_copied = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
            return
        for slot in held_outside(model):
            try:
                self.held.append((slot, copy.deepcopy(_read(*slot), memo)))
            except UNCOPIED:
                self.not_copied.append(type(_read(*slot)).__name__)

    def remarks(self) -> list[str]:
        """What was not seen of the model."""
        if self.why_not_copied:
            return [
                f"the model could not be copied ({self.why_not_copied}): whether it remembers images was seen only by "
                "asking it again in another order."
            ]
        kinds = ", ".join(dict.fromkeys(self.not_copied))
        remark = f"functions of the model hold what could not be copied ({kinds}): a memory there was not looked for."
        return [remark] if kinds else []

    @torch.no_grad()
    def judge(self, moved: Tensor, x: Tensor, y: Tensor, clean: Tensor, rows: Columns, batch_size: int) -> Columns:
        """Rows of a ledger, `correct` only where a copy says so too, with columns of what it says otherwise.

        `rows` are the model's answers about x' `moved` (B, …) with labels `y` (B,); `clean` (B,) its classes of the
        images `x` as they are.
        """
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)
        size = min(2 * batch_size, -(-len(x) // 2))
        back = order.argsort()
        # x' first: a copy that had seen the image would remember it
        with self._fresh() as model:
            again, clean_again = (logits_of(model, images[order], size)[back] for images in (moved, x))
        changed = self._changed(again, rows["prediction"])
        changed_clean = self._changed(clean_again, clean)
        asked = ((moved, again, changed), (x, clean_again, changed_clean))
        kind = next((self._kind(*each) for each in asked if bool(each[2].any())), SAME)
        fooled = changed & (again.argmax(1) != y)
        return {
            **rows,
            "correct": rows["correct"] & ~fooled,
            AGAIN: changed.to(torch.int8) * kind,
            CLEAN_AGAIN: changed_clean.to(torch.int8) * kind,
        }

    @contextmanager
    def _fresh(self) -> Iterator[nn.Module]:
        """A copy of the model as it was; inside, what its functions hold is as it was too."""
        if self.why_not_copied:
            yield self.model
            return
        slots = [slot for slot, _ in self.held]
        model, values = copy.deepcopy((self.pristine, [value for _, value in self.held]))
        now = [_read(*slot) for slot in slots]
        try:
            _write(slots, values)
            yield model
        finally:
            _write(slots, now)

    def _kind(self, images: Tensor, logits: Tensor, changed: Tensor) -> int:
        """Whether what a copy says of a few images depends on those beside them; if not, the model remembers."""
        few = changed.nonzero().squeeze(1)[:ALONE]
        with self._fresh() as model:
            alone = logits_of(model, images[few], 1)
        return BATCH if bool(differ(alone, logits[few], self.rounding).any()) else MEMORY

    def _changed(self, logits: Tensor, before: Tensor) -> Tensor:
        """(B,) whether the class is another one than `before`, by more than rounding."""
        old = logits.gather(1, before.long()[:, None])[:, 0]
        return logits.amax(1) - old > self.rounding * (1 + logits.abs().amax(1))


def differ(logits: Tensor, others: Tensor, rounding: float) -> Tensor:
    """(B,) whether logits (B, K) are others, by more than this share of the largest."""
    return (logits - others).abs().amax(1) > rounding * (1 + others.abs().amax(1))


def held_outside(model: object) -> list[Slot]:
    """Where functions of a model hold what its copy would share: closures, defaults, globals, attributes of classes.

    Functions and classes of LIBRARIES are passed over.
    """
    found: dict[tuple[int, str], Slot] = {}
    seen: dict[int, Any] = {}
    waiting: list[Any] = [model]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        waiting += _copied_with(item)
        for owner, name in _shared_by(item):
            try:
                value = _read(owner, name)
            except ValueError:  # a cell that is still empty
                continue
            waiting.append(value)
            if not isinstance(value, type | ModuleType) and not hasattr(type(value), "__get__"):  # no function either
                found[id(owner), name] = (owner, name)
    return list(found.values())


def _copied_with(item: Any) -> Iterable[Any]:
    """What a copy of the item takes along, and its class; of methods, partial and wrapped functions what they call."""
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, list | tuple | set | frozenset):
        return item
    if isinstance(item, nn.Module) or not _is_of_library(type(item)):
        return [type(item), getattr(item, "__dict__", {})]
    return [getattr(item, name, None) for name in ("__func__", "__self__", "__wrapped__", "func", "args", "fget")]


def _shared_by(item: Any) -> Iterator[Slot]:
    """What a function or class holds."""
    if isinstance(item, type):
        for kind in item.__mro__:
            plain = type(kind) is type  # attributes of others, such as of enumerations, cannot be written
            for name, value in vars(kind).items() if not _is_of_library(kind) else ():
                if callable(value) or (plain and name[:2] != "__"):
                    yield kind, name
    elif isinstance(item, FunctionType) and not _is_of_library(item):
        names = set(_names(item.__code__))
        modules = [value for name in names if isinstance(value := item.__globals__.get(name), ModuleType)]
        spaces = [item.__globals__, *(vars(module) for module in modules if not _is_of_library(module))]
        yield from ((cell, "cell_contents") for cell in item.__closure__ or ())
        yield from ((item, name) for name in ("__defaults__", "__kwdefaults__"))
        yield from ((vars(item), name) for name in vars(item))
        yield from ((space, name) for space in spaces for name in names if name in space)


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function uses, and the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_of_library(item: Any) -> bool:
    name = item.__name__ if isinstance(item, ModuleType) else item.__module__
    return str(name).partition(".")[0] in LIBRARIES


def _read(owner: Any, name: str) -> Any:
    if isinstance(owner, dict):
        return owner[name]
    return vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)


def _write(slots: Iterable[Slot], values: Iterable[Any]) -> None:
    for (owner, name), value in zip(slots, values, strict=True):
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)
