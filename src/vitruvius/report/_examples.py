"""Example images with their attention, for the viewer: attention.safetensors and attention.json of a run.

The first holds `images` (n, 3, h, w) uint8 and for each site its maps (n, H, N, N) float16; the second `grid`
[rows, columns], `num_prefix_tokens`, `labels` and `predictions`, and under `sites` the grid and prefix tokens of
sites that differ. Where a picture is shown clean and attacked, `pictures` says which image shows which picture and
`threats` what was done to it; `relevance` (n, rows, columns) in the first file says what the answers rest on.
n images, H heads, N tokens
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitruvius._errors import RunError
from vitruvius._files import atomic_write_text, save_tensors
from vitruvius.report._readers import natural, read_json, read_tensors

RESERVED = ("images", "relevance")  # names in attention.safetensors that are no sites


@dataclass(frozen=True, kw_only=True)
class SiteMaps:
    """The maps of one site and how its tokens lie on the image."""

    name: str
    maps: np.ndarray  # (n, H, N, N)
    grid: tuple[int, int]
    num_prefix_tokens: int


@dataclass(frozen=True, kw_only=True)
class Examples:
    """A few images, what they show, what the model said, and where it looked."""

    images: np.ndarray  # (n, 3, h, w) uint8
    labels: list[str]
    predictions: list[str]
    sites: list[SiteMaps]
    pictures: list[str] = field(default_factory=list)  # which picture an image shows; empty: each another
    threats: list[str] = field(default_factory=list)  # what was done to an image; empty: nothing
    relevance: np.ndarray | None = None  # (n, rows, columns), what the answers rest on

    def picture(self, place: int) -> str:
        """The name of the picture that the image at `place` shows; its number where it has none."""
        if self.pictures:
            return self.pictures[place]
        return str(place)

    def threat(self, place: int) -> str:
        """What was done to the image at `place`; nothing for a clean one."""
        if self.threats:
            return self.threats[place]
        return ""

    def select(self, rows: Sequence[int]) -> Examples:
        """Only the images at the places `rows`."""
        kept = list(rows)
        relevance = self.relevance
        if relevance is not None:
            relevance = relevance[kept]
        return Examples(
            images=self.images[kept],
            labels=[self.labels[row] for row in kept],
            predictions=[self.predictions[row] for row in kept],
            sites=[replace(site, maps=site.maps[kept]) for site in self.sites],
            pictures=[self.picture(row) for row in kept],
            threats=[self.threat(row) for row in kept],
            relevance=relevance,
        )


def save_examples(
    run: str | Path,
    *,
    images: Tensor,
    maps: Mapping[str, Tensor],
    grid: tuple[int, int],
    num_prefix_tokens: int,
    labels: Sequence[str | int] = (),
    predictions: Sequence[str | int] = (),
    sites: Mapping[str, Mapping[str, Any]] | None = None,
    pictures: Sequence[str] = (),
    threats: Sequence[str] = (),
    relevance: Tensor | None = None,
) -> None:
    """Write the two files of the viewer into a run folder. `run` is that folder.

    images: (n, 1 or 3, h, w), uint8, or floats in [0, 1]. maps: site → (n, H, N, N), N = prefix tokens + rows·columns.
    grid: rows and columns of patches. num_prefix_tokens: tokens before the patches. labels, predictions: one per image.
    sites: for sites that lie otherwise, {site: {"grid": (rows, columns), "num_prefix_tokens": int}}.
    pictures: for each image which picture it shows; images of one name are shown side by side. Default: each another.
    threats: for each image what was done to it, "" for a clean one. Default: all are clean.
    relevance: (n, rows, columns), how much each place matters for the answer. Default: unknown.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise RunError(f"images of examples have shape (n, 1 or 3, height, width); got {tuple(images.shape)}.")
    for name in RESERVED:
        if name in maps:
            raise RunError(f"no site may be called {name!r} in the examples of attention.")
    if images.is_floating_point():
        pixels = (images.float() * 255).round().clamp(0, 255).byte()
    else:
        pixels = images
    facts = {
        "grid": list(grid),
        "num_prefix_tokens": num_prefix_tokens,
        "labels": list(labels),
        "predictions": list(predictions),
        "pictures": list(pictures),
        "threats": list(threats),
        "sites": {site: dict(placement) for site, placement in (sites or {}).items()},
    }
    tensors = {"images": pixels.expand(-1, 3, -1, -1), **{site: tensor.half() for site, tensor in maps.items()}}
    if relevance is not None:
        tensors["relevance"] = relevance.float()
    save_tensors(Path(run) / "attention.safetensors", tensors)
    atomic_write_text(Path(run) / "attention.json", json.dumps(facts, indent=1))


