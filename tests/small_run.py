"""The smallest training that is still one: a one-block ViT on a few digits, a fraction of a second."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitruvius._files import load_tensors
from vitruvius._processes import Process
from vitruvius.training import Config, read_recipe, train
from vitruvius.training.loop import Trainer
from vitruvius.training.session import Session, open_session

RECIPE = Path(__file__).parents[1] / "recipes" / "digits" / "softmax.yaml"
SMALL = (
    "model.kwargs={depth: 1, embed_dim: 24}",
    "data.train_num_samples=48",
    "data.val_num_samples=24",
    "data.batch_size=8",
    "train.holdout=0.25",
    "train.epochs=2",
    "train.warmup_epochs=0",
    "train.device=cpu",
)
TIMES = ("seconds", "images_per_second", "elapsed")  # what no two runs share


def small_config(out: Path, *overrides: str) -> Config:
    """36 training images, 12 held out, 24 for validation; two epochs of four batches."""
    return read_recipe(RECIPE, [*SMALL, f"out={out}", *overrides])


def small_session(*overrides: str) -> Session:
    """What that training works with, without a folder."""
    return open_session(small_config(Path("unused"), *overrides), Process(device=torch.device("cpu")))


def small_run(out: Path, *overrides: str) -> Path:
    return train(small_config(out, *overrides), quiet=True)


class Stop(Exception):
    """The plug is pulled."""


def stop_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *, after: bool = False) -> None:
    """Raise Stop at the so-many-th call of a function, before or after it has done its work."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def stopping(*arguments: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            raise Stop
        result = original(*arguments, **settings)
        if calls == call:
            raise Stop
        return result

    monkeypatch.setattr(owner, name, stopping)


def stopped_run(monkeypatch: pytest.MonkeyPatch, out: Path, batches: int, *overrides: str) -> None:
    """A run that is stopped before its so-many-th batch."""
    with monkeypatch.context() as patch:
        stop_at(patch, Trainer, "train_batch", batches)
        with pytest.raises(Stop):
            small_run(out, *overrides)


def state_of(run: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(run / "state.pt", weights_only=True)
    return state


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run, as it stands; of the state before the last one a copy elsewhere may have an older one."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name != "state.previous.pt"}


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The metrics without the times."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def assert_same_run(one: Path, other: Path) -> None:
    """Bit for bit: weights, average, optimiser, counters, metrics, and the files that hold them."""
    left, right = state_of(one), state_of(other)
    for state in (left, right):
        state["rows"] = state["elapsed"] = state["shards"] = None  # of shards, the files are named
    assert_same(left, right)
    assert rows_of(one) == rows_of(other)
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    for file in one.glob("*.safetensors"):
        assert_same(load_tensors(file), load_tensors(other / file.name))


def assert_same(one: Any, other: Any) -> None:
    """Equal in every number and every bit, through dictionaries and lists."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def all_images(batches: Iterable[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Images, labels and ids of all batches together."""
    return tuple(torch.cat(column) for column in zip(*batches, strict=True))
