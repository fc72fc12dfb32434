"""A run folder: what was asked, what happened, and the weights. It is a model everywhere.

config.yaml            the resolved recipe, with versions and seed
state.pt               everything needed to resume; written first, the files below follow from it
state.previous.pt      the state before that, should state.pt be damaged
state.calm.pt          with `alarm: rollback`, the last state in which the alarm was silent
last.safetensors       weights after the last finished epoch, and last_ema.safetensors: their running average, if kept
shards/                with `parallel: fsdp`, what each process holds of the weights and the optimiser's state
kept/epoch_0010.safetensors   with `train.keep`, the weights after that epoch, counted from 1
best.safetensors       the weights that did best on the images that choose
metrics.jsonl          one line per epoch; written last
nonfinite.json, .pt    of a run that was stopped by a non-finite loss: its batch, and the state then

States are written whole, with a checksum: the sha256 of everything before it is the comment of the zip file that
torch.save makes, so that torch.load reads the file as it is.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import io
import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitruvius._config import build
from vitruvius._errors import CheckpointError, RunError
from vitruvius._files import (
    PREVIOUS,
    STATE,
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
from vitruvius._version import __version__, versions
from vitruvius._yaml import dump_yaml, read_yaml, to_plain
from vitruvius.training.config import Config

logger = logging.getLogger(__name__)

CALM = "state.calm.pt"
NONFINITE = "nonfinite.pt"
SHARDS = "shards"  # folder of the weights of states, with train.parallel=fsdp
KEPT = "kept"  # folder of the weights that `train.keep` leaves
CHECKSUM = 64  # digits of sha256, in hexadecimal
COMMENT = CHECKSUM.to_bytes(2, "little")  # ends the zip file's last record: how long the comment is
FREE = {  # what may change when a run resumes
    "processes", "started", "versions", "out", "tracking",
    "data.root", "data.download", "data.mix.root", "data.mix.download",
    "data.workers", "data.changed", "data.eval_batch_size",
    "train.device", "train.save_every", "train.save_minutes", "train.keep",
}  # fmt: skip


class Run:
    """One run folder on disk; of a URL (fsspec) the folder here, which is copied there after epochs."""

    def __init__(self, folder: str | Path) -> None:
        self.copy = RemoteCopy(str(folder), local_path(str(folder))) if is_url(folder) else None
        self.folder = Path(folder) if self.copy is None else self.copy.folder
        self.saved_updates: int | None = None  # of the newest state that this process knows
        self._lock = Lock(self.folder)
        self._made = False  # whether this process has made the folder
        self._started = False

    # the folder

    def resumed(self, config: Config, processes: int) -> Config:
        """The recipe as so many `processes` train it: those that began the run, or others that resume it.

        A run keeps its precision where the recipe leaves it open, and the images of an update: the processes that
        resume it share them out.
        """
        file = self.folder / "config.yaml"
        if self.copy is not None and not file.exists():
            self.copy.download(states=False)
        if not file.exists():
            return replace(config, processes=(processes,))
        begun = build(Config, read_yaml(file), source=str(file))
        if config.train.precision == "auto":
            config = replace(config, train=replace(config.train, precision=begun.train.precision))
        return share_out(config, begun.processes or (processes,), processes)

    def begin(self, config: Config) -> None:
        """Make the folder, or recognise it as that of this very `config`; it is ours alone until `release`."""
        self._made = not self.folder.exists()
        try:
            self._lock.take()
            if self.copy is not None:
                self.copy.download()
            self.check(config)
            ensure_writable(self.folder)
            sweep(self.folder)
            file = self.folder / "config.yaml"
            notes = read_yaml(file) if file.exists() else {}
            if list(config.processes) != notes.get("processes"):
                started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                notes = notes or {**to_plain(config), "versions": versions(), "started": started}
                notes["processes"] = list(config.processes)
                atomic_write_text(file, dump_yaml(redact(notes)))
                self.push(required=True)
        except BaseException:
            self.release()
            raise
        self._started = True

    def check(self, config: Config) -> None:
        """Refuse a folder on this machine that holds the run of another recipe; nothing is written."""
        file = self.folder / "config.yaml"
        if not file.exists():
            return
        begun = build(Config, read_yaml(file), source=str(file))
        before, now = (flatten(redact(to_plain(recipe))) for recipe in (begun, config))
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if keys:
            differing = "; ".join(f"{key} was {before.get(key)}, now {now.get(key)}" for key in keys[:3])
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            advice = "Choose another folder with out=…, or delete this one."
            raise RunError(f"{self.folder} holds a run of another recipe: {differing}{more}. {advice}")

    def release(self) -> None:
        self._lock.release()

    def push(self, *, required: bool = False) -> None:
        """Copy what has changed to the run's URL, if it has one.

        required: whether a store that fails ends the run; by default the next save tries again.
        """
        if self.copy is not None:
            self._lock.check()
            self.copy.upload(required=required)

    def abandon(self) -> None:
        """Remove the folder if nothing has come of it: no state, nothing but the recipe."""
        if not self._made or not self.folder.is_dir():
            return
        if [path.name for path in self.folder.iterdir() if not is_lock(path)] == ["config.yaml"]:
            (self.folder / "config.yaml").unlink(missing_ok=True)
            if self.copy is not None:
                self.copy.forget()
            self.release()  # with which goes the folder

    def describe_kept(self) -> str:
        """What somebody who interrupts the run now will find, in a sentence."""
        if self.saved_updates is not None:
            return f"{self.folder} keeps the state of update {self.saved_updates}; the same command resumes from there."
        if self.has_state():
            return f"{self.folder} keeps the state that was saved before; the same command resumes from there."
        return "nothing was saved yet; the same command starts again."

    def _check_folder(self) -> None:
        """Refuse to write to a folder that was moved, deleted or taken over since the run started in it."""
        if self._started and not (self.folder / "config.yaml").exists():
            raise RunError(
                f"{self.folder} was moved or deleted while the run was writing to it: config.yaml is gone. Move it "
                "back and call the same command again; it resumes from the last state in it."
            )
        self._lock.check()

    # states

    def has_state(self) -> bool:
        with explained(self.folder, "read"):
            return (self.folder / STATE).exists() or (self.folder / PREVIOUS).exists()

    def save_state(self, state: dict[str, Any]) -> None:
        """A new state.pt; what was state.pt becomes state.previous.pt. Killed anywhere, one of them is whole."""
        new = self.folder / ".state.pt.new.tmp"  # swept when a run resumes
        self.write_state(new.name, state)
        if (self.folder / STATE).exists():
            (self.folder / STATE).replace(self.folder / PREVIOUS)
        new.replace(self.folder / STATE)
        self.saved_updates = state["updates"]
        if "shards" in state:
            self._remove_old_shards()

    def load_state(self) -> dict[str, Any] | None:
        """The newest whole state, or None where there is none at all; both damaged is an error."""
        damaged: list[str] = []
        for file in (self.folder / STATE, self.folder / PREVIOUS):
            if not file.exists():
                continue
            try:
                state = verify_checksum(file.read_bytes())
                for name, checksum in state.get("shards", {}).items():
                    if checksum_of(self.folder / name) != checksum:
                        raise ValueError(f"{name} does not match its checksum")
            except Exception as error:  # whatever a broken file makes of the reader
                damaged.append(f"{file.name} is damaged: {(str(error) or type(error).__name__).splitlines()[0]}")
                continue
            if damaged:
                logger.warning("%s; resuming from %s.", damaged[0], file.name)
                (self.folder / STATE).unlink()  # or the next save would put it in the place of the good one
            self.saved_updates = state["updates"]
            return state
        if damaged:
            raise CheckpointError(f"{self.folder}: {'; '.join(damaged)}. Delete {self.folder} to start this run again.")
        return None

    def write_state(self, name: str, state: dict[str, Any]) -> None:
        """A state in a file of its own, such as CALM."""
        self._check_folder()
        atomic_write_bytes(self.folder / name, add_checksum(state))

    # the weights of a state that processes share out: a folder of safetensors, of which each has written its own

    def new_shards(self) -> Path:
        """An empty folder for the next state's."""
        self._check_folder()
        number = max((int(path.name) for path in (self.folder / SHARDS).glob("*")), default=0) + 1
        folder = self.folder / SHARDS / f"{number:06d}"
        folder.mkdir(parents=True)
        return folder

    def checksums_of(self, shards: Path) -> dict[str, str]:
        """The checksum of every file in that folder, by its path inside the run's."""
        return {str(path.relative_to(self.folder)): checksum_of(path) for path in sorted(shards.iterdir())}

    def _remove_old_shards(self) -> None:
        """Those that no state names any more."""
        named: set[str] = set()
        for name in (STATE, PREVIOUS, CALM, NONFINITE):
            with contextlib.suppress(Exception):  # it is not there, or damaged in any way
                shards = verify_checksum((self.folder / name).read_bytes()).get("shards", {})
                named |= {Path(shard).parent.name for shard in shards}
        for folder in (self.folder / SHARDS).iterdir():
            if folder.name not in named:
                shutil.rmtree(folder)

    # weights and metrics

    def save_weights(self, name: str, weights: dict[str, Tensor], **notes: Any) -> None:
        """The inner model's own keys, which plain timm can read after `restore`; `notes` go into the file's head."""
        metadata = {key: json.dumps(value) for key, value in {"vitruvius": __version__, **notes}.items()}
        self._check_folder()
        file = self.folder / f"{name}.safetensors"
        file.parent.mkdir(exist_ok=True)
        save_tensors(file, weights, metadata)

    def keep_epochs(self, epochs: set[int]) -> None:
        """Remove kept weights of epochs other than these, counted from 0."""
        for epoch, file in kept_weights(self.folder).items():
            if epoch - 1 not in epochs:
                file.unlink()

    def save_metrics(self, rows: list[dict[str, Any]]) -> None:
        """All rows: none twice, none missing, whenever the run was stopped."""
        self._check_folder()
        atomic_write_text(self.folder / "metrics.jsonl", json_lines(rows))

    def has_metrics(self, rows: list[dict[str, Any]]) -> bool:
        """Whether the metrics are these `rows`, and so every file is as new as the state."""
        file = self.folder / "metrics.jsonl"
        return file.exists() and read_text(file) == json_lines(rows)


