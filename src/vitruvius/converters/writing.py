"""A converted checkpoint as a run folder, so that every verb accepts it."""

from __future__ import annotations

from pathlib import Path

from vitruvius._errors import RunError
from vitruvius._files import Lock, atomic_write_text, ensure_writable, save_tensors
from vitruvius._version import __version__
from vitruvius._yaml import dump_yaml
from vitruvius.converters._converted import Converted
from vitruvius.converters.arguments import head_of


def write_run(converted: Converted, folder: str | Path, *, origin: str = "") -> Path:
    """Write `converted` as a run folder: config.yaml and best.safetensors; its notes stand at the head of the config.

    `folder` must not be a run folder yet. `origin` names where the weights come from (default: not said). Returns the
    folder's path.
    """
    path = Path(folder)
    if (path / "config.yaml").exists():
        raise RunError(f"{path} is a run folder already. Choose another one with --out, or delete it.")
    head = head_of(f"Converted from {origin}.", origin, converted.notes)
    config = {"seed": 0, **converted.config, "versions": {"vitruvius": __version__}}
    with Lock(path):
        ensure_writable(path)
        save_tensors(path / "best.safetensors", converted.state_dict, {"vitruvius": __version__, "origin": origin})
        atomic_write_text(path / "config.yaml", head + dump_yaml(config))
    return path
