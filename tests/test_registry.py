"""Names for pieces: dropped into a package, named in `plugins:`, or announced by an installed package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitruvius
from vitruvius._errors import ConfigError, MissingExtra, UnknownName
from vitruvius._registry import Registry, first_line, load_plugins, require, signature_of
from vitruvius.listing import KINDS
from vitruvius.recipe_keys import PIECES, load

PACKAGE = """
from vitruvius._registry import Registry

hats: Registry = Registry("hat", homes=["hat_package"])
"""
HAT = """
from {package} import hats

@hats.register("{name}")
class Hat:
    \"\"\"A hat for the head.

    More about it.
    \"\"\"

    def __init__(self, head, *, size: int = 57, colour: str = "grey", generator=None):
        self.size = size
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the Python path; what is imported from it is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_file_dropped_into_a_package_is_found_whatever_was_imported_before(place: Path) -> None:
    package = place / "hat_package"
    package.mkdir()
    (package / "__init__.py").write_text(PACKAGE)
    (package / "bowler.py").write_text(HAT.format(package="hat_package", name="bowler"))
    (package / "boater.py").write_text(HAT.format(package="hat_package", name="straw"))
    (package / "_private.py").write_text("raise AssertionError('files with an underscore are not pieces')")
    from hat_package import hats  # type: ignore[import-not-found]

    assert hats["bowler"](None).size == 57
    assert "hat_package.boater" not in sys.modules  # only the file of that name was imported
    assert "straw" in hats
    assert "_private" not in hats
    assert list(hats) == ["bowler", "straw"]
    assert hats.describe()[0] == ("bowler", "size=57, colour='grey'", "A hat for the head.")


def test_a_plugin_cannot_take_a_name_that_the_package_has_but_has_not_imported_yet(place: Path) -> None:
    package = place / "cap_package"
    package.mkdir()
    (package / "__init__.py").write_text(PACKAGE.replace("hat", "cap"))
    (package / "flat.py").write_text(HAT.replace("hats", "caps").format(package="cap_package", name="flat"))
    from cap_package import caps  # type: ignore[import-not-found]

    with pytest.raises(ConfigError, match=r"'flat' is already registered by cap_package\.flat\.Hat"):
        caps.register("flat")(Path)


FRESH = """
import importlib, json, os, sys
import torch, timm
import matplotlib.figure, pydantic, rich.console, rich.progress, scipy.stats, torchvision.transforms  # once for all

for home, names in json.loads(sys.stdin.read()).items():
    if os.fork() == 0:
        module, _, name = home.partition(":")
        registry = getattr(importlib.import_module(f"vitruvius.{module}"), name)
        missing = [name for name in names if name not in registry]
        print(home, missing or "has all", flush=True)
        os._exit(0)
    os.wait()
"""


def test_every_registry_has_all_its_pieces_in_a_fresh_process() -> None:
    homes = {*(home for home, _ in KINDS.values()), *PIECES.values(), "init.filters:filters", "report.blocks:sections"}
    text = "".join(file.read_text(encoding="utf-8") for file in Path(vitruvius.__file__).parent.rglob("*.py"))
    names = {}
    for home in sorted(home for home in homes if isinstance(load(home), Registry)):
        names[home] = re.findall(rf"^@{home.partition(':')[2]}\.register\(\"([^\"]+)\"", text, re.MULTILINE)
    assert sum(map(bool, names.values())) > 15
    done = subprocess.run(
        [sys.executable, "-c", FRESH], input=json.dumps(names), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [f"{home} has all" for home in names]


def test_a_plugin_module_registers_its_pieces_in_a_room_of_the_package(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vitruvius.attention import attentions

    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "my_lab_attention.py").write_text(
        "from vitruvius.attention import attentions\n"
        "from vitruvius.attention.softmax import Softmax\n"
        '@attentions.register("my_lab")\n'
        "class Mine(Softmax):\n"
        '    """Softmax under another name."""\n'
    )
    monkeypatch.chdir(folder)  # the current folder is searched, and only while plugins are loaded
    path = list(sys.path)
    monkeypatch.setattr(attentions, "_pieces", {name: attentions[name] for name in attentions})
    load_plugins(["my_lab_attention"])
    load_plugins(["my_lab_attention"])
    assert "my_lab" in attentions
    assert sys.path == path


def test_an_installed_package_announces_pieces_by_entry_points(place: Path) -> None:
    (place / "hat_shop.py").write_text("class Top:\n    '''Tall.'''\n    def __init__(self, head, *, height=20): ...\n")
    info = place / "hat_shop-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hat-shop\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vitruvius.hats]\ntop = hat_shop:Top\n")
    hats: Registry[type] = Registry("hat")
    assert "hat_shop" not in sys.modules
    assert hats.describe() == [("top", "height=20", "Tall.")]
    with pytest.raises(ConfigError, match=r"hat 'top' is already registered by hat_shop.Top"):
        hats.register("top")(Path)


def test_an_entry_point_that_fails_is_named(place: Path) -> None:
    (place / "broken_shop.py").write_text("import a_package_that_is_not_there\n")
    info = place / "broken_shop-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-shop\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vitruvius.caps]\nflat = broken_shop:Flat\n")
    caps: Registry[type] = Registry("cap")
    for _ in range(2):  # not only the first time
        with pytest.raises(ConfigError, match="entry point 'flat' = broken_shop:Flat needs a module named 'a_package"):
            list(caps)


def test_a_second_piece_of_a_name_is_refused_and_the_first_stays() -> None:
    hats: Registry[type] = Registry("hat")
    hats.register("bowler")(Path)
    with pytest.raises(ConfigError, match=r"hat 'bowler' is already registered by .*Path; .*Registry needs another"):
        hats.register("bowler")(Registry)
    assert hats["bowler"] is Path
    hats.register("bowler")(Path)  # the same piece again, as when a module is imported anew


def test_an_unknown_name_is_answered_with_the_nearest_and_all() -> None:
    hats: Registry[type] = Registry("hat")
    hats.register("bowler")(Path)
    hats.register("beret")(Registry)
    with pytest.raises(UnknownName, match=r"^no hat named 'bowlr'; did you mean 'bowler'\? Known: beret, bowler\.$"):
        hats["bowlr"]
    with pytest.raises(KeyError):
        hats["x"]
    assert len(hats) == 2


def test_a_plugin_that_is_not_there_or_breaks_is_one_clear_error(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"plugins: 'no_such_lab' needs a module named 'no_such_lab'"):
        load_plugins(["no_such_lab"])
    (place / "broken_lab.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=r"plugins: 'broken_lab' fails when it is imported: ZeroDivisionError"):
        load_plugins(["broken_lab"])


def test_an_optional_package_that_is_missing_says_what_to_install() -> None:
    with pytest.raises(MissingExtra, match=r"no_such_package is not installed; run: pip install .*\[hf\]'"):
        require("no_such_package", "hf")
    assert require("json", "hf") is sys.modules["json"]


def test_signature_and_first_line_are_read_from_the_piece() -> None:
    def piece(site: object, *, rank: int = 2, share: float) -> None:
        """First.

        Second.
        """

    assert signature_of(piece) == "rank=2, share"
    assert first_line(piece) == "First."
    assert first_line(object()) != "First."
