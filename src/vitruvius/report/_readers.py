"""One reader for each file of a run; all but the config's leave a remark where they find nothing to read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from vitruvius._errors import CheckpointError, ConfigError, DataError, RunError
from vitruvius._files import load_tensors
from vitruvius._secrets import redact
from vitruvius._yaml import read_yaml
from vitruvius.evaluation.shift_report import ShiftReport, load_shift_report
from vitruvius.report._numbers import number


def read_config(path: Path) -> dict[str, Any]:
    """The resolved recipe, with secrets hidden; a run without a readable one is an error."""
    try:
        config: dict[str, Any] = redact(read_yaml(path))
        return config
    except ConfigError as error:
        raise RunError(f"{_one_line(error)} A run folder needs its resolved recipe.") from error


def read_json(path: Path, remarks: list[str], *, lost: str) -> dict[str, Any]:
    """A JSON table, or an empty one and a remark that says what the page loses."""
    name = _short(path)
    if not path.is_file():
        remarks.append(f"no {name}: {lost} is left out.")
        return {}
    try:
        table = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        remarks.append(f"{name} cannot be read ({_one_line(error)}): {lost} is left out.")
        return {}
    if not isinstance(table, dict):
        remarks.append(f"{name} holds {type(table).__name__}, not a table: {lost} is left out.")
        return {}
    return table


def read_epochs(path: Path, remarks: list[str]) -> list[dict[str, Any]]:
    """One row an epoch, in order; of an epoch written twice (a resumed run) the later row counts."""
    if not path.is_file():
        remarks.append("no metrics.jsonl: the training curves are left out.")
        return []
    lines = path.read_text("utf-8", errors="replace").splitlines()
    rows: dict[float, dict[str, Any]] = {}
    for place, line in enumerate(lines, start=1):
        row = _read_line(line)
        if row is not None:
            rows[row["epoch"]] = row
        elif line.strip():
            cut = "is not a row with an epoch"
            if place == len(lines):
                cut = "is cut off"
            remarks.append(f"metrics.jsonl: line {place} {cut}; it is ignored.")
    epochs = [rows[epoch] for epoch in sorted(rows)]
    remarks.extend(_not_finite(epochs))
    return epochs


def read_maps(path: Path, remarks: list[str]) -> dict[str, np.ndarray]:
    """Average attention maps, (H, N, M) for each site, in reading order of their names."""
    if not path.is_file():
        remarks.append("no maps.safetensors: the average attention maps are left out.")
        return {}
    maps = {}
    for site, tensor in read_tensors(path, remarks, lost="the average attention maps are left out").items():
        if tensor.ndim != 3 or 0 in tensor.shape or not np.isfinite(tensor).all():
            remarks.append(f"maps.safetensors: {site} is not a finite map of shape (heads, queries, keys); left out.")
        else:
            maps[site] = tensor.astype(np.float32)
    return dict(sorted(maps.items(), key=lambda item: natural(item[0])))


def read_tensors(path: Path, remarks: list[str], *, lost: str) -> dict[str, np.ndarray]:
    """All tensors of a file, or none and a remark."""
    try:
        tensors, _ = load_tensors(path)
    except CheckpointError as error:
        remarks.append(f"{_one_line(error).replace(str(path), path.name)} So {lost}.")
        return {}
    return {name: _numpy(tensor) for name, tensor in tensors.items()}


def read_weight_counts(folder: Path, remarks: list[str]) -> dict[str, int]:
    """How many numbers the checkpoint stores, masks not counted: `model`, and for each part of a core `core.<part>`."""
    path = next((folder / name for name in ("best.safetensors", "last.safetensors") if (folder / name).is_file()), None)
    if path is None:
        return {}
    counts: Counter[str] = Counter()
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                counts[_owner(name)] += _size(file.get_slice(name))
    except (SafetensorError, OSError) as error:
        remarks.append(f"{path.name} cannot be read ({_one_line(error)}): its parameters are not counted.")
        return {}
    return dict(counts)


def _owner(name: str) -> str:
    """Whose number it is: a part of a core's, or the model's."""
    _, core, part = name.partition(".core.")
    if core:
        return f"core.{part.split('.')[0]}"
    return "model"


def _size(tensor: Any) -> int:
    if tensor.get_dtype() == "BOOL":
        return 0
    return int(np.prod(tensor.get_shape(), dtype=np.int64))


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key under which blocks.2 comes before blocks.10."""
    pieces = name.split(".")
    return [(0, int(piece), "") if piece.isdigit() else (1, 0, piece) for piece in pieces]


def read_shifts(folder: Path, remarks: list[str]) -> dict[str, ShiftReport]:
    """Every readable report; those that cannot be read, and what they name as missing, are remarked."""
    found: dict[str, ShiftReport] = {}
    for file in sorted(folder.glob("*/report.json")):
        try:
            report = load_shift_report(file)
        except (DataError, RunError) as error:
            remarks.append(f"{' '.join(str(error).split()).replace(str(folder), 'evaluation/shifts')} It is left out.")
            continue
        found[report.name] = report
        remarks += [f"{report.name}: {remark}" for remark in report.remarks]
        if report.missing:
            remarks.append(f"{report.name}: not there: {', '.join(report.missing)}.")
    return found


def _read_line(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if isinstance(row, dict) and number(row.get("epoch")) is not None:
        return row
    return None


def _not_finite(epochs: list[dict[str, Any]]) -> list[str]:
    """A remark for each metric that is NaN or infinite somewhere."""
    bad: dict[str, list[str]] = {}
    for row in epochs:
        for key, value in row.items():
            if isinstance(value, float) and number(value) is None:
                bad.setdefault(key, []).append(f"{row['epoch'] + 1:g}")
    return [
        f"metrics.jsonl: {key} is not a finite number in {len(at)} of {len(epochs)} epochs (first: {at[0]}); "
        "the curve has gaps there."
        for key, at in bad.items()
    ]


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _short(path: Path) -> str:
    if path.parent.name == "evaluation":
        return f"evaluation/{path.name}"
    return path.name


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
