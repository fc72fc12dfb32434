"""What studies share: a model with its images, rows that survive a kill, a table, and figures of panels and lines."""

from __future__ import annotations

import copy
import itertools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from vitruvius._checks import device_of
from vitruvius._errors import ConfigError, RunError
from vitruvius._files import Lock, append_line, atomic_write_text, discard, ensure_writable, read_json
from vitruvius._notebook import to_csv
from vitruvius._progress import Bar, Progress, no_progress
from vitruvius._random import image_ids
from vitruvius._registry import Registry
from vitruvius._secrets import redact
from vitruvius._style import series
from vitruvius._version import versions
from vitruvius._yaml import parse_value
from vitruvius.data.identity import hash_tensors
from vitruvius.evaluation.base import fingerprint, numbered, settings_fingerprint
from vitruvius.models import PixelModel, load_weights
from vitruvius.report import save_figure
from vitruvius.request import open_request
from vitruvius.training.run_folder import kept_weights

Row = dict[str, Any]
Band = tuple[float, float, float]  # low, middle, high
IMAGES = 512  # of a subject, unless a study or the caller says otherwise
TOGETHER = 128  # images attacked together, where what their gradients need stays below
MEMORY = 2 << 30  # bytes
OF_TARGET = ("attention", "device", "plugins")  # settings of the models, beside data.… and model.…; never of a study


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model and the images it is studied on, read batch by batch each time they are needed."""

    name: str
    model: PixelModel  # on its device
    loader: Iterable[Any]  # of images in [0, 1]
    batch_size: int  # images that are looked at together
    architecture: str = ""
    kept: Mapping[int, Path] = field(default_factory=dict)  # of a run: epochs, counted from 1 → their weights
    folder: Path = Path()  # for files of its own, in the study's folder
    progress: Progress = no_progress  # told how far an evaluation of it is

    @property
    def num_images(self) -> int:
        number = getattr(self.loader, "num_images", None)
        return sum(len(y) for _, y, _ in self.with_ids()) if number is None else number

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        return self.with_ids()

    def with_ids(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Images and labels on the model's device, and ids."""
        device = device_of(self.model)
        for batch in numbered(self.loader):
            for x, y, ids in zip(*(column.split(self.batch_size) for column in batch), strict=True):
                yield x.to(device), y.to(device), ids

    def model_at(self, epoch: int) -> PixelModel:
        """The model as it was after a kept `epoch`, counted from 1, on the same device."""
        model = copy.deepcopy(self.model)
        load_weights(model, self.kept[epoch])
        return model.eval()


# A study is a function (subject, done, settings by name) that yields rows, without those whose keys are done. It has
# `draw(rows)`, the figure of all rows, and may have `finish(rows)`, rows with columns that only all of them together
# can tell; `further(rows, folder, settings)`, more figures by name; `images`, how many it studies by default; and
# `labels`, whether it needs them (default: yes).
studies: Registry[Any] = Registry("study", "studies", homes=["vitruvius.studies"])


