"""Names that are imported when somebody uses them."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitruvius

SOURCE = Path(vitruvius.__file__).parent


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package `window` that exports `Pane` of a module and a function named like its module."""
    folder = tmp_path / "window"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\nfrom vitruvius._lazy import exports\n"
        "if TYPE_CHECKING:\n    from window.glass import Pane as Pane\n    from window.frame import frame as frame\n"
        "else:\n    __getattr__, __dir__, __all__ = exports(__name__)\n"
    )
    (folder / "glass.py").write_text("class Pane: ...\n")
    (folder / "frame.py").write_text(
        "import gc\nCOLLECTED = gc.isenabled()\ndef frame(): return 'oak'\ndef other(): ...\n"
    )
    (folder / "broken.py").write_text("import not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "window"
    for name in [name for name in sys.modules if name.split(".")[0] == "window"]:
        del sys.modules[name]


def test_names_and_public_modules_come_when_they_are_used(package: str) -> None:
    window = importlib.import_module(package)
    assert dir(window) == window.__all__ == ["Pane", "frame"]
    assert "window.glass" not in sys.modules
    assert window.Pane is sys.modules["window.glass"].Pane
    assert window.glass is sys.modules["window.glass"]


@pytest.mark.parametrize("before", ["window", "window.frame"])
def test_an_export_wins_over_the_module_of_its_name_whatever_was_imported_before(package: str, before: str) -> None:
    importlib.import_module(before)
    window = sys.modules[package]
    assert window.frame() == "oak"
    importlib.import_module("window.frame")
    assert window.frame() == "oak"
    assert importlib.import_module("window.frame").other() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_a_module_is_imported(package: str, enabled: bool) -> None:
    window = importlib.import_module(package)
    was_on = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert window.frame() == "oak"
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_on else gc.disable)()
    assert not importlib.import_module("window.frame").COLLECTED


def test_unknown_names_are_attribute_errors_and_faults_of_modules_are_seen(package: str) -> None:
    window = importlib.import_module(package)
    for name in ("pane", "_glass"):
        with pytest.raises(AttributeError, match=f"module 'window' has no attribute '{name}'"):
            getattr(window, name)
    with pytest.raises(ModuleNotFoundError, match="not_installed"):
        window.broken  # noqa: B018


def windows() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("__init__.py")) if "exports(" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", windows(), ids=lambda path: path.parent.name)
def test_every_exported_name_is_there(path: Path) -> None:
    package = importlib.import_module(".".join(["vitruvius", *path.parent.relative_to(SOURCE).parts]))
    assert package.__all__
    for name in package.__all__:
        getattr(package, name)