def read_examples(run: Path, remarks: list[str]) -> Examples | None:
    """The examples of a run, or None and a remark."""
    path = run / "attention.safetensors"
    if not path.is_file():
        remarks.append(
            "no attention.safetensors: the attention viewer is left out; `vitruvius report RUN --images 8` makes it."
        )
        return None
    facts = read_json(run / "attention.json", remarks, lost="the attention viewer")
    tensors = read_tensors(path, remarks, lost="the attention viewer is left out")
    images = tensors.pop("images", None)
    relevance = tensors.pop("relevance", None)
    if not facts or images is None:
        return None
    if not _are_pictures(images):
        remarks.append(f"attention.safetensors: images are {images.dtype} {images.shape}, not uint8 (n, 3, h, w).")
        return None
    sites = []
    for name in sorted(tensors, key=natural):
        site = _place(name, facts, tensors[name], len(images), remarks)
        if site is not None:
            sites.append(site)
    if not sites:
        return None
    n = len(images)
    return Examples(
        images=images,
        labels=_texts(facts.get("labels"), n),
        predictions=_texts(facts.get("predictions"), n),
        sites=sites,
        pictures=_texts_if_any(facts.get("pictures"), n),
        threats=_texts_if_any(facts.get("threats"), n),
        relevance=_relevance(relevance, n, remarks),
    )


def _texts_if_any(values: Any, n: int) -> list[str]:
    """One text per image, or none at all."""
    if not isinstance(values, list) or len(values) != n:
        return []
    return _texts(values, n)


def _relevance(values: np.ndarray | None, n: int, remarks: list[str]) -> np.ndarray | None:
    """Maps of relevance, if they are such maps; else a remark."""
    if values is None:
        return None
    if values.ndim != 3 or len(values) != n or 0 in values.shape or not np.isfinite(values).all():
        remarks.append(f"attention.safetensors: relevance has shape {values.shape}, not {n} finite maps; left out.")
        return None
    return values.astype(np.float32)


def _are_pictures(images: np.ndarray) -> bool:
    """Whether an array is uint8 (n, 3, height, width) with at least one image."""
    return images.ndim == 4 and images.shape[1] == 3 and images.dtype == np.uint8 and len(images) > 0


def _place(site: str, facts: dict[str, Any], maps: np.ndarray, n: int, remarks: list[str]) -> SiteMaps | None:
    """Lay the maps of one site on its grid; maps that do not fit are left out with a remark."""
    try:
        own = {**facts, **(facts.get("sites") or {}).get(site, {})}
        rows, columns = (int(size) for size in own["grid"])
        prefix = int(own["num_prefix_tokens"])
    except (AttributeError, KeyError, TypeError, ValueError):
        remarks.append("attention.json: grid and num_prefix_tokens are needed to lay attention over an image.")
        return None
    tokens = prefix + rows * columns
    if not _fits(maps, n, tokens):
        remarks.append(
            f"attention.safetensors: {site} has shape {maps.shape}, not {n} images, heads and finite maps of "
            f"{tokens} × {tokens} tokens; it is left out of the viewer."
        )
        return None
    return SiteMaps(name=site, maps=maps, grid=(rows, columns), num_prefix_tokens=prefix)


def _fits(maps: np.ndarray, n: int, tokens: int) -> bool:
    """Whether these are finite maps of this many tokens for every image."""
    if maps.ndim != 4 or maps.shape[0] != n or maps.shape[2:] != (tokens, tokens):
        return False
    return bool(np.isfinite(maps).all())


def _texts(values: Any, n: int) -> list[str]:
    if isinstance(values, list):
        values = [str(value) for value in values]
    else:
        values = []
    return (values + [""] * n)[:n]
