"""Both pages in a real browser: what is chosen changes what is seen, and nothing complains or leaves the machine.

Needs Chromium and the Python package playwright; the check of accessibility needs axe-core, whose axe.min.js the
environment variable AXE_CORE names.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_pictures import photograph
from test_serving import TOKEN, Server

import vitruvius
from families import randomise, vit
from vitruvius.look.looking import Variant
from vitruvius.models import PixelModel, create_model

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WIDTHS = (1280, 390)
AXE = os.environ.get("AXE_CORE")

if CHROMIUM is None:
    pytest.skip("no chromium installed: the page is not tried in a browser", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: the page is not tried in a browser")


class Watched:
    """A page of a browser of its own, whose complaints and requests are kept."""

    def __init__(self, folder: Path, width: int, scheme: str, browsers: Any) -> None:
        self.context = browsers.chromium.launch_persistent_context(
            str(folder / f"profile-{width}-{scheme}"),
            executable_path=CHROMIUM,
            args=list(FLAGS),
            viewport={"width": width, "height": 844},
            color_scheme=scheme,
        )
        self.page = self.context.pages[0]
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def ready(self, times: int = 1) -> None:
        """Wait until the page has shown so many answers."""
        self.until(f"Number(document.documentElement.dataset.ready ?? 0) >= {times}")

    def until(self, expression: str) -> None:
        """Ask again and again, from outside: the page itself may not evaluate anything."""
        ends = time.monotonic() + 60
        while not self.page.evaluate(expression):
            assert time.monotonic() < ends, expression
            self.page.wait_for_timeout(20)

    def drawings(self) -> list[str]:
        found: list[str] = self.page.evaluate(
            "[...document.querySelectorAll('.pane canvas')].map((c) => c.toDataURL())"
        )
        return found

    def answers(self) -> list[str]:
        found: list[str] = self.page.locator(".answers").all_inner_texts()
        return found

    def check(self, *origins: str) -> None:
        """No complaint, nothing from elsewhere, nothing wider than the window, nothing that keeps people out."""
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith((*origins, "data:"))] == []
        assert self.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        if AXE:
            self.page.evaluate(Path(AXE).read_text("utf-8"))
            violations = self.page.evaluate("axe.run().then((found) => found.violations)")
            told = [f"{one['id']}: {[node['html'][:120] for node in one['nodes'][:3]]}" for one in violations]
            assert told == []


@pytest.fixture(scope="module")
def browsers() -> Iterator[Any]:
    with playwright.sync_playwright() as made:
        yield made


@pytest.fixture(scope="module")
def model() -> PixelModel:
    torch.manual_seed(0)
    made = vit()()
    randomise(made, 0.3)
    return PixelModel(made).eval()


@pytest.fixture(scope="module")
def static(model: PixelModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pictures = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    found = vitruvius.look(model, pictures, threat="pgd:eps=8/255,steps=3", attention="rpc:iterations=2")
    return found.save(tmp_path_factory.mktemp("static") / "look.html")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_static_page_follows_what_is_chosen(
    width: int, scheme: str, static: Path, tmp_path: Path, browsers: Any
) -> None:
    watched = Watched(tmp_path, width, scheme, browsers)
    page = watched.page
    page.goto(static.as_uri())
    watched.ready()
    seen = [watched.drawings()]
    assert len(seen[0]) == 6, "two attentions: clean, attacked, what changed"

    def changes(what: str) -> None:
        now = watched.drawings()
        assert now not in seen, what
        seen.append(now)

    page.locator(".pane canvas").first.click(position={"x": 5, "y": 5})
    changes("a patch")
    assert "patch (1, 1)" in page.locator("#status").inner_text()
    page.locator(".pane canvas").first.press("ArrowRight")
    changes("the next patch")
    page.select_option("#head", "1")
    changes("a head")
    page.locator("#layer").fill("0")
    changes("a layer")
    page.locator("#opacity").fill("20")
    changes("the overlay")
    page.select_option("#method", "rollout")
    changes("rollout")
    page.select_option("#method", "relevance")
    changes("relevance")
    page.select_option("#class", index=2)
    changes("another class")
    page.select_option("#method", "attention")
    page.locator(".all button").nth(3).click()
    changes("a head of all")
    classes = watched.answers()
    page.select_option("#picture", "image 1")
    watched.until(f"document.querySelector('.answers').innerText !== {json.dumps(classes[0])}")
    changes("another picture")
    assert page.locator("#moved").is_visible()
    watched.check(static.as_uri())
    watched.context.close()


def test_a_drawing_shows_the_map_itself(static: Path, model: PixelModel, tmp_path: Path, browsers: Any) -> None:
    """Pixels of the canvas against the numbers of `look`: the brightest patch is the most attended."""
    pictures = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    layer = vitruvius.look(model, pictures[0]).views[0].layers[0]
    watched = Watched(tmp_path, 1280, "light", browsers)
    watched.page.goto(static.as_uri())
    watched.ready()
    watched.page.locator("#opacity").fill("100")
    watched.page.locator("#layer").fill("0")
    script = """([row, column]) => { const c = document.querySelector('.pane canvas');
      const [x, y] = [(column + 0.5) * c.width / 4, (row + 0.5) * c.height / 4];
      return [...c.getContext('2d').getImageData(x, y, 1, 1).data]; }"""
    light = [sum(watched.page.evaluate(script, [row, column])[:3]) for row in range(4) for column in range(4)]
    map_ = layer.maps.mean(0)[0, 1:]
    order = [int(place) for place in map_.argsort()]
    assert light.index(max(light)) in order[-2:]
    assert light[order[0]] < light[order[8]] < light[order[-1]]
    watched.context.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_live_page_takes_a_picture_and_follows_the_slider(width: int, tmp_path: Path, browsers: Any) -> None:
    picture = tmp_path / "dog.jpg"
    picture.write_bytes(photograph())
    (tmp_path / "text.jpg").write_text("no picture")
    with Server(Variant("digits", create_model("vitruvius/vit_digits"), ())) as server:
        address = f"http://127.0.0.1:{server.port}/"
        watched = Watched(tmp_path, width, "light", browsers)
        page = watched.page
        page.goto(f"{address}{TOKEN}/")
        drop(page, picture)
        watched.ready(1)
        clean = watched.answers()
        assert len(watched.drawings()) == 1
        watched.check(address)
        page.select_option("#threat", "pgd")
        watched.ready(2)
        weak = watched.answers(), watched.drawings()
        page.locator("#eps").fill("16")
        watched.ready(3)
        strong = watched.answers(), watched.drawings()
        assert weak[0][0] == strong[0][0] == clean[0]
        assert weak[0][1] != strong[0][1], "other probabilities, or another class"
        assert weak[1][1] != strong[1][1], "another map"
        page.select_option("#attention", "rpc")
        watched.ready(4)
        page.locator("#sparsity").fill("50")
        watched.ready(5)
        assert len(watched.drawings()) == 9, "as it is, rpc and pruned: clean, attacked, what changed"
        watched.check(address)
        page.set_input_files("#file", tmp_path / "text.jpg")
        watched.until("document.getElementById('said').textContent.includes('not a picture')")
        complaints = [text for text in watched.complaints if "400" not in text]  # which the browser notes by itself
        assert complaints == []
        watched.context.close()


@pytest.mark.skipif(AXE is None, reason="AXE_CORE does not name axe.min.js: accessibility is not checked")
def test_axe_finds_what_is_wrong(tmp_path: Path, browsers: Any) -> None:
    watched = Watched(tmp_path, 1280, "light", browsers)
    watched.page.set_content("<html><body><img src='data:,'><input></body></html>")
    with pytest.raises(AssertionError, match="document-title"):
        watched.check("about:")
    watched.context.close()


def drop(page: Any, file: Path) -> None:
    """As somebody drags a file into the page."""
    script = """([bytes, name]) => { const data = new DataTransfer();
      data.items.add(new File([new Uint8Array(bytes)], name, { type: 'image/jpeg' }));
      for (const kind of ['dragover', 'drop'])
        document.getElementById('drop').dispatchEvent(
          new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true })); }"""
    page.evaluate(script, [list(file.read_bytes()), file.name])
