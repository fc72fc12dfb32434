"""The look: contrast, colours that the colour-blind tell apart, files that are what their names say."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

from vitruvius import _style
from vitruvius._errors import ConfigError
from vitruvius._style import DARK, HEAT, LIGHT, figure_style, heat, new_axes, save_figure, series

# Machado, Oliveira & Fernandes 2009, severity 1.0, on linear RGB
BLINDNESS = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def linear(colour: str) -> np.ndarray:
    rgb = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb.clip(0, 1)
    f = np.cbrt(np.maximum(xyz / [0.9505, 1.0, 1.089], 0.008856))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_texts_and_lines_stand_out_from_paper_and_surface(palette: dict[str, str]) -> None:
    for ground in ("paper", "surface"):
        for text in ("ink", "quiet", "accent"):
            assert contrast(palette[text], palette[ground]) >= 4.5, (text, ground)
        for place in range(6):
            assert contrast(palette[f"series-{place}"], palette[ground]) >= 3, (place, ground)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("blindness", BLINDNESS)
def test_the_colour_blind_tell_runs_apart(palette: dict[str, str], blindness: str) -> None:
    seen = [lab(np.asarray(BLINDNESS[blindness]) @ linear(palette[f"series-{place}"])) for place in range(6)]
    distances = {(a, b): float(np.linalg.norm(seen[a] - seen[b])) for a, b in itertools.combinations(range(6), 2)}
    assert min(distances.values()) > 18, distances


def test_light_and_dark_name_the_same_colours_and_light_ones_differ() -> None:
    assert list(LIGHT) == list(DARK)
    assert len(set(LIGHT.values())) == len(LIGHT)  # drawings are recoloured by value


def test_attention_gets_darker_all_the_way() -> None:
    lightness = [luminance(colour) for colour in HEAT]
    assert lightness == sorted(lightness, reverse=True)
    assert matplotlib.colors.to_hex(heat()(0.0)) == HEAT[0]
    assert matplotlib.colors.to_hex(heat()(1.0)) == HEAT[-1]


def test_twelve_runs_look_different() -> None:
    assert len({series(index) for index in range(12)}) == 12


def drawn() -> object:
    with figure_style():
        figure, axes = new_axes()
        axes.plot([0, 1], [1, 0], label="$not mathematics_{")
        axes.legend()
    return figure


def test_figures_are_saved_as_png_and_pdf_and_the_same_every_time(tmp_path: Path) -> None:
    paths = save_figure(drawn(), tmp_path / "new" / "fig")
    assert [path.name for path in paths] == ["fig.png", "fig.pdf"]
    with Image.open(paths[0]) as picture:
        assert picture.size == (1080, 620)
    assert paths[1].read_bytes().startswith(b"%PDF")
    again = save_figure(drawn(), tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths]


def test_letters_of_a_pdf_are_a_truetype_font_that_journals_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tests save with fonts that are quicker to embed (conftest.py): the package's own setting is read here."""
    own = runpy.run_path(_style.__file__)["SETTINGS"]["pdf.fonttype"]
    monkeypatch.setitem(_style.SETTINGS, "pdf.fonttype", own)
    (path,) = save_figure(drawn(), tmp_path / "fig.pdf")
    assert b"/FontFile2" in path.read_bytes()


def test_a_suffix_chooses_the_format_and_other_ones_are_refused(tmp_path: Path) -> None:
    (path,) = save_figure(drawn(), tmp_path / "fig.svg")
    assert "<svg" in path.read_text()
    assert "$not mathematics_{" in path.read_text()
    with pytest.raises(ConfigError, match=r"saved as .png, .pdf or .svg, not '.bmp'"):
        save_figure(drawn(), tmp_path / "fig.bmp")


def test_the_style_leaves_matplotlib_as_it_was() -> None:
    before = {key: value for key, value in matplotlib.rcParams.items() if key != "backend"}
    drawn()
    assert {key: matplotlib.rcParams[key] for key in before} == before
