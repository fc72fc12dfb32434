"""The verbs `maps`, `masks` and `export` as a command uses them: open, compute, write, and say what was done."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from vitruvius._bar import Bar
from vitruvius._config import bind, parse_spec
from vitruvius._errors import ConfigError
from vitruvius._processes import process_group
from vitruvius._yaml import read_yaml
from vitruvius.compression.export import Format, export
from vitruvius.compression.files import load_maps, save_maps, save_masks
from vitruvius.compression.maps import average_maps
from vitruvius.compression.masks import Budget, Masks, make_masks
from vitruvius.compression.polarisation import describe, polarise_all
from vitruvius.compression.rules import Rule, rules
from vitruvius.data import DataConfig, eval_loader, train_loader
from vitruvius.evaluation import fingerprint, open_target
from vitruvius.models import load_model
from vitruvius.surgery import survey

logger = logging.getLogger(__name__)


def maps_of_target(target: str, overrides: Sequence[str], out: str | None, *, augment: bool = False) -> Path:
    """Average maps of a run or model over its training images, each seen once, as they are or augmented.

    Called again after an interruption, it goes on where it stopped. Several processes (torchrun) share the images.
    """
    model, config = open_target(target, overrides)
    home = Path(target) if Path(target).is_dir() else Path("runs") / target.replace("/", "-")
    path = Path(out) if out else home / "maps.safetensors"
    with process_group(config.device) as process:
        model.to(process.device).eval()
        shares = {"rank": process.rank, "world_size": process.world_size, "device": process.device}
        size = model.data_config
        if augment:
            loader = train_loader(config.data, input_size=size, seed=config.seed, **shares)  # type: ignore[arg-type]
        else:
            loader = eval_loader(_as_they_are(config.data), input_size=size, **shares)  # type: ignore[arg-type]
        path.parent.mkdir(parents=True, exist_ok=True)
        with Bar("averaging", shown=process.first) as bar:
            progress = _told(bar, loader.num_images, process.world_size)
            maps = average_maps(model, loader, process=process, partial=path.with_suffix(".partial"), progress=progress)
        maps = {name: map_.cpu() for name, map_ in maps.items()}
        notes = {"data": loader.name, "images": loader.num_images, "augmented": augment, "weights": fingerprint(model)}
        process.on_first(lambda: save_maps(path, maps, sites=survey(model), target=target, **notes))
    return path


def masks_of_maps(
    maps: str,
    rule: str,
    out: str | None,
    *,
    sparsity: float | None = None,
    budget: Budget = "global",
    protect: Sequence[int] | None = None,
    of: str | None = None,
    threshold: int | None = None,
) -> tuple[Masks, str]:
    """Masks of a file of maps, written with their permutations; and what a person wants to know about them.

    With `of`, a run folder, maps that are not of its model are refused.
    """
    tensors, sites = load_maps(maps)
    known = survey(load_model(of)) if of else sites
    masks = make_masks(tensors, parse_rule(rule), sparsity=sparsity, budget=budget, protect=protect, sites=known)
    path = Path(out) if out else Path(maps).with_name("masks.safetensors")
    polarised = polarise_all(masks.keep, threshold=threshold) if any(_square(masks)) else {}
    save_masks(path, masks, polarised=polarised, maps=str(maps))
    limits = [f"{name}: {limit:.6g}" for name, limit in list(masks.limits.items())[:4]]
    moved = f"limit of the rule {masks.rule.partition('(')[0].lower()}, moved for this sparsity"
    found = [f"{moved}: {', '.join(limits)}{' …' if len(masks.limits) > 4 else ''}"] if limits else []
    tables = [str(masks.sparsity), describe(polarised)] if polarised else [str(masks.sparsity)]
    return masks, "\n\n".join([*tables, "\n".join([*found, str(path)])])


def export_target(run: str, out: str | None, *, format: Format = "torch-export", sparse: bool = False) -> Path:
    """Export a run folder; the file is read back and its logits compared before it is left behind."""
    endings = {"torch-export": "pt2", "onnx": "onnx", "safetensors": "safetensors"}
    if format not in endings:
        raise ConfigError(f"--format {format}: expected one of {', '.join(endings)}.")
    model = load_model(run)
    path = Path(out) if out else Path(run) / f"export.{endings[format]}"
    return export(model, path, format=format, sparse=sparse, recipe=read_yaml(Path(run) / "config.yaml"))


def parse_rule(text: str) -> Rule:
    """`information:mass=0.9` → Information(mass=0.9)."""
    name, settings = parse_spec(text)
    maker = rules[name]
    return maker(**bind(name, maker, settings, where="--rule"))


def _as_they_are(data: DataConfig) -> DataConfig:
    """The training images, as many of them as are trained on, to be looked at as validation images are."""
    return replace(data, val_split=data.train_split, val_num_samples=data.train_num_samples, subset=None)


def _told(bar: Bar, total: int, processes: int) -> Callable[[int], None]:
    """Moves the bar of this process's share; where there is no terminal to see it, the log hears of every thousand."""
    share, thousands = -(-total // processes), 0

    def tell(images: int) -> None:
        nonlocal thousands
        bar(images, share)
        if images // 1000 > thousands:
            thousands = images // 1000
            logger.info("%d images on this process, %d in all", images, total)

    return tell


def _square(masks: Masks) -> list[bool]:
    return [keep.shape[-2] == keep.shape[-1] for keep in masks.keep.values()]
