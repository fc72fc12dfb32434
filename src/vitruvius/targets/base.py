"""Targets: whatever names a model on the command line, and the one function that opens it.

A kind of target is a small class in a file of its own, registered in `target_kinds`. `open_target` asks the kinds in
their `order` whether they `accept` the text; the first that does opens it. A new kind (`zoo/…`, `hf:…`, a URL) is one
more file here, one more module under `plugins:`, or an entry point of the group `vitruvius.target_kinds`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vitruvius._config import build, key, override, section
from vitruvius._errors import ConfigError, UnknownName
from vitruvius._files import atomic_write_text, fetch, is_url
from vitruvius._registry import Registry, load_plugins
from vitruvius._secrets import redact
from vitruvius._yaml import dump_yaml, to_plain
from vitruvius.data import DataConfig
from vitruvius.data.base import check_data
from vitruvius.models.config import AttentionRule, ModelConfig

if TYPE_CHECKING:
    from vitruvius.data.loader import Loader
    from vitruvius.models import PixelModel


@section("target")
class TargetConfig:
    """What may be said of a target besides its name: `data.root=…`, `model.pretrained=false`, `attention=[…]`."""

    model: ModelConfig
    attention: tuple[AttentionRule, ...] = ()
    data: DataConfig = DataConfig()
    plugins: list[str] = key([], "modules that are imported first, with pieces of your own")
    device: str = "auto"
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a text names: settings, a folder where results belong, and a model, which is made when first asked for."""

    text: str  # as it was written
    config: TargetConfig
    folder: Path  # the run folder, or runs/NAME for a model that has none
    make: Callable[[], PixelModel]
    recipe: Mapping[str, Any] = field(default_factory=dict)  # of a run: what its config.yaml says
    is_run: bool = False  # whether the folder holds the model and its config.yaml
    own_data: bool = False  # whether `config.data` are the images it was trained for, so that labels mean the same

    @functools.cached_property
    def model(self) -> PixelModel:
        return self.make()

    def save_config(self, folder: Path | None = None) -> None:
        """Write config.yaml for a model that has no run folder, so that a report reads its results like a run's."""
        if not self.is_run:
            versions = {name: version(name) for name in ("vitruvius", "torch", "timm")}
            plain = {**to_plain(self.config), "versions": versions}
            atomic_write_text((folder or self.folder) / "config.yaml", dump_yaml(redact(plain)))


class TargetKind(Protocol):
    """One way to name a model."""

    order: float  # kinds are asked from small to large; a model's name, which accepts any text, is last (100)
    has_data: bool  # whether such a target knows its images; else the overrides must name some

    def accepts(self, text: str) -> bool:
        """Whether `text` is of this kind. Looks at the text and at local files only; loads nothing."""
        ...

    def open(self, text: str, overrides: Sequence[str], *, trust_plugins: bool) -> Target:
        """The settings, read and checked. What is slow, such as reading weights, is left to `Target.make`.

        `text` is what `accepts` said yes to; `overrides` are settings `section.key=value`, as in `TargetConfig`;
        `trust_plugins` allows to import modules that came with the target.
        """
        ...


OUTSIDE = ("data.", "device=", "plugins=")  # settings that leave the model as it is
NAMED_SETS = ("torch/", "tfds/", "hfds/", "hfids/")  # they number their classes themselves
target_kinds: Registry[type[TargetKind]] = Registry("target kind", "target_kinds", homes=["vitruvius.targets"])


def open_target(
    target: str, overrides: Sequence[str] = (), *, data_needed: bool = True, trust_plugins: bool = False
) -> Target:
    """Open whatever names a model: read its settings and import its plugins. Its model is made when first asked for.

    target: a run folder, a model's name, or what another registered kind accepts.
    overrides: settings `section.key=value`, as in `TargetConfig`; modules of `plugins=[…]` are imported.
    data_needed: whether images will be read; a model by name has none of its own, so the overrides must say which.
    trust_plugins: import the modules that a run names under `plugins:` too, which runs their code; by default a run
        whose plugins are neither imported already nor installed with an entry point is refused.
    """
    for word in overrides:
        if "=" not in word:
            raise ConfigError(
                f"{word!r} after {target} is not a setting of the form section.key=value, e.g. data.root=/imagenet; "
                "one model is opened at a time."
            )
    load_plugins(override({"plugins": []}, [word for word in overrides if word.startswith("plugins")])["plugins"])
    kind = kind_of(target)
    if data_needed and not kind.has_data:  # looked at first: to open such a target may fetch its weights
        if not any(word.startswith("data.dataset=") for word in overrides):
            raise ConfigError(
                f"{target} is not a run folder; for a model by name say which images: data.dataset=… data.root=…"
            )
        named = override({"data": {}}, [word for word in overrides if word.startswith("data.")])
        check_data(build(DataConfig, named["data"], source=target))
    opened: Target = kind.open(target, overrides, trust_plugins=trust_plugins)
    if data_needed:
        check_data(opened.config.data)
    return opened


