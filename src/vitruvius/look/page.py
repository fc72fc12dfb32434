"""The page of `look`: one file with all maps in it, which a browser unpacks; it loads nothing from elsewhere.

A map travels as one byte a number, evenly spaced in its logarithm between the lowest and the highest of a head, over
six decades at most (then 3 % from the truth), deflated, in base64. H heads, N queries, M keys
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from vitruvius._style import DARK, HEAT, LIGHT, css_variables
from vitruvius._version import __version__
from vitruvius.analysis.recording import SiteMaps, pool
from vitruvius.look.looking import Layer, Look, View, moved
from vitruvius.look.pictures import as_uint8
from vitruvius.report.blocks import png_link

MAX_NUMBERS = 48_000_000  # in all maps of a page; beyond that, patches are taken together
DECADES = 6  # below the highest number of a head, that a byte tells apart


def render(look: Look | None, *, live: Mapping[str, Any] | None = None) -> str:
    """The page as text.

    look: what is shown; None: nothing yet. live: what a page that a server answers must know.
    """
    title = "Drop a picture" if look is None else look.title
    shown = None if look is None else payload(look)
    data = json.dumps({"shown": shown, "live": live, "heat": list(reversed(HEAT))}).replace("<", "\\u003c")
    parts = {"title": escape(title), "css": _colours() + _read("look.css"), "version": __version__}
    parts |= {"script": _read("look.js"), "data": data}
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _read("look.html"))


def payload(look: Look) -> dict[str, Any]:
    """What the script of the page shows."""
    times = 1
    while sum(_size(layer, times) for view in look.views for layer in view.layers) > MAX_NUMBERS and times < 8:
        times *= 2
    clean = {(view.picture, view.model): view for view in look.views if not view.threat}
    views = [_view(view, clean[view.picture, view.model], times) for view in look.views]
    notes = list(dict.fromkeys(note for view in look.views for note in view.notes))
    if times > 1:
        notes.append(f"{times} × {times} patches are taken together to keep the page small.")
    return {"title": look.title, "views": views, "notes": notes}


def amplified(clean: View, disturbed: View) -> tuple[np.ndarray, float]:
    """The difference of two pictures around grey, (3, h, w) uint8, and the factor that makes it visible."""
    difference = (disturbed.pixels - clean.pixels).float()
    factor = max(1.0, float(int(0.5 / max(float(difference.abs().max()), 1e-6))))
    return as_uint8((0.5 + factor * difference).clamp(0, 1)), factor


def _view(view: View, clean: View, times: int) -> dict[str, Any]:
    shown: dict[str, Any] = {
        **{key: getattr(view, key) for key in ("picture", "model", "threat")},
        "image": png_link(as_uint8(view.pixels)),
        "layers": [_layer(layer, times) for layer in view.layers],
        "answers": [list(answer) for answer in view.answers],
        "rollout": None if view.rollout is None else _map(view.rollout),
        "relevance": {name: _map(map_) for name, map_ in view.relevance.items()},
        "gradients": {name: _map(map_) for name, map_ in view.gradients.items()},
    }
    if view.threat:
        image, factor = amplified(clean, view)
        pairs = zip(clean.layers, view.layers, strict=True)
        shown |= {"difference": png_link(image), "factor": factor, "moved": [moved(*pair) for pair in pairs]}
    return shown


def _layer(layer: Layer, times: int) -> dict[str, Any]:
    maps, grid = layer.packed.numpy(), layer.grid
    if grid is not None and _size(layer, times) < maps.size:
        site = SiteMaps(name=layer.name, maps=maps, grid=grid, num_prefix_tokens=len(layer.prefix))
        for _ in range(times.bit_length() - 1):
            site = pool(site)
        maps, grid = site.maps, site.grid
    codes, low, high = quantise(maps)
    same = {key: getattr(layer, key) for key in ("name", "core", "kind", "prefix", "answering", "window", "shift")}
    numbers = {"low": low, "high": high, "negative": layer.packed.low < 0, "codes": _packed(codes)}
    return {**same, "shape": maps.shape, "grid": grid, **numbers}


def quantise(values: np.ndarray) -> tuple[np.ndarray, list[float], list[float]]:
    """Bytes of maps (W, H, N, M), and for each head the numbers that 1 and 255 stand for; 0 stands for less."""
    high = values.max((0, 2, 3), initial=1e-12)
    low = np.where(values > 0, values, np.inf).min((0, 2, 3))
    low = np.minimum(np.maximum(low, high * np.float32(0.1**DECADES)), high * np.float32(0.999))
    least, most = low[:, None, None], high[:, None, None]
    level = np.log(np.maximum(values, least / 2) / least) / np.log(most / least)  # in (−, 1]
    codes = np.where(level < -1e-6, 0, 1 + np.round(254 * level.clip(0, 1))).astype(np.uint8)
    return codes, low.tolist(), high.tolist()


def _map(values: np.ndarray) -> dict[str, Any]:
    """(rows, columns) of any sign, from its lowest to its highest."""
    low, high = float(values.min()), float(values.max())
    codes = np.round(255 * (values - low) / max(high - low, 1e-12)).astype(np.uint8)
    return {"grid": values.shape, "low": low, "high": high, "codes": _packed(codes)}


def _size(layer: Layer, times: int) -> int:
    """Numbers in a map whose patches are taken together; of a square one over patches only."""
    maps = layer.packed.codes
    if layer.kind != "tokens" or layer.grid is None or maps.shape[-1] != maps.shape[-2] or min(layer.grid) < 4:
        return maps.size
    rows, columns = layer.grid
    coarse = len(layer.prefix) + -(-rows // times) * -(-columns // times)
    return maps.shape[-3] * coarse * coarse


def _packed(codes: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(codes.tobytes(), 6)).decode("ascii")


def _colours() -> str:
    """Both palettes as CSS variables."""
    dark = f":root{{color-scheme:dark;{css_variables(DARK)}}}"
    light = f":root{{color-scheme:light;{css_variables(LIGHT)}}}"
    return f"{light}\n@media screen and (prefers-color-scheme:dark){{{dark}}}\n"


def _read(name: str) -> str:
    return (files("vitruvius.look") / name).read_text("utf-8")
