"""The attention viewer: point at a patch of an image and see where each head looks from there, runs side by side.

It takes what `vitruvius.analysis.recording` keeps of one or several models. Maps travel as bytes round(255·√a), which
keeps small attentions apart. n images, H heads, N tokens
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from vitruvius.analysis.recording import MAX_BYTES, Examples, fit
from vitruvius.report.blocks import Block, Note, colour_png, section
from vitruvius.report.run import Run, explain_maps


class Shown(NamedTuple):
    """The examples of one model, and how its panes are called and marked."""

    name: str
    colour: str  # a name of the palette
    examples: Examples


@dataclass(frozen=True, kw_only=True)
class Viewer(Block):
    """The viewer's pictures, and its data for the script: images once, and for each model its views of the pictures."""

    template: ClassVar[str] = "viewer"
    images: Sequence[str]  # addresses
    pictures: Sequence[dict[str, Any]]  # name, label, image: which of the images is shown small
    runs: Sequence[dict[str, Any]]

    @property
    def data(self) -> dict[str, Any]:
        return {"images": self.images, "pictures": self.pictures, "runs": self.runs}


def make_viewer(shown: Sequence[Shown]) -> Viewer:
    """A viewer of models side by side; pictures of one name are shown together, clean before attacked."""
    images: dict[str, int] = {}  # address → place
    pictures: dict[str, dict[str, Any]] = {}  # by name
    runs = []
    for name, colour, examples in shown:
        views = []
        for row, image in enumerate(examples.images):
            place = images.setdefault(colour_png(image), len(images))
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
        relevance = None if examples.relevance is None else _encode_relevance(examples.relevance)
        size = [width, height]
        runs.append(
            {"name": name, "colour": colour, "size": size, "views": views, "relevance": relevance, "sites": sites}
        )
    return Viewer(images=list(images), pictures=list(pictures.values()), runs=runs)


def encode(maps: np.ndarray) -> str:
    """(n, H, N, N) in [0, 1] → base64 of bytes round(255·√a)."""
    levels = (255 * np.sqrt(maps.astype(np.float32).clip(0, 1))).round().astype(np.uint8)
    return base64.b64encode(levels.tobytes()).decode("ascii")


def _encode_relevance(maps: np.ndarray) -> dict[str, Any]:
    """(n, rows, columns) as bytes, stretched from each image's own minimum to its own maximum."""
    low = maps.min((1, 2), keepdims=True)
    height = np.maximum(maps.max((1, 2), keepdims=True) - low, 1e-12)
    levels = (255 * ((maps - low) / height)).round().astype(np.uint8)
    return {"grid": list(maps.shape[1:]), "maps": base64.b64encode(levels.tobytes()).decode("ascii")}


def _caption(label: str, prediction: str) -> str:
    if not prediction:
        return label
    if not label:
        return f"predicted {prediction}"
    return f"{label}, predicted {'right' if prediction == label else prediction}"


@section("viewer", title="Attention viewer", order=60)
def viewer(runs: Sequence[Run]) -> Sequence[Block]:
    """Hover a patch, see each head's attention for that query."""
    with_examples = [(run, run.examples) for run in runs if run.examples is not None]
    if not with_examples:
        return []
    shown = []
    notes = []
    for run, examples in with_examples:
        fitted, sentence = fit(examples, MAX_BYTES // len(with_examples))
        shown.append(Shown(run.name, run.look.name, fitted))
        notes += [f"{run.name}: {sentence}"] if sentence else []
    told = explain_maps([run for run, _ in with_examples])
    return [make_viewer(shown), *(Note(text=text) for text in filter(None, [told, *notes]))]
