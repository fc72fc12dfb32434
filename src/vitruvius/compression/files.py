"""Maps and masks in files: safetensors that say what they hold, and ViTCoD's .npy arrays in and out.

You et al. 2023, "ViTCoD": maps (L, H, N, M), row sums 1; masks (L, H, N, M) with True = removed; for LeViT a folder
with an array a stage. Ours: one tensor (H, N, M) a site; in masks True = kept.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitruvius._errors import CheckpointError, ConfigError
from vitruvius._files import is_array, load_tensors, read_arrays, read_mask_arrays, save_array, save_tensors
from vitruvius.compression.masks import Masks, guess_sites
from vitruvius.compression.polarisation import Polarised
from vitruvius.heads import Site

MAPS = "average attention maps, (heads, queries, keys), rows sum to one"
MASKS = "attention masks, (heads, queries, keys), true = kept"
LEVIT = {"dpt": r"stages\.(\d+)\.blocks\.\d+\.attn", "subsample": r"stages\.(\d+)\.downsample\.attn_downsample"}


def save_maps(
    path: str | Path, maps: Mapping[str, Tensor], *, sites: Mapping[str, Site] | None = None, **notes: object
) -> None:
    """Maps by site in one file that says what it holds.

    path: a .safetensors file, or a .npy name or folder for ViTCoD's layout.
    maps: (H, N, M) by site.
    sites: what the sites are, as from `survey(model)`; without them a reader guesses from the shapes.
    notes: whatever else the file should say.
    """
    if is_array(path):
        write_arrays(path, maps, "attention_score")
        return
    metadata = {key: json.dumps(value) for key, value in notes.items()}
    if sites is not None:
        metadata["sites"] = sites_to_json({name: sites[name] for name in maps})
    save_tensors(path, maps, {"kind": MAPS, **metadata})


def load_maps(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Site]]:
    """Maps and their sites, from our file or from ViTCoD's arrays (for a LeViT a folder)."""
    if is_array(path):
        maps = read_arrays(path, "attention_score")
        return maps, guess_sites(maps)
    maps, _, sites = _read(path, MAPS, "average maps as `vitruvius maps` writes them")
    return maps, sites


def save_masks(
    path: str | Path, masks: Masks, *, polarised: Mapping[str, Polarised] | None = None, **notes: object
) -> None:
    """Masks by site, with rule, protected tokens and sparsity; with the permutations of `polarised` beside them.

    path: as for `save_maps`. notes: whatever else the file should say.
    """
    if is_array(path):
        write_arrays(path, {name: ~keep for name, keep in masks.keep.items()}, "mask")
        return
    tensors = dict(masks.keep)
    for name, one in (polarised or {}).items():
        tensors |= {f"{name}:order": one.order, f"{name}:num_global": one.num_global}
    share = masks.sparsity.total
    facts = {"rule": masks.rule, "protected": masks.protected, "limits": masks.limits, **notes}
    facts |= {"sparsity": share.sparsity, "sparsity without protected tokens": share.sparsity_inside}
    metadata = {key: json.dumps(value) for key, value in facts.items()}
    save_tensors(path, tensors, {"kind": MASKS, "sites": sites_to_json(masks.sites), **metadata})


def load_masks(path: str | Path) -> Masks:
    """Masks from our file, or from ViTCoD's arrays (for a LeViT a folder), turned over."""
    if is_array(path):
        keep = read_mask_arrays(path)
        sites = guess_sites(keep)
        return Masks(keep=keep, sites=sites, protected={n: tuple(range(s.num_prefix_tokens)) for n, s in sites.items()})
    keep, notes, sites = _read(path, MASKS, "masks as `vitruvius masks` writes them")
    protected = {name: tuple(tokens) for name, tokens in json.loads(notes.get("protected", "{}")).items()}
    return Masks(
        keep=keep,
        sites=sites,
        protected=protected,
        rule=json.loads(notes.get("rule", '""')),
        limits=json.loads(notes.get("limits", "{}")),
    )


def write_arrays(path: str | Path, tensors: Mapping[str, Tensor], stem: str) -> None:
    """Tensors (H, N, M) by site in ViTCoD's layout: one .npy file, or for a LeViT a folder of files `STEM_…`."""
    path = Path(path)
    if path.suffix == ".npy":
        if len({tensor.shape for tensor in tensors.values()}) != 1:
            raise ConfigError(f"{path}: one array needs sites of one shape; these differ. Write a .safetensors file.")
        save_array(path, torch.stack(list(tensors.values())).numpy())
        return
    stages: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        stages.setdefault(_levit_file(name, stem), []).append(tensor)
    for file, layers in stages.items():
        save_array(path / file, torch.stack(layers).numpy())


def _levit_file(name: str, stem: str) -> str:
    for kind, pattern in LEVIT.items():
        if found := re.fullmatch(pattern, name):
            return f"{stem}_{kind}{int(found[1]) - (kind == 'subsample')}.npy"
    raise ConfigError(f"{name!r} is not a site of a LeViT; folders of arrays are for LeViT. Write one .npy file.")


def sites_to_json(sites: Mapping[str, Site]) -> str:
    return json.dumps([dataclasses.asdict(site) for site in sites.values()])


def _read(path: str | Path, kind: str, expected: str) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Site]]:
    """Tensors by site in the order of the model, what the file says, and the sites, guessed where it does not."""
    tensors, notes = load_tensors(path)
    if notes.get("kind", kind) != kind:
        raise ConfigError(f"{path} holds {notes['kind']}, expected {expected}.")
    tensors = {name: tensor for name, tensor in tensors.items() if ":" not in name}  # without permutations
    sites = guess_sites(tensors) if "sites" not in notes else _sites_of(notes["sites"], path)
    order = dict.fromkeys([*(name for name in sites if name in tensors), *tensors])
    return {name: tensors[name] for name in order}, notes, sites


def _sites_of(text: str, source: str | Path) -> dict[str, Site]:
    try:
        rows: list[dict[str, Any]] = json.loads(text)
        sites = [Site(**{**row, "grid": tuple(row["grid"]) if row["grid"] else None}) for row in rows]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{source} describes its sites in a form that cannot be read ({error}).") from error
    return {site.name: site for site in sites}
