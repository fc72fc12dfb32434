"""Attention viewer: point at a patch of an example image and see where each head looks from there.

Maps travel as bytes round(255·√a), which keeps small attentions apart.     n images, H heads, N tokens
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vitruvius.report._blocks import Block, Note
from vitruvius.report._examples import Examples, SiteMaps
from vitruvius.report._markup import colour_png
from vitruvius.report._runs import Run
from vitruvius.report._section import section

MAX_BYTES = 1_400_000  # of all maps on the page, before base64
MAX_IMAGES = 8


@dataclass(frozen=True, kw_only=True)
class Viewer(Block):
    """The viewer's pictures and its data as JSON."""

    template: ClassVar[str] = "viewer"
    runs: Sequence[dict[str, Any]]

    @property
    def data(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in run.items() if key != "pictures"} for run in self.runs]


@section("viewer", title="Attention viewer", order=60)
def viewer(runs: Sequence[Run]) -> Sequence[Block]:
    """Hover a patch, see each head's attention for that query. `runs` are those of the page."""
    shown = [(run, run.examples) for run in runs if run.examples is not None]
    if not shown:
        return []
    entries = []
    notes = []
    for run, examples in shown:
        fitted, note = fit(examples, MAX_BYTES // len(shown))
        entries.append(_entry(run, fitted))
        if note:
            notes.append(Note(text=f"{run.name}: {note}"))
    return [Viewer(runs=entries), *notes]


def fit(examples: Examples, max_bytes: int) -> tuple[Examples, str]:
    """Fewer images, then coarser grids, then fewer sites, until the maps fit; and a sentence that says so.

    `examples` are images with the maps of each site; `max_bytes` is what the maps may take together.
    """
    n = len(examples.images)
    sites = examples.sites
    pooled = 1
    while _bytes(sites) * min(n, 2) > max_bytes and all(min(site.grid) >= 4 for site in sites):
        sites = [pool(site) for site in sites]
        pooled *= 2
    sites = _fewer(sites, max_bytes)
    kept = max(1, min(n, MAX_IMAGES, max_bytes // _bytes(sites)))
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
    smaller = Examples(
        images=examples.images[:kept],
        labels=examples.labels[:kept],
        predictions=examples.predictions[:kept],
        sites=[SiteMaps(**{**vars(site), "maps": site.maps[:kept]}) for site in sites],
    )
    return smaller, sentence


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


def _entry(run: Run, examples: Examples) -> dict[str, Any]:
    height, width = examples.images.shape[2:]
    captions = [_caption(label, said) for label, said in zip(examples.labels, examples.predictions, strict=True)]
    return {
        "name": run.name,
        "size": [width, height],
        "captions": captions,
        "pictures": [colour_png(image) for image in examples.images],
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


def _caption(label: str, prediction: str) -> str:
    if not label:
        if prediction:
            return f"predicted {prediction}"
        return ""
    if not prediction or prediction == label:
        return f"{label}" + (", predicted right" if prediction else "")
    return f"{label}, predicted {prediction}"
