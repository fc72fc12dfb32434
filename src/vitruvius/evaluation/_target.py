"""What a command evaluates: a run folder, or a timm model by name, and the data that goes with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vitruvius._config import bind, build, override, parse_spec
from vitruvius._errors import ConfigError, UnknownName
from vitruvius._files import atomic_write_text
from vitruvius._registry import load_plugins
from vitruvius._yaml import dump_yaml, read_yaml, to_plain
from vitruvius.attacks import attacks
from vitruvius.corruptions import is_corruption, parse_corruptions
from vitruvius.data import DataConfig, Loader
from vitruvius.evaluation._names import Threat
from vitruvius.models import AttentionRule, ModelConfig, PixelModel, create_from_config, load_model


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """What may be said of a target besides its name: `data.root=…`, `model.pretrained=false`, `attention=[…]`."""

    model: ModelConfig
    attention: tuple[AttentionRule, ...] = ()
    data: DataConfig = field(default_factory=DataConfig)
    plugins: list[str] = field(default_factory=list)
    device: str = "auto"
    seed: int = 0


def open_target(
    target: str, overrides: Sequence[str] = (), *, data_needed: bool = True
) -> tuple[PixelModel, TargetConfig]:
    """The model of a run folder (its data by default), or a model by name (pretrained, if no weights are given).

    A model by name has no data of its own; where some is needed, the overrides must say which.
    """
    if Path(target).is_dir():
        return _open_run(Path(target), overrides)
    if data_needed and not any(setting.startswith("data.dataset=") for setting in overrides):
        raise ConfigError(
            f"{target} is not a run folder; for a model by name say which images: data.dataset=… data.root=…"
        )
    return _open_named(target, overrides)


def _open_run(folder: Path, overrides: Sequence[str]) -> tuple[PixelModel, TargetConfig]:
    model = load_model(folder)
    known = read_yaml(folder / "config.yaml")
    data: dict[str, Any] = {key: known[key] for key in ("model", "attention", "data", "plugins") if key in known}
    for setting in overrides:
        if not setting.startswith(("data.", "device=")):
            raise ConfigError(
                f"{setting!r} cannot be changed: {folder} is a run, its model is what was trained. To try its weights "
                f"otherwise, name the model instead of the run, with model.weights={folder}."
            )
    return model, build(TargetConfig, override(data, overrides), source=str(folder))


def _open_named(name: str, overrides: Sequence[str]) -> tuple[PixelModel, TargetConfig]:
    weights = any(setting.startswith("model.weights=") for setting in overrides)
    given = {"model": {"name": name, "pretrained": not (weights or name.startswith("vitruvius/"))}}
    config = build(TargetConfig, override(given, overrides), source=name)
    load_plugins(config.plugins)
    try:
        return create_from_config(config.model, config.attention, seed=config.seed), config
    except UnknownName as error:
        raise UnknownName(f"{name!r} is neither a run folder nor a model: {error}") from None


def save_target(config: TargetConfig, folder: Path) -> None:
    """What a model by name was, as config.yaml: so a report reads the folder like that of a run."""
    versions = {name: version(name) for name in ("vitruvius", "torch", "timm")}
    atomic_write_text(folder / "config.yaml", dump_yaml({**to_plain(config), "versions": versions}))


def check_head(target: str, model: PixelModel) -> None:
    """Without a head a model answers with features, and their largest is no class."""
    if getattr(model.model, "num_classes", None) == 0:
        raise ConfigError(
            f"{target} has no head (num_classes = 0): it answers with features, not with classes. Train one first "
            "(model.reset_head and model.freeze); maps and analyses need none."
        )


def check_numbering(target: str, overrides: Sequence[str], model: PixelModel, data: DataConfig, loader: Loader) -> None:
    """A folder numbers its classes 0, 1, …; a model that knows more of them has learned other numbers.

    Not so a run with its own data, where a head may be larger than need be.
    """
    if Path(target).is_dir() and not any(setting.startswith(("data.root=", "data.dataset=")) for setting in overrides):
        return
    if data.dataset == "folder" and data.class_map is None and 0 < loader.num_classes < model.num_classes:
        raise ConfigError(
            f"{data.root} has {loader.num_classes} classes, numbered 0 … {loader.num_classes - 1} by their names, and "
            f"the model knows {model.num_classes}. Say data.class_map=imagenet-1k if the folders are ImageNet's, as "
            "n01440764; else write the names of all the model's folders into a text file, in its order, one a line, "
            "and say data.class_map=FILE."
        )


def parse_threat(text: str) -> Threat:
    """`pgd:eps=4/255,steps=10` → PGD(eps=…, steps=10); `fog:severity=3` → Fog(severity=3)."""
    threats = parse_threats(text)
    if len(threats) != 1:
        raise ConfigError(f"{text!r} means {len(threats)} threats; one is asked for, e.g. fog:severity=3.")
    return threats[0]


def parse_threats(text: str) -> list[Threat]:
    """One threat for most names; `corruptions` stands for 15 corruptions at 5 severities."""
    name, settings = parse_spec(text)
    if is_corruption(name, settings):
        return list(parse_corruptions(name, settings, where="--threat"))
    maker = attacks[name]
    return [maker(**bind(name, maker, settings, where="--threat"))]
