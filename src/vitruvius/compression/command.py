"""The verbs `maps`, `masks` and `export` as a command uses them: open, compute, write, and say what was done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor

from vitruvius._checks import check_count
from vitruvius._errors import ConfigError
from vitruvius._files import Lock, MadeFolder, atomic_write_text, check_new_file, ensure_writable, is_array
from vitruvius._processes import Process, process_group
from vitruvius._progress import Bar
from vitruvius._yaml import read_yaml, to_plain
from vitruvius.compression.cost import CycleTable, cycle_table
from vitruvius.compression.export import ENDINGS, Format, export
from vitruvius.compression.files import load_maps, load_masks, save_maps, save_masks
from vitruvius.compression.maps import average_maps
from vitruvius.compression.masks import Budget, Masks, make_masks
from vitruvius.compression.polarisation import Polarised, describe, polarise_all
from vitruvius.compression.rules import Rule, rules
from vitruvius.compression.sparse import masks_in
from vitruvius.data import DataConfig, Loader, eval_loader, train_loader
from vitruvius.evaluation.base import fingerprint
from vitruvius.surgery import survey
from vitruvius.targets import Target, limit_images, local_run, open_target


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
        lock = Lock(path, file=True)
        try:
            process.on_first(lock.take)
            maps = _average(opened, loader, path, process)
            notes = {"data": loader.name, "images": loader.num_images, "augmented": augment}
            notes["weights"] = fingerprint(model)
            process.on_first(lambda: save_maps(path, maps, sites=survey(model), target=target, **notes))
        finally:
            lock.release()
    return path


def _average(target: Target, loader: Loader, path: Path, process: Process) -> dict[str, Tensor]:
    """Maps on the CPU; what is known so far is kept beside the file that shall hold them."""
    made = MadeFolder(path.parent)
    ensure_writable(path.parent)
    try:
        with Bar("averaging", shown=process.first) as bar:
            partial = path.with_suffix(".partial")
            maps = average_maps(target.model, loader, process=process, partial=partial, progress=bar)
    except BaseException:
        made.take_back()
        raise
    return {name: map_.cpu() for name, map_ in maps.items()}


def masks_of_maps(
    maps: str,
    rule: str | Sequence[str],
    out: str | None,
    *,
    sparsity: float | None = None,
    budget: Budget = "global",
    protect: Sequence[int] | None = None,
    of: str | None = None,
    threshold: int | None = None,
    tiles: int | None = None,
) -> tuple[Masks, str]:
    """Masks of a file of maps, written with their permutations; and what a person wants to know about them.

    maps: the file of maps.
    rule: one rule, `information:mass=0.9`, or several as `PATTERN=RULE`, one per pattern of site names.
    out: the file of masks; default: masks.safetensors beside the maps.
    sparsity, budget, protect, tiles: as for `make_masks`.
    of: a run folder; maps that are not of its model are refused.
    threshold: queries that make a token global; default: a quarter of them.
    """
    _check_threshold(threshold)
    tensors, sites = load_maps(maps)
    known = sites
    if of is not None:
        known = survey(open_target(of, data_needed=False).model)
    masks = make_masks(
        tensors, read_rules(rule), sparsity=sparsity, budget=budget, protect=protect, sites=known, tiles=tiles
    )
    if out:
        path = Path(out)
    else:
        path = Path(maps).with_name("masks.safetensors")
    polarised = _polarised(masks, threshold)
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


def read_rules(words: str | Sequence[str]) -> Rule | dict[str, Rule]:
    """`information:mass=0.9` as a rule; `stages.0.*=information:mass=0.46`, several of them, as rules by pattern.

    `words` is one such text, or several.
    """
    if isinstance(words, str):
        words = [words]
    found: dict[str, Rule] = {}
    for word in words:
        pattern, equals, rule = word.partition("=")
        if not equals or ":" in pattern:
            pattern, rule = "*", word
        if pattern in found:
            raise ConfigError(f"--rule {word}: there is a rule for {pattern!r} already; write PATTERN=RULE for others.")
        found[pattern] = rules.make(rule, where="--rule")
    if list(found) == ["*"]:
        return found["*"]
    return found


def masks_of_arrays(path: str, out: str) -> tuple[Masks, str]:
    """ViTCoD's mask arrays (a .npy file, or a LeViT's folder) as a file of ours, and what was found.

    `path` is ViTCoD's, `out` the file to write.
    """
    if not is_array(path) or not Path(path).exists():
        raise ConfigError(f"{path} is not one of ViTCoD's masks: expected a .npy file, or a folder of mask_*.npy.")
    masks = load_masks(path)
    save_masks(out, masks, polarised=_polarised(masks), arrays=str(path))
    return masks, f"{masks.sparsity}\n\n{out}"


def cycles_of(
    target: str, *, head_dim: int | None = None, threshold: int | None = None, overrides: Sequence[str] = ()
) -> tuple[CycleTable, Path]:
    """Cycles of the ViTCoD accelerator for the masks of a file or of a run, beside those without masks.

    target: masks (.safetensors, .npy, a LeViT's folder) or a run folder. head_dim: channels of a head; default: what
    the sites say, else 64. threshold: queries that make a token global. overrides: settings of the run. Written as
    cycles.json beside the masks, or into the run.
    """
    _check_threshold(threshold)
    if head_dim is not None:
        check_count(head_dim, "--head-dim")
    masks, ratio, place = _masks_of(target, overrides)
    square = {name: keep for name, keep in masks.keep.items() if keep.shape[-2] == keep.shape[-1]}
    if not square:
        raise ConfigError(f"{target} has no mask over one set of tokens; the accelerator computes self-attention.")
    if head_dim is None:
        head_dim = _head_dim({masks.sites[name].key_dim for name in square} - {0}, target)
    table = cycle_table([square], head_dim=head_dim, ratio=ratio, threshold=threshold)
    rows = [{"sparsity": share, **asdict(row), "total": row.total} for share, row in table.rows.items()]
    atomic_write_text(place / "cycles.json", json.dumps({"head_dim": head_dim, "ratio": ratio, "rows": rows}, indent=1))
    return table, place / "cycles.json"


def _check_threshold(threshold: int | None) -> None:
    if threshold is not None and threshold < 0:
        raise ConfigError(f"--threshold {threshold}: expected a number of queries, 0 or more.")


def _head_dim(widths: set[int], target: str) -> int:
    if len(widths) > 1:
        raise ConfigError(f"{target} has heads of {sorted(widths)} channels; say which with --head-dim.")
    return next(iter(widths), 64)


def _masks_of(target: str, overrides: Sequence[str]) -> tuple[Masks, float, Path]:
    """The masks of a file or run, the rank of its auto-encoder over its heads, and where results belong."""
    target = local_run(target)
    path = Path(target)
    is_run = (path / "config.yaml").is_file()
    if path.suffix in (".safetensors", ".npy") or (path.is_dir() and not is_run):
        place = path if path.is_dir() else path.parent
        return load_masks(path), 1.0, place
    opened = open_target(target, overrides, data_needed=False)
    keep, ratios = masks_in(opened.model)
    if not keep:
        raise ConfigError(f"{target} has no masks. Make some with `vitruvius masks`, train with them, and ask again.")
    sites = survey(opened.model)
    masks = Masks(keep=keep, sites={name: sites[name] for name in keep}, protected=dict.fromkeys(keep, ()))
    return masks, min(ratios, default=1.0), opened.folder


def export_target(run: str, out: str | None, *, format: Format = "torch-export", sparse: bool = False) -> Path:
    """Export a model; its logits are compared before the file is written.

    run: a run folder, or whatever else names a model.
    out: the file; default: export.pt2, .onnx or .safetensors in the run.
    format: torch-export, onnx or safetensors.
    sparse: compute only what masks keep.
    """
    if format not in ENDINGS:
        raise ConfigError(f"--format {format}: expected one of {', '.join(ENDINGS)}.")
    if out:
        check_new_file(out, f"export.{ENDINGS[format]}")
    opened = open_target(run, data_needed=False)
    recipe = to_plain(opened.config)
    if opened.is_run:
        recipe = read_yaml(opened.folder / "config.yaml")
    path = Path(out or opened.folder / f"export.{ENDINGS[format]}")
    with Lock(path, file=True):
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


def _polarised(masks: Masks, threshold: int | None = None) -> dict[str, Polarised]:
    if any(_square(masks)):
        return polarise_all(masks.keep, threshold=threshold)
    return {}


def _square(masks: Masks) -> list[bool]:
    return [keep.shape[-2] == keep.shape[-1] for keep in masks.keep.values()]
