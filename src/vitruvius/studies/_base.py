"""What studies share: subjects (models with their data), rows that survive a kill, a CSV and a figure at the end."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from matplotlib.figure import Figure
from torch import Tensor

from vitruvius._config import bind
from vitruvius._errors import ConfigError, RunError
from vitruvius._files import append_line, atomic_write_text, ensure_writable
from vitruvius._processes import choose_device
from vitruvius._registry import Registry
from vitruvius.data import eval_loader
from vitruvius.evaluation import numbered
from vitruvius.models import PixelModel
from vitruvius.report import save_figure, write_csv
from vitruvius.targets import open_target

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model and the images it is studied on, kept on its device."""

    name: str
    model: PixelModel
    x: Tensor  # (n, C, height, width) in [0, 1]
    y: Tensor  # (n,)
    ids: Tensor  # (n,)
    batch_size: int

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        size = self.batch_size
        yield from zip(self.x.split(size), self.y.split(size), self.ids.split(size), strict=True)


class Study(Protocol):
    """A function of a subject that yields rows; `draw` makes the figure of all rows."""

    draw: Callable[[list[Row]], Figure]

    def __call__(self, subject: Subject, done: set[str], /, **settings: Any) -> Iterator[Row]: ...


studies: Registry[Any] = Registry("study", "studies")


def study(name: str, targets: Sequence[str], settings: dict[str, Any], out: str | Path) -> Path:
    """Run a study over run folders or models; `table.csv` and the figure lie in `out`. A killed study goes on.

    Every study also takes `images` (how many, default 512), `batch_size` and settings of the data as `data.key`.
    """
    maker = studies[name]
    data = [f"{key}={value}" for key, value in settings.items() if key.startswith("data.")]
    own = {key: value for key, value in settings.items() if not key.startswith("data.")}
    images, batch_size = int(own.pop("images", 512)), int(own.pop("batch_size", 128))
    bound = bind(name, maker, own, where="study")
    if not targets:
        raise ConfigError(f"study {name!r} needs at least one run folder or model name.")
    subjects = (open_subject(target, data, images, batch_size) for target in targets)  # one at a time
    first = next(subjects)  # what is wrong with it is said before a file is written
    folder = Path(ensure_writable(out))
    rows = _resume(folder, {"study": name, "settings": {**settings}})
    for subject in itertools.chain([first], subjects):
        done = {row["key"] for row in rows if row["model"] == subject.name}
        for row in maker(subject, done, **bound):
            rows.append({"model": subject.name, **row})
            append_line(folder / "rows.jsonl", json.dumps(rows[-1]))
    atomic_write_text(folder / "table.csv", write_csv([{k: v for k, v in row.items() if k != "key"} for row in rows]))
    save_figure(maker.draw(rows), folder / "figure")
    return folder / "table.csv"


def open_subject(target: str, data: Sequence[str], images: int, batch_size: int) -> Subject:
    """The first `images` of the data set of a run or model, in memory."""
    opened = open_target(target, data)
    model = opened.model
    device = choose_device(opened.config.device)
    model.to(device).eval()
    loader = eval_loader(opened.config.data, input_size=model.data_config, device=device)
    columns: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    seen = 0
    for batch in numbered(loader):
        for parts, part in zip(columns, batch, strict=True):
            parts.append(part)
        seen += len(batch[1])
        if seen >= images:
            break
    x, y, ids = (torch.cat(parts)[:images] for parts in columns)
    return Subject(
        name=target,
        model=model,
        x=x.to(device),
        y=y.to(device),
        ids=ids,
        batch_size=batch_size,
    )


def _resume(folder: Path, signature: dict[str, Any]) -> list[Row]:
    """Rows of an interrupted study of the same settings; another study in this folder is refused."""
    file, text = folder / "study.json", json.dumps(signature, indent=1, sort_keys=True, default=str)
    if file.exists() and file.read_text() != text:
        raise RunError(f"{folder} holds another study. Choose another folder with --out, or delete it.")
    atomic_write_text(file, text)
    rows: list[Row] = []
    lines = folder / "rows.jsonl"
    for line in lines.read_text().splitlines() if lines.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # cut off by a kill: it will be made again
            break
    atomic_write_text(lines, "".join(f"{json.dumps(row)}\n" for row in rows))
    return rows
