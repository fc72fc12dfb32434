"""The recipe of a training run: sections as frozen dataclasses, timm's option names kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitruvius._config import build, override
from vitruvius._yaml import read_yaml
from vitruvius.data import DataConfig
from vitruvius.models import AttentionRule, ModelConfig
from vitruvius.training._train_config import TrainConfig, check_train

__all__ = ["Config", "TrainConfig", "check", "read_recipe"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole recipe."""

    model: ModelConfig
    attention: tuple[AttentionRule, ...] = ()
    init: str | dict[str, Any] | None = None  # a start for the attention weights, before surgery
    data: DataConfig = field(default_factory=DataConfig)
    task: str | dict[str, Any] = "supervised"
    gradual: dict[str, Any] | None = None  # masks that tighten: {masks: file, maps: file, epochs: 10, power: 3}
    analyses: list[str] = field(default_factory=list)  # asked while training, e.g. reconstruction:variant=reproduction
    tracking: list[Any] = field(default_factory=list)  # besides metrics.jsonl: csv, tensorboard, {use: wandb, …}
    train: TrainConfig = field(default_factory=TrainConfig)
    seed: int = 0
    plugins: list[str] = field(default_factory=list)
    out: str | None = None  # the run folder, or an fsspec URL; null: runs/<name of the recipe>
    # written into a run's config.yaml, ignored in a recipe:
    versions: dict[str, str] = field(default_factory=dict)
    started: str | None = None


def read_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """A recipe file with `section.key=value` overrides applied, checked whole."""
    data = override(read_yaml(path), overrides)
    if data.get("out") is None:
        data["out"] = str(Path("runs") / Path(path).stem)
    config = build(Config, data, source=str(path))
    check(config, str(path))
    return config


def check(config: Config, source: str) -> None:
    """What types alone cannot say."""
    check_train(config.train, source)
