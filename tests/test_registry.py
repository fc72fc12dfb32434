"""Names for pieces: dropped into a room, named in `plugins:`, or announced by an installed package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vitruvius._errors import ConfigError, MissingExtra, UnknownName
from vitruvius._registry import Registry, first_line, load_plugins, load_room, require, signature_of

ROOM = """
from vitruvius._registry import Registry, load_room

hats: Registry = Registry("hat")
load_room(__name__, __path__)
"""
HAT = """
from {room} import hats

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


def test_a_file_dropped_into_a_room_registers_itself(place: Path) -> None:
    room = place / "hat_room"
    room.mkdir()
    (room / "__init__.py").write_text(ROOM)
    (room / "bowler.py").write_text(HAT.format(room="hat_room", name="bowler"))
    (room / "_private.py").write_text("raise AssertionError('files with an underscore are not pieces')")
    from hat_room import hats  # type: ignore[import-not-found]

    assert list(hats) == ["bowler"]
    assert "bowler" in hats
    assert hats["bowler"](None).size == 57
    assert hats.describe() == [("bowler", "size=57, colour='grey'", "A hat for the head.")]


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
    monkeypatch.setattr(attentions, "_pieces", dict(attentions._pieces))
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
    with pytest.raises(MissingExtra, match=r"no_such_package is not installed; run: pip install .*\[nlp\]'"):
        require("no_such_package", "nlp")
    assert require("json", "nlp") is sys.modules["json"]


def test_signature_and_first_line_are_read_from_the_piece() -> None:
    def piece(site: object, *, rank: int = 2, share: float) -> None:
        """First.

        Second.
        """

    assert signature_of(piece) == "rank=2, share"
    assert first_line(piece) == "First."
    assert first_line(object()) != "First."


def test_loading_an_empty_room_is_fine(tmp_path: Path) -> None:
    load_room("nowhere", [str(tmp_path)])


@pytest.fixture
def hats() -> Registry:
    """A registry with one piece that takes something and a setting."""
    made: Registry = Registry("hat")

    @made.register("bowler")
    class Bowler:
        def __init__(self, head: str = "", *, size: int = 57) -> None:
            self.head, self.size = head, size

    return made


@pytest.mark.parametrize("spec", ["bowler:size=3", {"use": "bowler", "size": 3}], ids=["text", "mapping"])
def test_text_and_mapping_make_the_same_piece(hats: Registry, spec: object) -> None:
    made = hats.make(spec, "mine", where="wardrobe")
    assert (made.head, made.size) == ("mine", 3)
    assert hats.bind(spec)("yours").head == "yours"


def test_an_object_makes_itself(hats: Registry) -> None:
    mine = hats["bowler"](size=1)
    assert hats.make(mine) is mine
    assert hats.bind(hats["bowler"]) is hats["bowler"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("bowlr", "wardrobe: no hat named 'bowlr'; did you mean 'bowler'"),
        ("bowler:sise=3", "wardrobe: unknown key 'bowler.sise'; did you mean 'size'"),
        ({"use": "bowler", "size": "big"}, "wardrobe: bowler.size = 'big', expected a whole number"),
        ({"size": 3}, "wardrobe: .* does not say which piece to use"),
        (3, "wardrobe: 3 is not a hat; expected a name such as 'bowler'"),
        (None, "wardrobe: None is not a hat"),
    ],
)
def test_a_wrong_spec_says_where_it_was_written_and_what_was_expected(hats: Registry, spec: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hats.make(spec, where="wardrobe")
    with pytest.raises(ValueError, match=words):
        hats.bind(spec, where="wardrobe")
