"""What studies share: subjects (models with their data), rows that survive a kill, a CSV and a figure at the end."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from matplotlib.figure import Figure
from torch import Tensor

from vitruvius._errors import ConfigError, RunError
from vitruvius._files import Lock, MadeFolder, append_line, atomic_write_text, ensure_writable, read_json
from vitruvius._notebook import to_csv
from vitruvius._progress import Bar, Progress, no_progress
from vitruvius._random import image_ids
from vitruvius._registry import Registry
from vitruvius._secrets import redact
from vitruvius._version import versions
from vitruvius._yaml import parse_value
from vitruvius.data.identity import hash_tensors
from vitruvius.evaluation.base import fingerprint, numbered, settings_fingerprint
from vitruvius.models import PixelModel, load_weights
from vitruvius.report import save_figure
from vitruvius.request import open_request
from vitruvius.training import kept_weights

Row = dict[str, Any]
IMAGES = 512  # of a subject, unless a study or the caller says otherwise
OF_TARGET = ("attention", "device", "plugins")  # settings of the models, beside data.… and model.…; never of a study


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model and the images it is studied on, kept on its device."""

    name: str
    model: PixelModel
    x: Tensor  # (n, C, height, width) in [0, 1]
    y: Tensor  # (n,)
    ids: Tensor  # (n,)
    batch_size: int
    kept: Mapping[int, Path] = field(default_factory=dict)  # of a run: epochs, counted from 1 → their weights
    folder: Path = Path()  # for files of its own, in the study's folder
    progress: Progress = no_progress  # told how far an evaluation of it is

    def model_at(self, epoch: int) -> PixelModel:
        """The model as it was after a kept `epoch`, counted from 1, on the same device."""
        model = copy.deepcopy(self.model)
        load_weights(model, self.kept[epoch])
        return model.eval()

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        size = self.batch_size
        yield from zip(self.x.split(size), self.y.split(size), self.ids.split(size), strict=True)


class Study(Protocol):
    """A function of a subject that yields rows; `draw` makes the figure of all rows.

    It may also have `finish(rows)`: the rows with columns that only all of them together can tell, for the table;
    `further(rows, folder, settings)`: more figures by name; `images`: how many images it studies by default; and
    `labels`: whether it needs them (default: yes).

    `subject` is a model with its images; `done` holds the keys of rows that an interrupted study has already, which are
    not computed again; `settings` are those of the study.
    """

    draw: Callable[[list[Row]], Figure]

    def __call__(self, subject: Subject, done: set[str], /, **settings: Any) -> Iterator[Row]: ...


studies: Registry[Any] = Registry("study", "studies", homes=["vitruvius.studies"])


