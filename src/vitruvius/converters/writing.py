"""A converted checkpoint as a run folder, so that every verb accepts it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from vitruvius._errors import CheckpointError, RunError
from vitruvius._files import Lock, atomic_write_text, ensure_writable, save_tensors
from vitruvius._version import __version__
from vitruvius._yaml import dump_yaml
from vitruvius.converters._converted import Converted
from vitruvius.converters.arguments import head_of

EPOCH = re.compile(r"checkpoint-(\d+)\.pth(\.tar)?")  # of timm's trainer and the light recipe's, from 0
BEST = ("model_best.pth.tar", "best.pth.tar")


def epoch_checkpoints(folder: Path) -> tuple[Path, dict[int, Path]]:
    """The best checkpoint in a training's `folder` (where none is named so, the last), and all by epochs from 1."""
    matches = [(EPOCH.fullmatch(file.name), file) for file in folder.iterdir()]
    epochs = dict(sorted((int(match[1]) + 1, file) for match, file in matches if match))
    if not epochs:
        raise CheckpointError(
            f"{folder} is a folder without checkpoint-EPOCH.pth.tar; name the checkpoint file, e.g. "
            f"{folder / 'checkpoint.pth'}."
        )
    best = next((folder / name for name in BEST if (folder / name).is_file()), epochs[max(epochs)])
    return best, epochs


def write_run(
    converted: Converted, folder: str | Path, *, origin: str = "", kept: Iterable[tuple[int, Converted]] = ()
) -> Path:
    """Write `converted` as a run folder: config.yaml and best.safetensors; its notes stand at the head of the config.

    `folder` must not be a run folder yet. `origin` names where the weights come from (default: not said). `kept` are
    the weights after single epochs, counted from 1, as `train.keep` leaves them. Returns the folder's path.
    """
    path = Path(folder)
    if (path / "config.yaml").exists():
        raise RunError(f"{path} is a run folder already. Choose another one with --out, or delete it.")
    head = head_of(f"Converted from {origin}.", origin, converted.notes)
    config = {"seed": 0, **converted.config, "versions": {"vitruvius": __version__}}
    with Lock(path):
        ensure_writable(path)
        save_tensors(path / "best.safetensors", converted.state_dict, {"vitruvius": __version__, "origin": origin})
        for epoch, at_epoch in kept:
            file = path / "kept" / f"epoch_{epoch:04d}.safetensors"
            save_tensors(file, at_epoch.state_dict, {"vitruvius": __version__, "epoch": str(epoch - 1)})
        atomic_write_text(path / "config.yaml", head + dump_yaml(config))
    return path
