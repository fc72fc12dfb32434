"""Attention viewer: point at a patch of an example image and see where each head looks from there.

Maps travel as bytes round(255·√a), which keeps small attentions apart.     n images, H heads, N tokens
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from vitruvius.report._blocks import Block, Note
from vitruvius.report._examples import Examples, SiteMaps
from vitruvius.report._markup import colour_png
from vitruvius.report._names import say_maps
from vitruvius.report._runs import Run
from vitruvius.report._section import section

MAX_BYTES = 3_000_000  # of all maps on the page, before base64
MAX_PICTURES = 24
FEW = 4  # pictures that should be seen before their maps are made coarser


@dataclass(frozen=True, kw_only=True)
class Viewer(Block):
    """The viewer's pictures, and its data for the script: images once, and for each run its views of the pictures."""

    template: ClassVar[str] = "viewer"
    images: Sequence[str]  # addresses
    pictures: Sequence[dict[str, Any]]  # name, label, image: which of the images is shown small
    runs: Sequence[dict[str, Any]]

    @property
    def data(self) -> dict[str, Any]:
        return {"images": self.images, "pictures": self.pictures, "runs": self.runs}


@section("viewer", title="Attention viewer", order=60)
def viewer(runs: Sequence[Run]) -> Sequence[Block]:
    """Hover a patch, see each head's attention for that query: runs side by side, clean beside attacked.

    `runs` are those of the page.
    """
    shown = [(run, run.examples) for run in runs if run.examples is not None]
    if not shown:
        return []
    images: dict[str, int] = {}  # address → place
    pictures: dict[str, dict[str, Any]] = {}  # name → what is shown small
    entries = []
    notes = []
    for run, examples in shown:
        fitted, note = fit(examples, MAX_BYTES // len(shown))
        entries.append(_entry(run, fitted, images, pictures))
        if note:
            notes.append(Note(text=f"{run.name}: {note}"))
    words = say_maps([run for run, _ in shown])
    if words:
        notes.insert(0, Note(text=words))
    return [Viewer(images=list(images), pictures=list(pictures.values()), runs=entries), *notes]


def fit(examples: Examples, max_bytes: int) -> tuple[Examples, str]:
    """Coarser grids, then fewer sites, then fewer pictures, until the maps fit; and a sentence that says so.

    `examples` are images with the maps of each site; `max_bytes` is what the maps may take together.
    """
    by_picture = _rows_by_picture(examples)
    n = len(by_picture)
    views = max(len(rows) for rows in by_picture.values())
    sites, pooled = _coarser(examples.sites, max_bytes // (views * min(n, FEW)))
    sites = _fewer(sites, max_bytes // views)
    kept = max(1, min(n, MAX_PICTURES, max_bytes // (_bytes(sites) * views)))
    said = []
    if kept < n:
        said.append(f"{kept} of {n} images are shown")
    if pooled > 1:
        said.append(f"{pooled} × {pooled} patches are taken together")
    if len(sites) < len(examples.sites):
        said.append(f"{len(sites)} of {len(examples.sites)} sites are shown")
    sentence = ""
    if said:
        sentence = ", ".join(said) + " to keep the page small."
    rows = list(itertools.chain(*list(by_picture.values())[:kept]))
    return replace(examples, sites=sites).select(rows), sentence


def _coarser(sites: list[SiteMaps], max_bytes: int) -> tuple[list[SiteMaps], int]:
    """Patches taken together until one image fits or its grid is too small for that; and how many in a row."""
    pooled = 1
    while _bytes(sites) > max_bytes and all(min(site.grid) >= 4 for site in sites):
        sites = [pool(site) for site in sites]
        pooled *= 2
    return sites, pooled


def _rows_by_picture(examples: Examples) -> dict[str, list[int]]:
    """Picture → its images, clean first, in order of appearance."""
    groups: dict[str, list[int]] = {}
    for row in range(len(examples.images)):
        groups.setdefault(examples.picture(row), []).append(row)
    for rows in groups.values():
        rows.sort(key=lambda row: bool(examples.threat(row)))
    return groups


def _fewer(sites: list[SiteMaps], max_bytes: int) -> list[SiteMaps]:
    """Every second site, and again, until one image fits; the last site at least."""
    while _bytes(sites) > max_bytes and len(sites) > 1:
        if len(sites) > 2:
            sites = sites[::2]
        else:
            sites = sites[-1:]
    return sites


def pool(site: SiteMaps) -> SiteMaps:
    """Take 2 × 2 patches together: the mean over queries, the sum over keys; rows still sum to one.

    `site` holds the maps of one site and their grid.
    """
    (rows, columns), prefix = site.grid, site.num_prefix_tokens
    half = (rows + 1) // 2, (columns + 1) // 2
    y, x = np.divmod(np.arange(rows * columns), columns)
    group = np.concatenate([np.arange(prefix), prefix + (y // 2) * half[1] + x // 2])
    gather = np.eye(prefix + half[0] * half[1], dtype=np.float32)[:, group]  # (coarse, fine)
    mean = gather / gather.sum(1, keepdims=True)
    maps = mean @ site.maps.astype(np.float32) @ gather.T
    return SiteMaps(name=site.name, maps=maps, grid=half, num_prefix_tokens=prefix)


def encode(maps: np.ndarray) -> str:
    """(n, H, N, N) in [0, 1] → base64 of bytes round(255·√a). `maps` is that array."""
    levels = (255 * np.sqrt(maps.astype(np.float32).clip(0, 1))).round().astype(np.uint8)
    return base64.b64encode(levels.tobytes()).decode("ascii")


def _bytes(sites: Sequence[SiteMaps]) -> int:
    """Of one image."""
    return sum(site.maps[0].size for site in sites)


def _entry(run: Run, examples: Examples, images: dict[str, int], pictures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the script needs of one run; its images and pictures join those that are known."""
    height, width = examples.images.shape[2:]
    views = []
    for row, image in enumerate(examples.images):
        name = examples.picture(row)
        label = examples.labels[row]
        place = images.setdefault(colour_png(image), len(images))
        pictures.setdefault(name, {"name": name, "label": label, "image": place})
        views.append(
            {
                "picture": name,
                "image": place,
                "threat": examples.threat(row),
                "caption": _caption(label, examples.predictions[row]),
            }
        )
    return {
        "name": run.name,
        "colour": run.look.name,
        "size": [width, height],
        "views": views,
        "relevance": _relevance(examples),
        "sites": [
            {
                "name": site.name,
                "heads": site.maps.shape[1],
                "grid": list(site.grid),
                "prefix": site.num_prefix_tokens,
                "maps": encode(site.maps),
            }
            for site in examples.sites
        ],
    }


def _relevance(examples: Examples) -> dict[str, Any] | None:
    """Relevance as bytes, stretched from each image's own minimum to its own maximum."""
    maps = examples.relevance
    if maps is None:
        return None
    low = maps.min((1, 2), keepdims=True)
    height = np.maximum(maps.max((1, 2), keepdims=True) - low, 1e-12)
    levels = (255 * ((maps - low) / height)).round().astype(np.uint8)
    return {"grid": list(maps.shape[1:]), "maps": base64.b64encode(levels.tobytes()).decode("ascii")}


def _caption(label: str, prediction: str) -> str:
    if not label:
        if prediction:
            return f"predicted {prediction}"
        return ""
    if not prediction:
        return label
    if prediction == label:
        return f"{label}, predicted right"
    return f"{label}, predicted {prediction}"
