"""The verbs `maps`, `masks` and `export` as a command uses them: open, compute, write, and say what was done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vitruvius._bar import Bar
from vitruvius._errors import ConfigError
from vitruvius._processes import Process, process_group
from vitruvius._yaml import read_yaml, to_plain
from vitruvius.compression.export import Format, export
from vitruvius.compression.files import load_maps, save_maps, save_masks
from vitruvius.compression.maps import average_maps
from vitruvius.compression.masks import Budget, Masks, make_masks
from vitruvius.compression.polarisation import describe, polarise_all
from vitruvius.compression.rules import rules
from vitruvius.data import DataConfig, Loader, eval_loader, train_loader
from vitruvius.evaluation import fingerprint
from vitruvius.surgery import survey
from vitruvius.targets import Target, limit_images, open_target


def maps_of_target(
    target: str, overrides: Sequence[str], out: str | None, *, augment: bool = False, images: int | None = None
) -> Path:
    """Average maps over the training images of whatever names a model, each image seen once; the file of maps.

    Called again after an interruption, it goes on where it stopped. Several processes (torchrun) share the images.

    target: a run folder, a model's name, or another kind of target.
    overrides: settings of the target, `data.root=…`.
    out: the file; by default maps.safetensors in the run, or in runs/NAME.
    augment: augmented as for training, instead of as they are.
    images: how many of the training images, a fixed random choice; default all.
    """
    opened = open_target(target, [*overrides, *limit_images(images, "data.train_num_samples")])
    model = opened.model
    path = Path(out or opened.folder / "maps.safetensors")
    with process_group(opened.config.device) as process:
        model.to(process.device).eval()
        loader = _training_images(opened, process, augment=augment)
        path.parent.mkdir(parents=True, exist_ok=True)
        with Bar("averaging", shown=process.first) as bar:
            maps = average_maps(model, loader, process=process, partial=path.with_suffix(".partial"), progress=bar)
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
    known = sites
    if of:
        known = survey(open_target(of, data_needed=False).model)
    masks = make_masks(
        tensors, rules.make(rule, where="--rule"), sparsity=sparsity, budget=budget, protect=protect, sites=known
    )
    if out:
        path = Path(out)
    else:
        path = Path(maps).with_name("masks.safetensors")
    if any(_square(masks)):
        polarised = polarise_all(masks.keep, threshold=threshold)
    else:
        polarised = {}
    save_masks(path, masks, polarised=polarised, maps=str(maps))
    limits = [f"{name}: {limit:.6g}" for name, limit in list(masks.limits.items())[:4]]
    moved = f"limit of the rule {masks.rule.partition('(')[0].lower()}, moved for this sparsity"
    if limits:
        found = [f"{moved}: {', '.join(limits)}{' …' if len(masks.limits) > 4 else ''}"]
    else:
        found = []
    if polarised:
        tables = [str(masks.sparsity), describe(polarised)]
    else:
        tables = [str(masks.sparsity)]
    return masks, "\n\n".join([*tables, "\n".join([*found, str(path)])])


def export_target(run: str, out: str | None, *, format: Format = "torch-export", sparse: bool = False) -> Path:
    """Export a run folder; the file is read back and its logits compared before it is left behind."""
    endings = {"torch-export": "pt2", "onnx": "onnx", "safetensors": "safetensors"}
    if format not in endings:
        raise ConfigError(f"--format {format}: expected one of {', '.join(endings)}.")
    opened = open_target(run, data_needed=False)
    recipe = to_plain(opened.config)
    if opened.is_run:
        recipe = read_yaml(opened.folder / "config.yaml")
    path = Path(out or opened.folder / f"export.{endings[format]}")
    return export(opened.model, path, format=format, sparse=sparse, recipe=recipe)


def _training_images(target: Target, process: Process, *, augment: bool) -> Loader:
    """This process's share of the training images, augmented as for training or as they are."""
    data = target.config.data
    size = target.model.data_config
    rank, world_size, device = process.rank, process.world_size, process.device
    if augment:
        seed = target.config.seed
        return train_loader(data, input_size=size, seed=seed, rank=rank, world_size=world_size, device=device)
    return eval_loader(_as_they_are(data), input_size=size, rank=rank, world_size=world_size, device=device)


def _as_they_are(data: DataConfig) -> DataConfig:
    """The training images, as many of them as are trained on, to be looked at as validation images are."""
    return replace(data, val_split=data.train_split, val_num_samples=data.train_num_samples, subset=None)


def _square(masks: Masks) -> list[bool]:
    return [keep.shape[-2] == keep.shape[-1] for keep in masks.keep.values()]
