"""What a page or a viewer shows of a model itself: its attention on a few pictures, and what it is made of.

attention.safetensors holds `images` (n, 3, h, w) uint8, for each site its maps (n, H, N, N) float16, and perhaps
`relevance` (n, rows, columns), what the answers rest on. attention.json holds `grid` [rows, columns],
`num_prefix_tokens`, `labels`, `predictions`, `pictures` (which picture an image shows), `threats` (what was done to it)
and under `sites` the grid and prefix tokens of sites that differ. n images, H heads, N tokens
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitruvius._errors import DataError, NoSiteError, UnsuitableSite
from vitruvius._files import atomic_write_text, save_tensors
from vitruvius._progress import Progress, no_progress, part_of, scaled
from vitruvius._registry import Spec
from vitruvius.analysis.explanations import relevance
from vitruvius.attacks.base import disturb
from vitruvius.evaluation.threats import Threat, describe, make_threat
from vitruvius.heads import Site
from vitruvius.surgery import record, survey
from vitruvius.surgery.base import inner
from vitruvius.surgery.recording import core_of, map_of
from vitruvius.surgery.sites import Where

MAX_BYTES = 3_000_000  # of all maps together, before base64
MAX_PICTURES = 24
FEW = 4  # pictures that should be seen before their maps are made coarser


@dataclass(frozen=True, kw_only=True)
class SiteMaps:
    """The maps of one site and how its tokens lie on the image."""

    name: str
    maps: np.ndarray  # (n, H, N, N), N = prefix tokens + rows · columns
    grid: tuple[int, int]
    num_prefix_tokens: int


@dataclass(frozen=True, kw_only=True)
class Examples:
    """A few images, what they show, what the model said, and where it looked."""

    images: np.ndarray  # (n, 3, h, w) uint8
    labels: list[str]
    predictions: list[str]
    sites: list[SiteMaps]
    pictures: list[str]  # which picture an image shows; images of one name stand side by side
    threats: list[str]  # what was done to an image; empty for a clean one
    relevance: np.ndarray | None = None  # (n, rows, columns), what the answers rest on

    def select(self, rows: Sequence[int]) -> Examples:
        """Only the images at these places."""
        kept = list(rows)
        texts = {name: [getattr(self, name)[row] for row in kept] for name in TEXTS}
        sites = [replace(site, maps=site.maps[kept]) for site in self.sites]
        shown = None if self.relevance is None else self.relevance[kept]
        return Examples(images=self.images[kept], sites=sites, relevance=shown, **texts)


TEXTS = ("labels", "predictions", "pictures", "threats")  # of `Examples`, one per image


def record_pictures(
    folder: str | Path,
    model: nn.Module,
    loader: Any,
    threat: Spec | Threat | None = None,
    *,
    names: Sequence[str] = (),
    progress: Progress = no_progress,
) -> None:
    """Keep what a page shows of a model: its sites, and its attention on all images of a loader, clean and attacked.

    folder: gets model.json, attention.safetensors and attention.json.
    model: in eval mode, with a head where there is a threat.
    loader: with ids; of few images.
    threat: attacks the images, `"pgd:eps=8/255"`; None: clean alone.
    names: what classes are called, by their numbers.
    progress: told how many images are attacked.
    """
    attack = None if threat is None else make_threat(threat)
    told = "attacked" if attack is None else describe(attack)
    sites = survey_if_any(model)
    save_model_facts(folder, model, sites)
    batches = list(loader.with_ids())
    if not batches:
        raise DataError(f"{loader.name} has no images; nothing to view.")
    x, y, ids = (torch.cat(parts) for parts in zip(*batches, strict=True))
    attacked = None
    if attack is not None:
        attacked = disturb(attack, model, x, y, ids, part_of(scaled(progress, len(x)), 0, 0, told))
    pictures = [f"{loader.name} {number}" for number in ids.tolist()]
    named: dict[str, Any] = {"threat": told, "names": names, "pictures": pictures, "sites": sites}
    record_examples(folder, model, x, y.tolist(), attacked=attacked, **named)


def record_examples(
    folder: str | Path,
    model: nn.Module,
    images: Tensor,
    labels: Sequence[str | int] = (),
    *,
    where: Where = "*",
    attacked: Tensor | None = None,
    threat: str = "attacked",
    names: Sequence[str] = (),
    pictures: Sequence[str] = (),
    sites: Mapping[str, Site] | None = None,
) -> list[str]:
    """Run the model on a few images and keep its attention for the viewer in `folder`; the sites that were kept.

    A map holds the weights that a core really gives to its values; a core without one is refused by name. Sites whose
    queries and keys do not lie on one grid (windows, channels, downsampling) have no place here. Relevance is kept too
    where it can be followed through the layers and the model is in eval mode.

    images: (n, 3, h, w) in [0, 1].
    labels: what they show, one per image; default: unknown.
    where: a glob over the names of sites; default: all.
    attacked: the same images attacked, shown beside them.
    threat: what was done to those, in words.
    names: what classes are called, by their numbers.
    pictures: a name for each picture, the same in all runs that are to be compared on it; default: their numbers.
    sites: what `survey` found, where that is known already.
    """
    views = [images] if attacked is None else [images, attacked]
    if attacked is not None and attacked.shape != images.shape:
        raise DataError(f"attacked images are {tuple(attacked.shape)}, expected {tuple(images.shape)} as the others.")
    sites = survey(model) if sites is None else sites
    answers: list[Tensor] = []
    maps: dict[str, list[Tensor]] = {}
    with torch.no_grad(), record(model, where, sites=sites) as seen:
        for view in views:
            answers.append(model(view).argmax(-1))
            for name in filter(lambda name: sites[name].is_over_patches(), seen):
                maps.setdefault(name, []).append(map_of(model, name, seen[name]).half().cpu())
    if not maps:
        raise NoSiteError(f"none of the {len(sites)} attention sites attends over a grid of patches; nothing to view.")
    has_head = getattr(inner(model), "num_classes", None) != 0  # of features, the largest is not a class
    predictions = torch.cat(answers).tolist() if has_head else [""] * len(images) * len(views)
    examples = Examples(
        images=(torch.cat(views).float() * 255).round().clamp(0, 255).byte().expand(-1, 3, -1, -1).cpu().numpy(),
        labels=_class_names(labels or [""] * len(images), names) * len(views),
        predictions=_class_names(predictions, names),
        sites=[_site_maps(sites[name], torch.cat(parts)) for name, parts in maps.items()],
        pictures=[str(picture) for picture in pictures or range(len(images))] * len(views),
        threats=[""] * len(images) + [threat] * len(images) * (len(views) - 1),
        relevance=_relevance(model, views, answers, sites) if has_head and not model.training else None,
    )
    save_examples(folder, fit(examples, MAX_BYTES)[0])
    return list(maps)


def save_examples(folder: str | Path, examples: Examples) -> None:
    """Write attention.safetensors and attention.json."""
    placed = {site.name: {"grid": site.grid, "num_prefix_tokens": site.num_prefix_tokens} for site in examples.sites}
    common = placed[examples.sites[0].name]
    others = {name: place for name, place in placed.items() if place != common}
    tensors = {"images": torch.from_numpy(examples.images.copy())}
    tensors |= {site.name: torch.from_numpy(site.maps).half() for site in examples.sites}
    if examples.relevance is not None:
        tensors["relevance"] = torch.from_numpy(examples.relevance).float()
    save_tensors(Path(folder) / "attention.safetensors", tensors)
    facts = {**common, **{name: getattr(examples, name) for name in TEXTS}, "sites": others}
    atomic_write_text(Path(folder) / "attention.json", json.dumps(facts, indent=1))


def save_model_facts(folder: str | Path, model: nn.Module, sites: Mapping[str, Site] | None = None) -> None:
    """Write model.json: parameters of the model, and each attention site with its core."""
    sites = survey_if_any(model) if sites is None else sites
    listed = []
    for name, site in sites.items():
        core = core_of(model, name)
        listed.append({**dataclasses.asdict(site), "core": "upstream" if core is None else core.describe()})
    facts = {"parameters": sum(parameter.numel() for parameter in model.parameters()), "sites": listed}
    atomic_write_text(Path(folder) / "model.json", json.dumps(facts, indent=1))


def survey_if_any(model: nn.Module) -> dict[str, Site]:
    """The attention sites of a model, none of one without attention."""
    try:
        return survey(model)
    except NoSiteError:
        return {}


def fit(examples: Examples, max_bytes: int) -> tuple[Examples, str]:
    """Coarser grids, then fewer sites, then fewer pictures, until the maps fit; and a sentence that says so."""
    rows_of: dict[str, list[int]] = {}
    for row, picture in enumerate(examples.pictures):
        rows_of.setdefault(picture, []).append(row)
    count, views = len(rows_of), max(map(len, rows_of.values()))
    sites, pooled = examples.sites, 1
    while size_of(sites) > max_bytes // (views * min(count, FEW)) and all(min(site.grid) >= 4 for site in sites):
        sites = [pool(site) for site in sites]
        pooled *= 2
    while size_of(sites) > max_bytes // views and len(sites) > 1:
        sites = sites[::2] if len(sites) > 2 else sites[-1:]
    shown = max(1, min(count, MAX_PICTURES, max_bytes // (size_of(sites) * views)))
    said = {
        f"{shown} of {count} images are shown": shown < count,
        f"{pooled} × {pooled} patches are taken together": pooled > 1,
        f"{len(sites)} of {len(examples.sites)} sites are shown": len(sites) < len(examples.sites),
    }
    notes = [note for note, applies in said.items() if applies]
    clean_first = [sorted(rows, key=lambda row: bool(examples.threats[row])) for rows in rows_of.values()]
    chosen = [row for rows in clean_first[:shown] for row in rows]
    return replace(examples, sites=sites).select(chosen), f"{', '.join(notes)} to keep the page small." if notes else ""


def size_of(sites: Sequence[SiteMaps]) -> int:
    """Numbers in the maps of one image."""
    return sum(site.maps[0].size for site in sites)


def pool(site: SiteMaps) -> SiteMaps:
    """Take 2 × 2 patches together: the mean over queries, the sum over keys; rows still sum to one."""
    (rows, columns), prefix = site.grid, site.num_prefix_tokens
    half = (rows + 1) // 2, (columns + 1) // 2
    y, x = np.divmod(np.arange(rows * columns), columns)
    group = np.concatenate([np.arange(prefix), prefix + (y // 2) * half[1] + x // 2])
    gather = np.eye(prefix + half[0] * half[1], dtype=np.float32)[:, group]  # (coarse, fine)
    mean = gather / gather.sum(1, keepdims=True)
    maps = mean @ site.maps.astype(np.float32) @ gather.T
    return SiteMaps(name=site.name, maps=maps, grid=half, num_prefix_tokens=prefix)


def _site_maps(site: Site, maps: Tensor) -> SiteMaps:
    assert site.grid is not None
    return SiteMaps(name=site.name, maps=maps.numpy(), grid=site.grid, num_prefix_tokens=site.num_prefix_tokens)


def _class_names(labels: Sequence[str | int], names: Sequence[str]) -> list[str]:
    """Classes by name where they have one; else as they are."""
    return [names[each] if isinstance(each, int) and 0 <= each < len(names) else str(each) for each in labels]


def _relevance(
    model: nn.Module, views: Sequence[Tensor], answers: Sequence[Tensor], sites: Mapping[str, Site]
) -> np.ndarray | None:
    """What the answers rest on, (n, rows, columns); None where it cannot be followed through the model."""
    try:
        maps = [relevance(model, view, classes, sites) for view, classes in zip(views, answers, strict=True)]
    except (UnsuitableSite, NoSiteError):
        return None
    return torch.cat(maps).float().cpu().numpy()
