"""The notebooks run from top to bottom, and are kept with what they put out."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pages import read_notebook
from test_pages import pages_in, run_page

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
NAMES = {"attack_and_harden_a_vit", "what_does_attention_see", "prune_its_attention"}


def test_there_are_three_notebooks_and_the_site_names_them() -> None:
    assert {notebook.stem for notebook in NOTEBOOKS} == NAMES
    named = set(pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert {f"notebooks/{name}.md" for name in NAMES} <= named


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_as_it_ran_from_top_to_bottom_and_begins_with_a_picture(notebook: Path) -> None:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert set(content["metadata"]) == {"kernelspec", "language_info"}
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in output.get("data", {}) for output in cells[1]["outputs"]), "the first cell installs"
    for output in (output for cell in cells for output in cell["outputs"]):
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr"
        data = output.get("data", {"text/plain": output.get("text", [])})
        assert "text/html" in data or len("".join(data["text/plain"]).splitlines()) < 60
    assert notebook.stat().st_size < 600_000


@pytest.mark.parametrize("uploaded", [[], ["vitruvius-0.3.0-py3-none-any.whl"]], ids=["index", "wheel"])
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_installs_the_package_where_it_is_missing(
    notebook: Path, uploaded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Colab."""
    called: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.run", lambda words, **_: called.append(words))
    for name in uploaded:
        (tmp_path / name).touch()
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    source = "".join(next(cell["source"] for cell in cells if cell["cell_type"] == "code"))
    exec(source, {})
    assert called == []  # it is installed here
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    exec(source, {})
    assert called == [[sys.executable, "-m", "pip", "install", "--quiet", *(uploaded or ["vitruvius"])]]


SHORTER = {  # of a cell: what is replaced so that all is over in seconds
    "train.epochs=12": "train.epochs=1",
    "train.epochs=4": "train.epochs=1",
    '"digits/adversarial_fast", [': '"digits/adversarial_fast", ["train.epochs=1", ',
    ", val_num_samples=96": "",
    'DataConfig(dataset="digits"': 'DataConfig(dataset="digits", val_num_samples=64',
    "queries=300": "queries=30",
}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run_in_order(notebook: Path, tmp_path: Path) -> None:
    """With one epoch, and on few digits."""
    blocks = read_notebook(notebook)
    for words, shorter in SHORTER.items():
        blocks = [replace(block, text=block.text.replace(words, shorter)) for block in blocks]
    run_page(notebook, blocks, tmp_path)


def test_what_makes_a_notebook_shorter_is_in_one() -> None:
    text = "".join(block.text for notebook in NOTEBOOKS for block in read_notebook(notebook))
    assert all(words in text for words in SHORTER)


@pytest.mark.long
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run_as_they_stand(notebook: Path, tmp_path: Path) -> None:
    run_page(notebook, read_notebook(notebook), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_jupyter_runs_the_notebook(notebook: Path, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    content = nbformat.read(notebook, as_version=4)
    nbformat.validate(content)
    nbclient.NotebookClient(content, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
