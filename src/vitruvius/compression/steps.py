"""The steps of a compression, from file to file: average maps, masks, models under them, cycles of an accelerator.

Masks, and auto-encoders, come before the kernel of a site, and before what chooses among the keys that are left.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from vitruvius._checks import check_count
from vitruvius._errors import ConfigError
from vitruvius._files import atomic_write_text, is_array
from vitruvius._registry import read_spec
from vitruvius.attention import Kernel, attentions
from vitruvius.compression.cost import CycleTable, cycle_table
from vitruvius.compression.files import load_maps, load_masks, save_maps, save_masks
from vitruvius.compression.maps import average_maps
from vitruvius.compression.masks import Masks, make_masks
from vitruvius.compression.polarisation import describe, polarise_all
from vitruvius.compression.rules import Rule, rules
from vitruvius.compression.sparse import masks_in
from vitruvius.evaluation.base import fingerprint
from vitruvius.heads import Site
from vitruvius.models import PixelModel, load_weights
from vitruvius.models.wiring import wire
from vitruvius.request import Request
from vitruvius.surgery import restore, survey
from vitruvius.surgery.base import inner
from vitruvius.targets.base import local_run, open_target


def write_maps(request: Request) -> Path:
    """Average maps over the images of a request, each seen once, on the CPU; the file of maps.

    What is known so far is kept beside that file: called again after an interruption, it resumes there. Several
    processes share the images.
    """
    model, loader, path, process = request.model, request.loader, request.folder, request.process
    with request.bar("averaging") as bar:
        maps = average_maps(model, loader, process=process, partial=path.with_suffix(".partial"), progress=bar)
    maps = {name: map_.cpu() for name, map_ in maps.items()}
    notes = {"data": loader.name, "images": loader.num_images, "augmented": request.split == "augmented"}
    notes["weights"] = fingerprint(model)
    process.on_first(lambda: save_maps(path, maps, sites=survey(model), target=request.target.text, **notes))
    return path


def write_masks(
    maps: str | Path,
    rule: str | Sequence[str],
    out: str | Path | None = None,
    *,
    sites: Mapping[str, Site] | None = None,
    threshold: int | None = None,
    **settings: Any,
) -> tuple[Masks, str]:
    """Masks of a file of maps, written with their permutations; and what a person wants to know about them.

    rule: as `read_rules` takes it. out: default: masks.safetensors beside the maps. sites: of a model, which maps must
    be of; default: those that the file names. threshold: queries that make a token global; default: a quarter of them.
    settings: sparsity, budget, protect and tiles of `make_masks`.
    """
    _check_threshold(threshold)
    tensors, own_sites = load_maps(maps)
    masks = make_masks(tensors, read_rules(rule), sites=own_sites if sites is None else sites, **settings)
    path = Path(out) if out else Path(maps).with_name("masks.safetensors")
    polarised = polarise_all(masks.keep, threshold=threshold)
    save_masks(path, masks, polarised=polarised, maps=str(maps))
    text = [str(masks.sparsity), *([describe(polarised)] if polarised else []), str(path)]
    if masks.limits:
        limits = [f"{name}: {limit:.6g}" for name, limit in masks.limits.items()]
        shown = ", ".join(limits[:4]) + (" …" if limits[4:] else "")
        text[-1] = f"limit of the rule {masks.rule.partition('(')[0].lower()}, moved for this sparsity: {shown}\n{path}"
    return masks, "\n\n".join(text)


def read_rules(words: str | Sequence[str]) -> Rule | dict[str, Rule]:
    """`information:mass=0.9` as a rule; `stages.0.*=information:mass=0.46`, several of them, as rules by pattern."""
    found: dict[str, Rule] = {}
    for word in [words] if isinstance(words, str) else words:
        pattern, equals, rule = word.partition("=")
        if not equals or ":" in pattern:
            pattern, rule = "*", word
        if pattern in found:
            raise ConfigError(f"--rule {word}: there is a rule for {pattern!r} already; write PATTERN=RULE for others.")
        found[pattern] = rules.make(rule, where="--rule")
    return found["*"] if list(found) == ["*"] else found


def masks_of_arrays(path: str, out: str | Path) -> tuple[Masks, str]:
    """ViTCoD's mask arrays (a .npy file, or a LeViT's folder) as a file of ours, and what was found.

    `path` is ViTCoD's, `out` the file to write.
    """
    if not is_array(path) or not Path(path).exists():
        raise ConfigError(f"{path} is not one of ViTCoD's masks: expected a .npy file, or a folder of mask_*.npy.")
    masks = load_masks(path)
    save_masks(out, masks, polarised=polarise_all(masks.keep), arrays=str(path))
    return masks, f"{masks.sparsity}\n\n{out}"


def cycles_of(
    target: str,
    overrides: Sequence[str] = (),
    *,
    head_dim: int | None = None,
    threshold: int | None = None,
    trust_plugins: bool = False,
) -> tuple[CycleTable, Path]:
    """Cycles of the ViTCoD accelerator for the masks of a file or of a run, beside those without masks.

    target: masks (.safetensors, .npy, a LeViT's folder) or a run folder. overrides: settings of the run. head_dim:
    channels of a head; default: what the sites say, else 64. threshold: queries that make a token global.
    trust_plugins: as for `open_target`. Written as cycles.json beside the masks, or into the run.
    """
    _check_threshold(threshold)
    if head_dim is not None:
        check_count(head_dim, "--head-dim")
    masks, ratio, place = _masks_of(target, overrides, trust_plugins=trust_plugins)
    square = {name: keep for name, keep in masks.keep.items() if keep.shape[-2] == keep.shape[-1]}
    if not square:
        raise ConfigError(f"{target} has no mask over one set of tokens; the accelerator computes self-attention.")
    if head_dim is None:
        widths = {masks.sites[name].key_dim for name in square} - {0}
        if len(widths) > 1:
            raise ConfigError(f"{target} has heads of {sorted(widths)} channels; say which with --head-dim.")
        head_dim = next(iter(widths), 64)
    table = cycle_table([square], head_dim=head_dim, ratio=ratio, threshold=threshold)
    rows = [{"sparsity": share, **row._asdict(), "total": row.total} for share, row in table.rows.items()]
    atomic_write_text(place / "cycles.json", json.dumps({"head_dim": head_dim, "ratio": ratio, "rows": rows}, indent=1))
    return table, place / "cycles.json"


def _check_threshold(threshold: int | None) -> None:
    if threshold is not None and threshold < 0:
        raise ConfigError(f"--threshold {threshold}: expected a number of queries, 0 or more.")


def _masks_of(target: str, overrides: Sequence[str], *, trust_plugins: bool) -> tuple[Masks, float, Path]:
    """The masks of a file or run, the rank of its auto-encoder over its heads, and where results belong."""
    path = Path(local_run(target))
    is_run = (path / "config.yaml").is_file()
    if path.suffix in (".safetensors", ".npy") or (path.is_dir() and not is_run):
        return load_masks(path), 1.0, path if path.is_dir() else path.parent
    opened = open_target(target, overrides, data_needed=False, trust_plugins=trust_plugins)
    keep, ratios = masks_in(opened.model)
    if not keep:
        raise ConfigError(f"{target} has no masks. Make some with `vitruvius masks`, train with them, and ask again.")
    sites = survey(opened.model)
    masks = Masks(keep=keep, sites={name: sites[name] for name in keep}, protected=dict.fromkeys(keep, ()))
    return masks, min(ratios, default=1.0), opened.folder


Rules = list[dict[str, Any]]


def masked_rules(rules: Sequence[Mapping[str, Any]], masks: str | Path, rank: int | None = None) -> Rules:
    """The attention `rules` of a recipe with the masks of a file; sites without a rule get one of their own.

    `rank` also squeezes queries and keys through that many heads (default: as they are).
    """
    stages: list[dict[str, Any]] = [{"use": "mask", "file": str(masks)}]
    if rank is not None:
        stages.insert(0, {"use": "low_rank", "rank": rank})
    masked = [{"where": rule["where"], "parts": _with_stages(rule["parts"], stages)} for rule in rules]
    left = [name for name in load_masks(masks).keep if not any(fnmatchcase(name, rule["where"]) for rule in rules)]
    return [*masked, *({"where": name, "parts": stages} for name in left)]


def pruned(model: PixelModel, rules: Rules) -> PixelModel:
    """A copy of `model` with the attention of `rules`, which name its own parts too, and its weights."""
    copied = copy.deepcopy(model)
    weights = {key: value.clone() for key, value in inner(model).state_dict().items()}
    restore(copied)
    wire(copied, rules)
    fitting = inner(copied).state_dict()
    load_weights(copied, {key: value for key, value in weights.items() if key in fitting and ".mask." not in key})
    return copied.eval()


def _with_stages(parts: Sequence[Any], stages: Sequence[dict[str, Any]]) -> list[Any]:
    names = [read_spec(part, where="attention")[0] for part in parts]
    added = [stage for stage in stages if stage["use"] == "mask" or stage["use"] not in names]
    kept = [(part, attentions[name]) for part, name in zip(parts, names, strict=True) if name != "mask"]
    place = next((i for i, (_, piece) in enumerate(kept) if _comes_last(piece)), len(kept))
    others = [part for part, _ in kept]
    return [*others[:place], *added, *others[place:]]


def _comes_last(piece: object) -> bool:
    return isinstance(piece, type) and (issubclass(piece, Kernel) or "choice of keys" in getattr(piece, "writes", ()))
