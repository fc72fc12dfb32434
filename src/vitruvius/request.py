"""One request: whatever names a model, opened once for a verb, with its images and the place where results go.

`open_request` reads the settings and imports plugins, joins the processes, and says what is kept when somebody
interrupts. Model, images and the lock on the results come when they are first asked for, so that a refusal costs
nothing and touches nothing:

    with open_request("runs/rpc", ["data.root=/imagenet"], images=64, writes="evaluation") as request:
        evaluate(request.model, request.loader, ["pgd:eps=8/255"], folder=request.folder, process=request.process)

**Which images.** `images=N` (`--images N` of every verb) means the images that `data.val_num_samples=N` takes: a fixed
random choice of N of the validation split, the same for every verb and model, and those of a smaller N are among them.
A verb about training images (`maps`) takes them from the training split by the same rule. Of a data set that can only
be read in order they are the first N.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitruvius._checks import check_count, check_head, check_takes
from vitruvius._errors import ConfigError
from vitruvius._files import Lock, check_out, is_lock
from vitruvius._progress import Bar
from vitruvius._signals import on_interrupt
from vitruvius.targets.base import Target, TargetConfig, check_numbering, open_target

if TYPE_CHECKING:
    from vitruvius._processes import Process
    from vitruvius.data.loader import Loader
    from vitruvius.models import PixelModel

Split = Literal["validation", "training", "augmented"]  # the last: training images, augmented as for training


@dataclass(kw_only=True)
class Request:
    """A model, its images, and the place for results; each is made when it is first asked for, and then kept."""

    target: Target
    process: Process  # this one of several, and the device it computes on
    out: Path | None = None  # where the user wants results
    writes: str | None = None  # else their name inside the folder of the target; one with an ending is a file
    split: Split = "validation"
    labels: bool = True  # whether answers are compared with labels: the model must have a head that numbers as the data
    _open: ExitStack = field(default_factory=ExitStack, repr=False)

    @property
    def config(self) -> TargetConfig:
        return self.target.config

    @functools.cached_property
    def model(self) -> PixelModel:
        """On the device of its process, in eval mode."""
        model = self.target.model
        if self.labels:
            check_head(model, self.target.text)
        return model.to(self.process.device).eval()

    @functools.cached_property
    def loader(self) -> Loader:
        """This process's share of the images."""
        from vitruvius.data import eval_loader, train_loader
        from vitruvius.data.preprocessing import resolve

        data = self.config.data
        shared: dict[str, Any] = {
            "input_size": self.model.data_config,
            "rank": self.process.rank,
            "world_size": self.process.world_size,
            "device": self.process.device,
        }
        if self.split == "augmented":
            return train_loader(data, seed=self.config.seed, **shared)
        if self.split == "training":  # looked at as validation images are
            data = replace(data, val_split=data.train_split, val_num_samples=data.train_num_samples, subset=None)
        if data.image_size is not None or data.in_chans is not None:
            check_takes(self.model, resolve(data, self.model.data_config).size)
        loader = eval_loader(data, **shared)
        if self.labels:
            check_numbering(self.target, loader)
        return loader

    @property
    def path(self) -> Path | None:
        """The file or folder for results, if there is one."""
        return self.target.folder / self.writes if self.out is None and self.writes is not None else self.out

    @functools.cached_property
    def folder(self) -> Path:
        """The same, locked: nobody else writes there until the request is closed. All processes ask for it together."""
        if self.path is None:
            raise ConfigError(f"{self.target.text} has no place for results; name one with --out.")
        is_file = self.writes is not None and "." in self.writes
        lock = Lock(self.path, file=is_file)
        self._open.callback(lock.release)
        self.process.on_first(lock.take)
        return self.path

    def bar(self, title: str, *, at_most: bool = False) -> Bar:
        """A `Progress` to be opened with `with`, seen on the first process."""
        return Bar(title, shown=self.process.first, at_most=at_most)

    def save_config(self) -> None:
        """Write what was asked of a model by name beside its results, so that a report reads them like a run's."""
        if self.process.first:
            self.target.save_config(self.out)

    def describe_kept(self) -> str:
        """What somebody who interrupts will find, in a sentence."""
        path = self.path
        if path is not None:
            made = path.rglob("*") if path.is_dir() else path.parent.glob(f"{path.stem}.*")
            if any(file.is_file() and not is_lock(file) for file in made):
                return f"{path} keeps what was done so far; the same command resumes from there."
        return "nothing was kept yet; the same command starts again."


@contextlib.contextmanager
def open_request(
    target: str,
    overrides: Sequence[str] = (),
    *,
    images: int | None = None,
    out: str | Path | None = None,
    writes: str | None = None,
    split: Split = "validation",
    labels: bool = True,
    data_needed: bool = True,
    trust_plugins: bool = False,
    alone: bool = False,
) -> Iterator[Request]:
    """Open whatever names a model, for as long as it is worked on.

    target: a run folder, a model's name, or another kind of target. overrides: settings of it, `data.root=…`.
    images: how many, by the rule above; default all. out: where results go; default: `writes`, a name such as
    evaluation or maps.safetensors, in the run folder, or in runs/NAME for a model by name; neither: nowhere.
    split: of the images. labels: whether answers are compared with labels. data_needed: whether images are read at all.
    trust_plugins: import the modules that a run names, which runs their code. alone: do not join other processes.
    """
    if images is not None:
        check_count(images, "--images")
        limit = "val_num_samples" if split == "validation" else "train_num_samples"
        overrides = [*overrides, f"data.{limit}={images}"]
    opened = open_target(target, overrides, data_needed=data_needed, trust_plugins=trust_plugins)
    if out and writes:
        check_out(out, opened.text, opened.config.data.root, example=writes if "." in writes else "")
    from vitruvius._processes import Process, choose_device, process_group  # PyTorch: only now that all is understood

    with ExitStack() as stack:
        device = opened.config.device
        process = Process(device=choose_device(device)) if alone else stack.enter_context(process_group(device))
        place = Path(out) if out else None
        request = Request(target=opened, process=process, out=place, writes=writes, split=split, labels=labels)
        stack.enter_context(on_interrupt(request.describe_kept))
        stack.enter_context(request._open)
        yield request
