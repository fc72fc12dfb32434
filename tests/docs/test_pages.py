"""Every Python block of the documentation runs, page by page, in a folder of its own."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import pytest

import vitruvius.cli  # noqa: F401 (so that no page waits for it)

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    if "```python" in page.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_on_a_page_runs(page: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    child = multiprocessing.get_context("fork").Process(target=read_page, args=(script,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads at a fork
        child.start()
    child.join()
    assert child.exitcode == 0, (tmp_path / "said").read_text(encoding="utf-8")[-3000:]


def read_page(script: Path) -> None:
    """Run a page in its folder, in a process that has already imported PyTorch."""
    os.chdir(script.parent)
    warnings.resetwarnings()
    with Path("said").open("w", encoding="utf-8") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        try:
            runpy.run_path(str(script), run_name="__main__")
        except BaseException:
            said.write(traceback.format_exc())
            said.flush()
            os._exit(1)
    os._exit(0)


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)\)", prose):
            assert (page.parent / target).exists(), f"{page.name} points to {target}, which is not there"


def test_the_plugin_of_the_docs_trains_on_digits(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "vitruvius", "train", "locality.yaml", "--quiet", f"out={tmp_path / 'run'}",
        "train.epochs=1", "train.warmup_epochs=0", "data.train_num_samples=320", "model.kwargs.depth=1",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT / "docs" / "plugin", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "best.safetensors").exists()