def kind_of(target: str) -> TargetKind:
    """The kind of target that `target` is, by its text alone; a path where nothing is names no model."""
    kinds = sorted((target_kinds.make(name) for name in target_kinds), key=lambda kind: kind.order)
    for kind in kinds:
        if kind.accepts(target):
            return kind
    raise UnknownName(
        f"{target!r} is neither a run folder nor a model: nothing is there, and names of models hold no slash, apart "
        "from vitruvius/…, zoo/… and hf-hub:…."
    )


def load_model(run: str | Path, *, best: bool = True, trust_plugins: bool = False) -> PixelModel:
    """The model of a run folder, of the zoo, that a paper publishes, or an image classifier of transformers.

    run: the folder, here or at a URL; a name of the zoo (`zoo/vit_digits_adversarial`), whose hash is checked; a
        published name (`light/xcit_s12_imagenet_eps4`), which is fetched once; or `hf:FOLDER`, `hf:ID` (extra `hf`).
    best: of a run, the best weights where there are any (default), else the last ones.
    trust_plugins: of a run, import the modules that its `plugins:` names, which runs their code; by default only
        modules that are imported already or installed with an entry point are accepted.
    """
    from vitruvius import models

    if not isinstance(run, str | Path):
        raise ConfigError(f"{run!r} names no model; expected a run folder, its URL, zoo/…, hf:… or a published name.")
    if isinstance(run, str) and not is_url(run):
        for name in ("hugging_face", "zoo", "published"):
            kind: TargetKind = target_kinds.make(name)
            if kind.accepts(run) and not (name == "published" and Path(run).exists()):
                return kind.open(run, (), trust_plugins=trust_plugins).model
    return models.load_model(run, best=best, trust_plugins=trust_plugins)


def check_settings(overrides: Sequence[str], free: tuple[str, ...], why: str) -> None:
    """Refuse settings of a target that do not begin with one of `free`; `why` says what the target is."""
    for setting in overrides:
        if not setting.startswith(free):
            raise ConfigError(f"{setting!r} cannot be changed: {why}")


def local_run(target: str | Path) -> str:
    """Where a run can be read on this machine: the copy of a run at a URL, anything else as it is written."""
    return str(fetch(target, states=False)) if isinstance(target, str) and is_url(target) else str(target)


def folder_for(name: str) -> Path:
    """Where results of a model without a run folder go: runs/NAME. `name` is that of the model."""
    return Path("runs") / name.replace("/", "-")


def check_numbering(target: Target, loader: Loader) -> None:
    """Refuse data whose class numbers cannot be the model's: they have fewer classes, numbered 0, 1, … by themselves.

    A run with its own data is not refused; its head may be larger than necessary. Arrays and files that say labels and
    no classes are not either.
    """
    data = target.config.data
    known = target.model.num_classes
    if target.own_data or data.class_map is not None or not 0 < loader.num_classes < known:
        return
    if data.dataset.startswith(NAMED_SETS):
        raise ConfigError(
            f"{data.dataset} has {loader.num_classes} classes and the model knows {known}, so their numbers need not "
            "mean the same. Write the names of all the model's classes into a text file, in its order, one per line, "
            "and say data.class_map=FILE (Caltech: data.class_map=caltech-102 numbers it as TensorFlow does)."
        )
    if data.dataset == "folder":
        raise ConfigError(
            f"{data.root} has {loader.num_classes} classes, numbered 0 … {loader.num_classes - 1} by their names, and "
            f"the model knows {known}. Say data.class_map=imagenet-1k if the folders are ImageNet's, as "
            "n01440764; else write the names of all the model's folders into a text file, in its order, one per line, "
            "and say data.class_map=FILE."
        )
