"""The page holds all maps, is small, loads nothing from elsewhere, and trusts no name."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitruvius
from families import randomise, vit
from vitruvius.cli import main
from vitruvius.look import page, serving
from vitruvius.look.looking import Layer, Look, Packed, View
from vitruvius.look.page import payload, quantise, render
from vitruvius.request import open_request


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def unpacked(layer: dict[str, Any]) -> np.ndarray:
    """As the page's script reads it."""
    codes = np.frombuffer(zlib.decompress(base64.b64decode(layer["codes"])), np.uint8).reshape(layer["shape"])
    low, high = (np.array(layer[end], dtype=np.float64)[:, None, None] for end in ("low", "high"))
    return np.where(codes == 0, 0, low * (high / low) ** ((codes - 1.0) / 254))


@pytest.fixture
def look() -> Any:
    torch.manual_seed(0)
    model = vit()()
    randomise(model, 0.3)
    return vitruvius.look(model.eval(), torch.rand(3, 32, 32), threat="fgsm:eps=4/255")


def test_numbers_are_kept_to_three_percent(look: Any) -> None:
    shown = data_of(render(look))["shown"]["views"]
    for view, told in zip(look.views, shown, strict=True):
        for layer, packed in zip(view.layers, told["layers"], strict=True):
            expected = layer.packed.numpy()
            found = unpacked(packed)
            seen = expected > expected.max((0, 2, 3))[:, None, None] * 1.01e-6
            assert np.allclose(found[seen], expected[seen], rtol=0.03)
            assert (found[~seen] <= 1.1e-6).all()


def test_maps_that_are_almost_uniform_keep_their_differences() -> None:
    values = (1 + 0.001 * np.random.default_rng(0).random((1, 2, 9, 9))).astype(np.float32) / 9
    codes, low, high = quantise(values)
    assert len(np.unique(codes)) > 50
    assert low[0] == pytest.approx(values[0, 0].min(), rel=1e-3)
    assert high[1] == pytest.approx(values[0, 1].max())
    for constant in (np.full((1, 1, 3, 3), 0.25, np.float32), np.zeros((1, 1, 3, 3), np.float32)):
        assert np.isfinite(quantise(constant)[0]).all()


def test_the_difference_is_amplified_and_its_factor_said(look: Any) -> None:
    told = payload(look)["views"][1]
    assert (told["factor"], len(told["moved"])) == (31, 2)
    assert told["difference"].startswith("data:image/png;base64,")


def test_a_vit_small_with_257_tokens_fits_into_six_megabytes() -> None:
    """Maps with the spread of a trained model's, whose logarithms have a standard deviation of about 1.5."""
    maps = torch.softmax(1.5 * torch.randn(1, 6, 257, 257, generator=torch.Generator().manual_seed(0)), -1)
    layer = Layer(name="attn", core="softmax", kind="tokens", packed=Packed.of(maps), grid=(16, 16), prefix=("class",))
    pixels = torch.rand(3, 224, 224)
    view = View(picture="noise", model="vit", threat="", pixels=pixels, layers=(layer,) * 12, answers=())
    html = render(Look(title="vit", views=(view,)))
    assert 4e6 < len(html.encode()) <= 6e6
    assert [layer["shape"] for layer in data_of(html)["shown"]["views"][0]["layers"]] == [[1, 6, 257, 257]] * 12


def test_many_large_maps_are_made_coarser_and_the_page_says_so(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_NUMBERS", 1000)
    told = payload(look)
    layer = told["views"][0]["layers"][0]
    assert layer["grid"] == (2, 2)
    assert layer["shape"] == (1, 2, 5, 5)
    assert np.allclose(unpacked(layer).sum(-1), 1, atol=0.05)
    assert any("taken together" in note for note in told["notes"])


def test_the_page_loads_nothing_and_trusts_no_name(tmp_path: Path) -> None:
    name = "</script><img src=x onerror=alert(1)>{{data}}.png".replace("/", "∕")
    Image.new("RGB", (16, 16)).save(tmp_path / name)
    html = render(vitruvius.look("vitruvius/vit_digits", tmp_path / name))
    assert "<img" not in html
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", html)
    assert "default-src 'none'" in html
    assert html.count("<script") == 2
    assert data_of(html)["shown"]["views"][0]["picture"] == name


def test_the_command_ends_with_classes_and_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["look", "vitruvius/vit_digits", "--data", "digits", "--images", "1", "--threat", "fgsm:eps=8/255"]
    assert main([*words, "--attention", "rpc:iterations=2", "--png", "figures"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert sum("%" in line for line in out) == 4, "two attentions, clean and attacked"
    assert "look.html" in out
    assert any(line.endswith("-overview.pdf") for line in out)
    assert len(data_of(Path("look.html").read_text("utf-8"))["shown"]["views"]) == 4


def test_images_are_those_of_every_other_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["look", "vitruvius/vit_digits", "--data", "digits", "--images", "3"]) == 0
    shown = [view["picture"] for view in data_of(Path("look.html").read_text("utf-8"))["shown"]["views"]]
    with open_request("vitruvius/vit_digits", ["data.dataset=digits"], images=3, alone=True) as request:
        assert shown == [f"{request.loader.name} {n}" for *_, ids in request.loader.with_ids() for n in ids.tolist()]


def test_a_live_page_begins_with_the_images_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(serving, "serve", lambda variant, pictures, **_: served.extend(pictures))
    assert main(["look", "vitruvius/vit_digits", "--serve", "--data", "digits", "--images", "2"]) == 0
    assert [tuple(picture.pixels.shape) for picture in served] == [(3, 8, 8)] * 2
