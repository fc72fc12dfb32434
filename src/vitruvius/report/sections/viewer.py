"""The attention viewer: point at a patch of an image and see where each head looks from there, runs side by side.

It takes what `vitruvius.analysis.recording` keeps of one or several models. Maps travel as bytes round(255·√a), which
keeps small attentions apart. n images, H heads, N tokens
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitruvius.analysis.recording import MAX_BYTES, Examples, fit
from vitruvius.report.blocks import Block, Note, png_link, section
from vitruvius.report.run import Run, explain_maps


@dataclass(frozen=True, kw_only=True)
class Viewer(Block):
    """The viewer's pictures, and its data for the script: images once, and for each model its views of the pictures."""

    images: Sequence[str]  # addresses
    pictures: Sequence[dict[str, Any]]  # name, label, image: which of the images is shown small
    runs: Sequence[dict[str, Any]]

    @property
    def data(self) -> dict[str, Any]:
        return {"images": self.images, "pictures": self.pictures, "runs": self.runs}


def make_viewer(shown: Sequence[tuple[Run, Examples]]) -> Viewer:
    """A viewer of runs side by side; pictures of one name are shown together, clean before attacked."""
    images: dict[str, int] = {}  # address → place
    pictures: dict[str, dict[str, Any]] = {}  # by name
    told: list[dict[str, Any]] = []
    for run, examples in shown:
        views = []
        for row, image in enumerate(examples.images):
            place = images.setdefault(png_link(image), len(images))
            picture, label = examples.pictures[row], examples.labels[row]
            pictures.setdefault(picture, {"name": picture, "label": label, "image": place})
            caption = _caption(label, examples.predictions[row])
            views.append({"picture": picture, "image": place, "threat": examples.threats[row], "caption": caption})
        sites = [
            {
                "name": site.name,
                "heads": site.maps.shape[1],
                "grid": list(site.grid),
                "prefix": site.num_prefix_tokens,
                "maps": encode(site.maps),
            }
            for site in examples.sites
        ]
        height, width = examples.images.shape[2:]
        relevance = None
        if (maps := examples.relevance) is not None:  # (n, rows, columns), from each image's minimum to its maximum
            low = maps.min((1, 2), keepdims=True)
            stretched = (maps - low) / np.maximum(maps.max((1, 2), keepdims=True) - low, 1e-12)
            relevance = {"grid": list(maps.shape[1:]), "maps": _in_bytes(stretched)}
        known = {"name": run.name, "colour": run.look.name, "size": [width, height], "views": views}
        told.append({**known, "relevance": relevance, "sites": sites})
    return Viewer(images=list(images), pictures=list(pictures.values()), runs=told)


def encode(maps: np.ndarray) -> str:
    """(n, H, N, N) in [0, 1] → base64 of bytes round(255·√a)."""
    return _in_bytes(np.sqrt(maps.astype(np.float32).clip(0, 1)))


def _in_bytes(values: np.ndarray) -> str:
    return base64.b64encode((255 * values).round().astype(np.uint8).tobytes()).decode("ascii")


def _caption(label: str, prediction: str) -> str:
    if not prediction or not label:
        return f"predicted {prediction}" if prediction else label
    return f"{label}, predicted {'right' if prediction == label else prediction}"


@section("viewer", title="Attention viewer", order=60)
def viewer(runs: Sequence[Run]) -> Sequence[Block]:
    """Hover a patch, see each head's attention for that query."""
    count = sum(run.examples is not None for run in runs)
    fitted = [(run, *fit(run.examples, MAX_BYTES // count)) for run in runs if run.examples is not None]
    if not fitted:
        return []
    texts = [f"{run.name}: {sentence}" for run, _, sentence in fitted if sentence]
    texts = [explain_maps([run for run, *_ in fitted]), *texts]
    viewed = make_viewer([(run, examples) for run, examples, _ in fitted])
    return [viewed, *(Note(text=text) for text in filter(None, texts))]