def split_words(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """(targets, settings) of the `words` of a command: `runs/rpc runs/softmax steps=20 data.root=/imagenet`."""
    pairs = [word.partition("=") for word in words]
    targets = [word for word, equals, _ in pairs if not equals]
    return targets, {key: parse_value(value) for key, equals, value in pairs if equals}


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
    settings: of the study; also `images` (how many, default 512), `batch_size` (default 128, or as many as 2 GiB hold
        for a gradient), and settings of the models and their data, as other verbs take them: `data.key`, `model.key`,
        `attention`, `device`; `plugins` names modules of runs to trust.
    out: the folder for table.csv and the figures.
    on_row: called with every row as soon as it is known.
    trust_plugins: import the modules that runs name, as for `open_target`.
    """
    maker = studies.get(name)
    overrides, own = [], dict(settings)
    for key in [key for key in settings if key in OF_TARGET or key.startswith(("data.", "model."))]:
        value = own.pop(key)
        overrides.append(f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    images, batch_size = own.pop("images", getattr(maker, "images", IMAGES)), own.pop("batch_size", None)
    for key, value in {"images": images, "batch_size": 1 if batch_size is None else batch_size}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"study: {key} = {value!r} is not a whole number that is 1 or more.")
    run = bind_study({"use": name, **own})
    if not targets:
        raise ConfigError(f"study {name!r} needs at least one run folder or model name.")
    opening: dict[str, Any] = {"labels": getattr(maker, "labels", True), "trust_plugins": trust_plugins}
    opened = (open_subject(target, overrides, images, batch_size, **opening) for target in targets)  # one at a time
    subjects = itertools.chain([next(opened)], opened)  # what is wrong with the first is said before a file is made
    with Lock(out):
        folder = ensure_writable(out)
        try:
            rows = _resume(folder, {"study": name, "settings": {**settings}})
            _ask_all(subjects, run, folder, rows, on_row)
        except BaseException:
            if not (folder / "rows.jsonl").is_file() or not (folder / "rows.jsonl").stat().st_size:
                discard(folder, "study.json", "subjects.json", "rows.jsonl")
            raise
        rows = getattr(maker, "finish", list)(rows)
        shown = [{column: value for column, value in row.items() if column != "key"} for row in rows]
        atomic_write_text(folder / "table.csv", to_csv(shown))
        save_figure(maker.draw(rows), folder / "figure")
        for stem, figure in maker.further(rows, folder, settings) if hasattr(maker, "further") else ():
            save_figure(figure, folder / stem)
    return folder / "table.csv"


def folder_of(folder: Path, model: str) -> Path:
    """Where files about a `model`, by its name, belong in the `folder` of a study."""
    return folder / re.sub(r"[^\w.-]+", "-", model).strip("-")


def _ask_all(
    subjects: Iterable[Subject],
    run: Callable[[Subject, set[str]], Iterator[Row]],
    folder: Path,
    rows: list[Row],
    on_row: Callable[[Row], object] | None,
) -> None:
    """Run the study on each subject; rows are added to those that are there, on disk as soon as they are known."""
    for subject in subjects:
        done = {row["key"] for row in rows if row["model"] == subject.name}
        _claim(folder, subject, resumed=bool(done))
        with Bar(f"studying {subject.name}") as bar:
            count = len(done)

            def progress(images: float, total: float | None, /, words: str = "", bar: Bar = bar) -> None:
                bar(images, total, f"row {count + 1}, {words}")  # noqa: B023 - told before the next subject

            for row in run(replace(subject, folder=folder_of(folder, subject.name), progress=progress), done):
                count += 1
                rows.append({"model": subject.name, **row})
                append_line(folder / "rows.jsonl", json.dumps(rows[-1]))
                if on_row is not None:
                    on_row(rows[-1])


def bind_study(spec: Mapping[str, Any]) -> Callable[[Subject, set[str]], Iterator[Row]]:
    """A study with its settings, by `spec`; one with an empty list of something would have nothing to do."""
    for key, value in spec.items():
        if isinstance(value, list | tuple) and not value:
            raise ConfigError(f"study: {key} = [] leaves nothing to do; give one value or more.")
    return studies.bind(spec, where="study")


def open_subject(
    target: str,
    overrides: Sequence[str],
    images: int,
    batch_size: int | None = None,
    *,
    labels: bool = True,
    trust_plugins: bool = False,
) -> Subject:
    """A target with some of its validation images; which ones, `vitruvius.request` says.

    batch_size: images that are looked at together; default: as many as fit.
    labels: whether the study compares answers with them, so that the model must number its classes as the data do.
    """
    with open_request(
        target, overrides, images=images, labels=labels, trust_plugins=trust_plugins, alone=True
    ) as request:
        return Subject(
            name=redact(target),
            model=request.model,
            loader=request.loader,
            batch_size=batch_size or _fitting(request.model),
            architecture=request.config.model.name,
            kept=kept_weights(request.target.folder) if request.target.is_run else {},
        )


def _fitting(model: PixelModel) -> int:
    """How many images may be attacked together: what one forward pass keeps for the gradient, counted, fits MEMORY."""
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = next(model.parameters()).new_zeros(1, *model.data_config["input_size"]).requires_grad_()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        answer = model(x)  # its graph holds what was counted, so that no address is counted for another tensor
    kept = sum(size for address, size in sizes.items() if address not in weights)
    del answer
    return min(TOGETHER, max(1, MEMORY // max(kept, 1)))


def _claim(folder: Path, subject: Subject, *, resumed: bool) -> None:
    """Note which weights and images a subject's rows are of; rows of others under its name are refused."""
    file = folder / "subjects.json"
    known: dict[str, Any] = read_json(file) if file.exists() else {}
    batches = [(image_ids(x).cpu(), y.cpu(), ids.cpu()) for x, y, ids in subject.with_ids()]
    pixels, labels, ids = (torch.cat(column) for column in zip(*batches, strict=True))
    own = {
        "weights": fingerprint(subject.model),
        "settings": settings_fingerprint(subject.model),
        "images": f"{len(labels)} with hash {hash_tensors(pixels, ids)}",
        "labels": f"{len(labels)} with hash {hash_tensors(labels)}",
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


def panels(
    titles: Sequence[str], columns: int, size: tuple[float, float], margin: tuple[float, float], **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with one pair of axes per title; `size` of each and the `margin` around all are inches."""
    columns = min(columns, len(titles))
    lines = -(-len(titles) // columns)
    figure = Figure(figsize=(margin[0] + size[0] * columns, margin[1] + size[1] * lines), layout="constrained")
    every = list(figure.subplots(lines, columns, squeeze=False, **shared).flatten())
    for axes, title in zip(every, titles, strict=False):
        axes.set_title(title)
    for axes in every[len(titles) :]:
        axes.set_visible(False)
    return figure, every[: len(titles)]


def draw_line(axes: Axes, index: int, label: str, points: Mapping[float, Band], alpha: float = 0.2) -> None:
    """The line of number `index` through the middles, and a band from low to high."""
    look = series(index)
    lows, middles, highs = zip(*points.values(), strict=True)
    axes.plot(list(points), middles, marker=look.marker, color=look.colour, label=label)
    axes.fill_between(list(points), lows, highs, color=look.colour, alpha=alpha, linewidth=0)


def draw_accuracy(axes: Axes, index: int, label: str, rows: Iterable[Row]) -> None:
    """Accuracy with its interval against ε."""
    rows = sorted(rows, key=lambda row: float(row["eps"]))
    points = {255 * row["eps"]: (100 * row["low"], 100 * row["accuracy"], 100 * row["high"]) for row in rows}
    draw_line(axes, index, label, points)


def gather(rows: Iterable[Row], across: str, column: str) -> dict[Any, list[float]]:
    """The values of a `column` by those of another, in order; rows without a value are left out."""
    groups: dict[Any, list[float]] = {}
    for row in sorted(rows, key=lambda row: float(row[across] or 0)):
        if row[column] is not None:
            groups.setdefault(row[across], []).append(row[column])
    return groups


def spread(values: Sequence[float]) -> Band:
    """The least, the mean and the largest."""
    return min(values), statistics.mean(values), max(values)


def names(rows: Iterable[Row], column: str = "model") -> list[Any]:
    """The values of a column, each once, in order."""
    return list(dict.fromkeys(row[column] for row in rows))
