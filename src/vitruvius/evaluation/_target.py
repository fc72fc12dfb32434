"""What a command evaluates: a run folder, or a timm model by name, and the data that goes with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitruvius._config import bind, build, override, parse_spec
from vitruvius._errors import RunError, UnknownName
from vitruvius._registry import load_plugins
from vitruvius._yaml import read_yaml
from vitruvius.attacks import attacks
from vitruvius.data import DataConfig
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


def open_target(target: str, overrides: Iterable[str] = ()) -> tuple[PixelModel, TargetConfig]:
    """The model of a run folder (its data by default), or a model by name (pretrained by default)."""
    folder = Path(target)
    if folder.is_dir():
        if not (folder / "config.yaml").exists():
            raise RunError(f"{target} is not a run folder: it has no config.yaml. `vitruvius train` makes one.")
        known = read_yaml(folder / "config.yaml")
        data: dict[str, Any] = {
            key: known[key] for key in ("model", "attention", "data", "plugins", "seed") if key in known
        }
        config = build(TargetConfig, override(data, overrides), source=target)
        return load_model(folder), config
    given = {"model": {"name": target, "pretrained": not target.startswith("vitruvius/")}}
    config = build(TargetConfig, override(given, overrides), source=target)
    load_plugins(config.plugins)
    try:
        return create_from_config(config.model, config.attention, seed=config.seed), config
    except UnknownName as error:
        raise UnknownName(f"{target!r} is neither a run folder nor a model: {error}") from None


def parse_threat(text: str) -> Threat:
    """`pgd:eps=4/255,steps=10` → PGD(eps=…, steps=10)."""
    name, settings = parse_spec(text)
    maker = attacks[name]
    return maker(**bind(name, maker, settings, where="--threat"))
