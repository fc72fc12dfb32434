"""A run folder that somebody else has made runs none of its Python, unless the user says so."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitruvius
from small_run import small_run
from vitruvius import _registry
from vitruvius._errors import ConfigError
from vitruvius.cli import main
from vitruvius.cli.compress import compress
from vitruvius.targets import open_target

NAME = "came_with_the_run"


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose config names a module, which lies in the current folder and leaves a trace when it is imported."""
    monkeypatch.chdir(tmp_path)
    run = small_run(tmp_path / "run", "train.epochs=1")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("plugins: []", f"plugins: [{NAME}]"))
    assert NAME in config.read_text()
    (tmp_path / f"{NAME}.py").write_text("from pathlib import Path\nPath('trace').touch()\n")
    yield run
    sys.modules.pop(NAME, None)


VERBS = {
    "evaluate": ["evaluate", "run"],
    "attack": ["attack", "run", "--threat", "fgsm:eps=8/255", "--out", "x.safetensors"],
    "analyse": ["analyse", "run", "norms"],
    "study": ["study", "eps-sweep", "run"],
    "maps": ["maps", "run"],
    "cycles": ["cycles", "run"],
    "export": ["export", "run"],
    "compress": ["compress", "run"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_imports_what_a_foreign_run_names(verb: str, foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().rglob("*"))
    assert main(VERBS[verb]) == 1
    assert sorted(Path().rglob("*")) == before
    assert NAME not in sys.modules
    said = capsys.readouterr().err
    assert f"run/config.yaml names the plugin '{NAME}'" in said
    assert "--trust-plugins" in said


def test_a_page_about_a_foreign_run_imports_nothing(foreign: Path) -> None:
    assert main(["report", "run", "--out", "page.html"]) == 0  # it reads files and opens no model
    assert not Path("trace").exists()


@pytest.mark.parametrize("said", [["--trust-plugins"], [f"plugins=[{NAME}]"]])
def test_who_says_so_runs_it(said: list[str], foreign: Path) -> None:
    assert main(["evaluate", "run", "--images", "8", *said]) == 0
    assert Path("trace").exists()


def test_python_says_so_by_an_argument_or_by_importing_it(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for refused in (vitruvius.load_model, open_target, compress):
        with pytest.raises(ConfigError, match="trust_plugins=True"):
            refused("run")
    assert not Path("trace").exists()
    vitruvius.load_model("run", trust_plugins=True)
    assert Path("trace").exists()
    open_target("run")  # it is imported by now


def test_installed_plugins_are_found_where_they_are_installed(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("mine", f"{NAME}:Mine", "vitruvius.attacks")
    offered = importlib.metadata.EntryPoints((point,))
    monkeypatch.setattr(_registry, "entry_points", lambda **wanted: offered.select(**wanted))
    monkeypatch.syspath_prepend(str(Path.cwd()))
    with pytest.raises(ConfigError, match="neither in this folder nor on the Python path"):
        open_target("run")  # a file of that name in the current folder is not the installed module
    assert not Path("trace").exists()
    (installed := Path("site")).mkdir()
    (installed / f"{NAME}.py").write_text("")
    monkeypatch.syspath_prepend(str(installed.resolve()))
    open_target("run")
    assert not Path("trace").exists()


@pytest.mark.parametrize("named", ["os.path.evil", "5", "[5]"])
def test_plugins_that_are_no_list_of_names_are_refused(named: str, foreign: Path) -> None:
    config = foreign / "config.yaml"
    config.write_text(config.read_text().replace(f"[{NAME}]", named).replace(f"- {NAME}", named))
    with pytest.raises(ConfigError, match="is not a list of modules"):
        open_target("run", trust_plugins=True)
