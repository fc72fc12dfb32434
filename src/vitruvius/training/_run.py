"""A run folder: what was asked, what happened, and the weights. It is a model everywhere.

config.yaml            the resolved recipe, with versions and seed
metrics.jsonl          one line an epoch
last.safetensors       weights after the last finished epoch (EMA weights beside it where there are any)
best.safetensors       the weights that did best on held-out images
state.pt               everything needed to go on
"""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import platform
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import nn

from vitruvius._errors import CheckpointError, RunError
from vitruvius._files import append_line, atomic_write_bytes, atomic_write_text, ensure_writable, save_tensors
from vitruvius._version import __version__
from vitruvius._yaml import dump_yaml, read_yaml, to_plain
from vitruvius.surgery import inner
from vitruvius.training.config import Config

IGNORED = {"started", "versions", "out"}  # a run may go on under another name, time and version


class Run:
    """One run folder on disk."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def begin(self, config: Config) -> bool:
        """Make the folder, or recognise it as this very recipe's. True if there is something to go on with."""
        file = self.folder / "config.yaml"
        if not file.exists():
            ensure_writable(self.folder)
            stamped = dataclasses.replace(config, versions=versions(), started=now())
            atomic_write_text(file, dump_yaml(stamped))
            return False
        known, asked = read_yaml(file), to_plain(config)
        differing = [key for key in asked if key not in IGNORED and known.get(key) != asked[key]]
        if differing:
            raise RunError(
                f"{self.folder} holds a run of another recipe ({', '.join(differing)} differ). "
                "Choose another folder with out=…, or delete it."
            )
        return (self.folder / "state.pt").exists()

    def note(self, row: dict[str, Any]) -> None:
        """One line of metrics."""
        append_line(self.folder / "metrics.jsonl", json.dumps(row))

    def rewrite(self, rows: list[dict[str, Any]]) -> None:
        """The metrics as the state knows them: no line twice, none missing, whenever the run was stopped."""
        atomic_write_text(self.folder / "metrics.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))

    def save_weights(self, name: str, model: nn.Module, **notes: Any) -> None:
        """The inner model's own keys; plain timm can read them after `restore`."""
        metadata = {key: json.dumps(value) for key, value in {"vitruvius": __version__, **notes}.items()}
        save_tensors(self.folder / f"{name}.safetensors", inner(model).state_dict(), metadata)

    def save_state(self, state: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        atomic_write_bytes(self.folder / "state.pt", buffer.getvalue())

    def load_state(self) -> dict[str, Any]:
        file = self.folder / "state.pt"
        try:
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{file} is damaged ({str(error).splitlines()[0]}). Delete it to begin this run anew."
            ) from error
        return state


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
