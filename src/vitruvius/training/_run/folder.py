"""A run folder: what was asked, what happened, and the weights. It is a model everywhere.

config.yaml            the resolved recipe, with versions and seed
state.pt               everything needed to go on; written first, the files below follow from it
state.previous.pt      the state before that, should state.pt be damaged
state.calm.pt          with `alarm: rollback`, the last state in which the alarm was silent
last.safetensors       weights after the last finished epoch, and last_ema.safetensors: their running average, if kept
kept/epoch_0010.safetensors   with `train.keep`, the weights after that epoch, counted from 1
best.safetensors       the weights that did best on the images that choose
metrics.jsonl          one line per epoch; written last
nonfinite.json, .pt    of a run that was stopped by a non-finite loss: its batch, and the state then
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import platform
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor

from vitruvius._config import build
from vitruvius._errors import RunError
from vitruvius._files import (
    Lock,
    RemoteCopy,
    atomic_write_bytes,
    atomic_write_text,
    ensure_writable,
    explained,
    is_lock,
    is_url,
    local_path,
    read_text,
    save_tensors,
    sweep,
)
from vitruvius._secrets import redact
from vitruvius._version import __version__
from vitruvius._yaml import dump_yaml, read_yaml, to_plain
from vitruvius.training._run import state_file as checkpoint
from vitruvius.training.config import Config

KEPT = "kept"  # folder of the weights that `train.keep` leaves

FREE = {  # what may change between two halves of a run
    "started",
    "versions",
    "out",
    "data.root",
    "data.download",
    "data.mix.root",
    "data.mix.download",
    "data.workers",
    "data.changed",
    "data.eval_batch_size",
    "train.device",
    "train.save_every",
    "train.save_minutes",
    "train.keep",
    "tracking",
}


class Run:
    """One run folder on disk; of a remote one (an fsspec URL) the folder here, which is copied there after epochs.

    `folder` is a path, or the URL of a remote folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.copy = RemoteCopy(str(folder), local_path(str(folder))) if is_url(folder) else None
        self.folder = Path(folder) if self.copy is None else self.copy.folder
        self.saved_updates: int | None = None  # of the newest state that this process knows
        self._lock = Lock(self.folder)
        self._made = False
        self._begun = False

    def begin(self, config: Config) -> None:
        """Make the folder, or recognise it as this very recipe's; it is ours alone until `release`.

        `config` is the whole recipe.
        """
        self._made = not self.folder.exists()
        try:
            self._lock.take()
            self._make_or_recognise(config)
        except BaseException:
            self.release()
            raise
        self._begun = True

    def check(self, config: Config) -> None:
        """Refuse a folder on this machine that holds the run of another recipe; nothing is written.

        config: the recipe, resolved.
        """
        file = self.folder / "config.yaml"
        if file.exists():
            self._recognise(config, file)

    def release(self) -> None:
        """Let other processes write to the folder again."""
        self._lock.release()

    def _make_or_recognise(self, config: Config) -> None:
        if self.copy is not None:
            self.copy.download()
        file = self.folder / "config.yaml"
        if file.exists():
            self._recognise(config, file)
            ensure_writable(self.folder)
            sweep(self.folder)
            return
        ensure_writable(self.folder)
        stamped = dataclasses.replace(config, versions=versions(), started=now())
        atomic_write_text(file, dump_yaml(redact(to_plain(stamped))))
        self.push(required=True)

    def push(self, *, required: bool = False) -> None:
        """Copy what has changed to the run's URL, if it has one.

        required: whether a store that fails ends the run; by default the next save tries again.
        """
        if self.copy is not None:
            self._lock.check()
            self.copy.upload(required=required)

    def abandon(self) -> None:
        """Take the folder back if nothing has come of it: no state, nothing but the recipe."""
        if not self._made or not self.folder.is_dir():
            return
        if [path.name for path in self.folder.iterdir() if not is_lock(path)] == ["config.yaml"]:
            (self.folder / "config.yaml").unlink(missing_ok=True)
            if self.copy is not None:
                self.copy.forget()
            self.release()
            with contextlib.suppress(OSError):  # somebody has put a file there
                self.folder.rmdir()

    def has_state(self) -> bool:
        with explained(self.folder, "read"):
            return checkpoint.exists(self.folder)

    def save_state(self, state: dict[str, Any]) -> None:
        """Write the `state`, from which training goes on exactly, in place of the one before."""
        self._check_place()
        checkpoint.save(self.folder, state)
        self.saved_updates = state["updates"]

    def load_state(self) -> dict[str, Any] | None:
        """The newest whole state, or None."""
        state = checkpoint.load(self.folder)
        if state is not None:
            self.saved_updates = state["updates"]
        return state

    def describe_kept(self) -> str:
        """What somebody who interrupts the run now will find, in a sentence."""
        if self.saved_updates is not None:
            return f"{self.folder} keeps the state of update {self.saved_updates}; the same command goes on from there."
        if self.has_state():
            return f"{self.folder} keeps the state that was saved before; the same command goes on from there."
        return "nothing was saved yet; the same command begins anew."

    def save_calm(self, state: dict[str, Any]) -> None:
        """Keep a `state` from a time without an alarm, for a rollback."""
        self._check_place()
        atomic_write_bytes(self.folder / checkpoint.CALM, checkpoint.add_checksum(state))

    def load_calm(self) -> dict[str, Any] | None:
        """The state to come back to, if there is one."""
        file = self.folder / checkpoint.CALM
        return checkpoint.verify_checksum(file.read_bytes()) if file.exists() else None

    def save_nonfinite(self, note: str, state: dict[str, Any]) -> None:
        """What is known of a non-finite loss, beside the states that go on.

        `note` is JSON text; `state` is that before the update.
        """
        atomic_write_text(self.folder / "nonfinite.json", note)
        atomic_write_bytes(self.folder / "nonfinite.pt", checkpoint.add_checksum(state))
        self.push()

    def save_weights(self, name: str, weights: dict[str, Tensor], **notes: Any) -> None:
        """The inner model's own keys; plain timm can read them after `restore`.

        `name` is that of the file without its ending; `weights` are by key; `notes` go into its head, as JSON.
        """
        metadata = {key: json.dumps(value) for key, value in {"vitruvius": __version__, **notes}.items()}
        self._check_place()
        file = self.folder / f"{name}.safetensors"
        file.parent.mkdir(exist_ok=True)
        save_tensors(file, weights, metadata)

    def keep_epochs(self, epochs: set[int]) -> None:
        """Remove kept weights of epochs other than these `epochs`, counted from 0."""
        for epoch, file in kept_weights(self.folder).items():
            if epoch - 1 not in epochs:
                file.unlink()

    def save_metrics(self, rows: list[dict[str, Any]]) -> None:
        """All rows: none twice, none missing, whenever the run was stopped."""
        self._check_place()
        atomic_write_text(self.folder / "metrics.jsonl", _lines(rows))

    def has_metrics(self, rows: list[dict[str, Any]]) -> bool:
        """Whether the metrics are these `rows`, and so every file is as new as the state."""
        file = self.folder / "metrics.jsonl"
        return file.exists() and read_text(file) == _lines(rows)

    def _check_place(self) -> None:
        """Refuse to go on in a folder that was moved or deleted since the run began in it."""
        if self._begun and not (self.folder / "config.yaml").exists():
            raise RunError(
                f"{self.folder} was moved or deleted while the run was writing to it: config.yaml is gone. Move it "
                "back and call the same command again; it goes on from the last state in it."
            )
        self._lock.check()

    def _recognise(self, config: Config, file: Path) -> None:
        known = flatten(redact(to_plain(build(Config, read_yaml(file), source=str(file)))))
        asked = flatten(redact(to_plain(config)))
        keys = [key for key in {**known, **asked} if known.get(key) != asked.get(key)]
        if not keys:
            return
        differing = "; ".join(f"{key} was {known.get(key)}, now {asked.get(key)}" for key in keys[:3])
        if len(keys) > 3:
            differing += f" and {len(keys) - 3} more"
        raise RunError(
            f"{self.folder} holds a run of another recipe: {differing}. "
            "Choose another folder with out=…, or delete this one."
        )


def kept_weights(run: str | Path) -> dict[int, Path]:
    """The weights that `train.keep` has left in a run folder: epoch, counted from 1 → file."""
    files = sorted((Path(run) / KEPT).glob("epoch_*.safetensors"))
    return {int(file.stem.removeprefix("epoch_")): file for file in files}


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """`{"train": {"lr": 1}}` → `{"train.lr": 1}`, without what may change."""
    if path in FREE:
        return {}
    if not isinstance(value, dict) or not value:
        return {path: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= flatten(item, f"{path}.{key}".lstrip("."))
    return flat


def versions() -> dict[str, str]:
    """What this ran with."""
    return {
        "vitruvius": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        "timm": timm.__version__,
    }


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)