def split_words(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """(targets, settings) of the `words` of a command: `runs/rpc runs/softmax steps=20 data.root=/imagenet`."""
    targets: list[str] = []
    settings: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if equals:
            settings[key] = parse_value(value)
        else:
            targets.append(word)
    return targets, settings


def study(
    name: str,
    targets: Sequence[str],
    settings: Mapping[str, Any],
    out: str | Path,
    *,
    on_row: Callable[[Row], object] | None = None,
    trust_plugins: bool = False,
) -> Path:
    """Run a study over several models; a killed study goes on where it stopped. Returns the path of the table.

    name: of the study; `vitruvius list studies` names them.
    targets: run folders, model names, or other kinds of target.
    settings: of the study; also `images` (how many, default 512), `batch_size` (default 128), and settings of the
        models and their data, as other verbs take them: `data.key`, `model.key`, `attention`, `device`; `plugins`
        names modules of runs to trust.
    out: the folder for table.csv and the figures.
    on_row: called with every row as soon as it is known.
    trust_plugins: import the modules that runs name, as for `open_target`.
    """
    maker = studies.get(name)
    plan = _read_settings(name, settings)
    if not targets:
        raise ConfigError(f"study {name!r} needs at least one run folder or model name.")
    subjects = (
        open_subject(
            target,
            plan.overrides,
            plan.images,
            plan.batch_size,
            labels=getattr(maker, "labels", True),
            trust_plugins=trust_plugins,
        )
        for target in targets  # one at a time
    )
    first = next(subjects)  # what is wrong with it is said before a file is written
    with Lock(out):
        made = MadeFolder(out)
        folder = ensure_writable(out)
        try:
            rows = _resume(folder, {"study": name, "settings": {**settings}})
            _ask_all(itertools.chain([first], subjects), plan, folder, rows, on_row)
        except BaseException:
            if not _rows_in(folder):
                made.take_back("study.json", "subjects.json", "rows.jsonl")
            raise
        finish = getattr(maker, "finish", list)
        rows = finish(rows)
        _save_table(folder / "table.csv", rows)
        save_figure(maker.draw(rows), folder / "figure")
        for stem, figure in _further(maker, rows, folder, settings):
            save_figure(figure, folder / stem)
    return folder / "table.csv"


def _further(maker: Any, rows: list[Row], folder: Path, settings: Mapping[str, Any]) -> Iterable[tuple[str, Figure]]:
    """The figures that a study has beside its first one."""
    if not hasattr(maker, "further"):
        return ()
    figures: Iterable[tuple[str, Figure]] = maker.further(rows, folder, settings)
    return figures


def folder_of(folder: Path, model: str) -> Path:
    """Where files about a `model`, by its name, belong in the `folder` of a study."""
    return folder / re.sub(r"[^\w.-]+", "-", model).strip("-")


def _rows_in(folder: Path) -> bool:
    """Whether a study has left rows in a folder."""
    file = folder / "rows.jsonl"
    return file.is_file() and file.stat().st_size > 0


def _ask_all(
    subjects: Iterable[Subject],
    plan: _Plan,
    folder: Path,
    rows: list[Row],
    on_row: Callable[[Row], object] | None,
) -> None:
    """Run the study on each subject; rows are added to those that are there, on disk as soon as they are known."""
    for subject in subjects:
        done = {row["key"] for row in rows if row["model"] == subject.name}
        _claim(folder, subject, resumed=bool(done))
        with Bar(f"studying {subject.name}") as bar:
            progress = _RowProgress(bar, len(done))
            watched = replace(subject, folder=folder_of(folder, subject.name), progress=progress)
            for row in plan.run(watched, done):
                progress.rows += 1
                rows.append({"model": subject.name, **row})
                append_line(folder / "rows.jsonl", json.dumps(rows[-1]))
                if on_row is not None:
                    on_row(rows[-1])


class _RowProgress:
    """How far an evaluation or an ascent is, and after how many rows of the table."""

    def __init__(self, bar: Bar, rows: int) -> None:
        self.bar = bar
        self.rows = rows

    def __call__(self, done: float, total: float | None, /, words: str = "") -> None:
        self.bar(done, total, f"row {self.rows + 1}, {words}")


class _Plan(NamedTuple):
    """A study with its settings bound, and what it is run on."""

    run: Callable[[Subject, set[str]], Iterator[Row]]
    overrides: list[str]  # of the targets
    images: int
    batch_size: int


def _read_settings(name: str, settings: Mapping[str, Any]) -> _Plan:
    of_target = [key for key in settings if key in OF_TARGET or key.startswith(("data.", "model."))]
    overrides = [f"{key}={_written(settings[key])}" for key in of_target]
    own = {key: value for key, value in settings.items() if key not in of_target}
    images = _whole_number("images", own.pop("images", getattr(studies.get(name), "images", IMAGES)))
    batch_size = _whole_number("batch_size", own.pop("batch_size", 128))
    return _Plan(bind_study({"use": name, **own}), overrides, images, batch_size)


def bind_study(spec: Mapping[str, Any]) -> Callable[[Subject, set[str]], Iterator[Row]]:
    """A study with its settings, by `spec`; one with an empty list of something would have nothing to do."""
    for key, value in spec.items():
        if isinstance(value, list | tuple) and not value:
            raise ConfigError(f"study: {key} = [] leaves nothing to do; give one value or more.")
    return studies.bind(spec, where="study")


def _written(value: Any) -> str:
    """A value as a command line says it, which may have been read already (`null`, a list)."""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _whole_number(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"study: {key} = {value!r} is not a whole number that is 1 or more.")
    return value


def _save_table(path: Path, rows: Sequence[Row]) -> None:
    """Every row but its key, which only a resumed study needs."""
    shown = [{name: value for name, value in row.items() if name != "key"} for row in rows]
    atomic_write_text(path, to_csv(shown))


def open_subject(
    target: str,
    overrides: Sequence[str],
    images: int,
    batch_size: int,
    *,
    labels: bool = True,
    trust_plugins: bool = False,
) -> Subject:
    """A target with some of its validation images in memory; which ones, `vitruvius.request` says.

    target: a run folder, a model's name, or another kind of target.
    overrides: settings of it, `data.root=…`, `model.weights=…`.
    images: how many, at most.
    batch_size: images that are looked at together.
    labels: whether the study compares answers with them, so that the model must number its classes as the data do.
    trust_plugins: import the modules that a run names, as for `open_target`.
    """
    with open_request(
        target, overrides, images=images, labels=labels, trust_plugins=trust_plugins, alone=True
    ) as request:
        batches = []
        seen = 0
        for batch in numbered(request.loader):
            batches.append(batch)
            seen += len(batch[1])
            if seen >= images:
                break
        x, y, ids = (torch.cat(column)[:images] for column in zip(*batches, strict=True))
        return Subject(
            name=redact(target),
            model=request.model,
            x=x.to(request.process.device),
            y=y.to(request.process.device),
            ids=ids,
            batch_size=batch_size,
            kept=kept_weights(request.target.folder) if request.target.is_run else {},
        )


def _claim(folder: Path, subject: Subject, *, resumed: bool) -> None:
    """Note which weights and images a subject's rows are of; rows of others under its name are refused."""
    file = folder / "subjects.json"
    known: dict[str, Any] = {}
    if file.exists():
        known = read_json(file)
    own = {
        "weights": fingerprint(subject.model),
        "settings": settings_fingerprint(subject.model),
        "images": f"{len(subject.y)} with hash {hash_tensors(image_ids(subject.x), subject.ids)}",
        "labels": f"{len(subject.y)} with hash {hash_tensors(subject.y)}",
    }
    before = known.get(subject.name, own)
    differing = [key for key in own if before.get(key) != own[key]]
    if resumed and differing:
        aspect = differing[0]
        raise RunError(
            f"{folder} holds rows of {subject.name} with other {aspect} ({before.get(aspect, 'not noted')}, now "
            f"{own[aspect]}). Choose another folder with --out, or delete it."
        )
    noted = {**own, "versions": versions()}  # which may change
    atomic_write_text(file, json.dumps({**known, subject.name: noted}, indent=1))


def _resume(folder: Path, signature: dict[str, Any]) -> list[Row]:
    """Rows of an interrupted study of the same settings; another study in this folder is refused."""
    file = folder / "study.json"
    text = redact(json.dumps(redact(signature), indent=1, sort_keys=True, default=str))
    if file.exists() and file.read_text() != text:
        raise RunError(f"{folder} holds another study. Choose another folder with --out, or delete it.")
    atomic_write_text(file, text)
    rows: list[Row] = []
    lines = folder / "rows.jsonl"
    lines.touch()
    for line in lines.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # cut off by a kill: it will be made again
            break
    atomic_write_text(lines, "".join(f"{json.dumps(row)}\n" for row in rows))
    return rows
