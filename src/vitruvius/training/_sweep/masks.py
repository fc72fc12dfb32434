"""Masks that the runs of a sweep share: made from the maps of another run before the first of them begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vitruvius._errors import ConfigError, VitruviusError
from vitruvius.compression.steps import read_rules, write_maps, write_masks
from vitruvius.request import open_request
from vitruvius.surgery import survey
from vitruvius.targets.base import open_target
from vitruvius.training.config import Config, MapsPlan, MaskPlan


def check_masks(maps: MapsPlan | None, masks: Sequence[MaskPlan], source: str) -> None:
    """Refuse masks without maps, maps without masks, and rules that are not known.

    `maps` and `masks` are those of a sweep; `source` is the file that says so.
    """
    if bool(masks) != (maps is not None):
        raise ConfigError(f"{source}: maps and masks belong together; there is only one of them.")
    for plan in masks:
        read_rules(plan.rule)


def missing_masks(config: Config, masks: Sequence[MaskPlan]) -> list[str]:
    """Files of the sweep's `masks` that a run, by its `config`, needs and that are not made yet."""
    parts = [part for rule in config.attention for part in rule.parts if isinstance(part, dict)]
    needed = {str(part.get("file")) for part in parts}
    return [plan.file for plan in masks if plan.file in needed and not Path(plan.file).is_file()]


def make_missing(
    maps: MapsPlan | None, masks: Sequence[MaskPlan], overrides: Sequence[str], tell: Callable[[str], None]
) -> None:
    """Maps and masks that are not there yet. Masks that cannot be made are told, and only runs that need them fail.

    `maps` and `masks` are those of the sweep; `overrides` are settings of the maps' run, `data.root=…`; `tell` hears
    of every file.
    """
    missing = [plan for plan in masks if not Path(plan.file).is_file()]
    if maps is None or not missing:
        return
    check_trained(maps)
    if not Path(maps.file).is_file():
        tell(f"maps of {maps.of}")
        with open_request(
            maps.of,
            overrides,
            images=maps.images,
            out=maps.file,
            writes="maps.safetensors",
            split="training",
            labels=False,
        ) as request:
            write_maps(request)
    sites = survey(open_target(maps.of, overrides, data_needed=False).model)
    for plan in missing:
        tell(f"masks {plan.file}")
        try:
            write_masks(maps.file, plan.rule, plan.file, sparsity=plan.sparsity, sites=sites, tiles=plan.tiles)
        except VitruviusError as error:
            tell(f"    failed: {' '.join(str(error).split())}")


def check_trained(maps: MapsPlan) -> None:
    """Refuse `maps` of a run that is not there."""
    if not (Path(maps.of) / "config.yaml").is_file():
        raise ConfigError(f"the masks of this sweep are made of the run {maps.of}, which is not there: train it first.")