def share_out(config: Config, before: tuple[int, ...], processes: int) -> Config:
    """The recipe of a run that the processes in `before` have trained, in turn, with the same images per update."""
    batch, steps = config.data.batch_size, config.train.grad_accum_steps
    images = batch * steps * before[0]
    if images % processes:
        fitting = [number for number in range(1, 2 * processes) if images % number == 0]
        nearest = min(fitting, key=lambda number: abs(number - processes))
        uneven = f"which {processes} processes cannot share evenly; resume it with {nearest}."
        raise RunError(f"the run makes updates of {images} images, {uneven}")
    if processes != before[0]:
        share = images // processes
        steps = next(number for number in range(math.ceil(share / batch), share + 1) if share % number == 0)
        batch = share // steps
    if processes != before[-1]:
        before = (*before, processes)
        logger.warning(
            "the run was trained by %d process(es) and resumes with %d: %d images an update as before, in %d batch(es) "
            "of %d on each. Random numbers and sums differ from here on: not bit for bit as if undisturbed.",
            before[-2], processes, images, steps, batch,
        )  # fmt: skip
    train, data = replace(config.train, grad_accum_steps=steps), replace(config.data, batch_size=batch)
    return replace(config, train=train, data=data, processes=before)


def add_checksum(state: dict[str, Any]) -> bytes:
    """A state as torch.save writes it, with a checksum at its end."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    body = buffer.getbuffer()
    assert bytes(body[-2:]) == b"\0\0", "torch.save ends its file with a comment of its own"
    body[-2:] = COMMENT
    return b"".join([body, hashlib.sha256(body).hexdigest().encode()])


def verify_checksum(data: bytes) -> dict[str, Any]:
    """The state in such a file; ValueError says what is wrong with it."""
    body = data[:-CHECKSUM]
    if body[-2:] != COMMENT:
        raise ValueError(f"its {len(data)} bytes do not end with a checksum")
    if hashlib.sha256(body).hexdigest().encode() != data[-CHECKSUM:]:
        raise ValueError("it does not match its checksum")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def checksum_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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


def json_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)
