"""What autograd keeps for the backward pass, in bytes: every storage once, the model's own weights not at all."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


class Kept:
    """`with Kept(model) as kept: step()`; then `kept.peak` is the most that was kept at a time."""

    def __init__(self, model: nn.Module) -> None:
        self.peak = self.now = 0
        self._own = {_place(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._holders: Counter[int] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> Kept:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> _Held:
        place = _place(tensor)
        if place in self._own:
            return _Held(tensor, None, place)
        if self._holders[place] == 0:
            self.now += tensor.untyped_storage().nbytes()
            self.peak = max(self.peak, self.now)
        self._holders[place] += 1
        return _Held(tensor, self, place)

    def release(self, tensor: Tensor, place: int) -> None:
        """One holder of a storage is gone."""
        self._holders[place] -= 1
        if self._holders[place] == 0:
            self.now -= tensor.untyped_storage().nbytes()


class _Held:
    """A tensor in the graph; says goodbye when the graph lets it go."""

    def __init__(self, tensor: Tensor, kept: Kept | None, place: int) -> None:
        self.tensor, self.kept, self.place = tensor, kept, place

    def __del__(self) -> None:
        if self.kept is not None:
            self.kept.release(self.tensor, self.place)


def _unpack(held: Any) -> Tensor:
    tensor: Tensor = held.tensor
    return tensor


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
