"""A release one can install: wheel and sdist pass twine's check, and the wheel works outside the checkout."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from vitruvius import __version__
from vitruvius._yaml import read_yaml

ROOT = Path(__file__).parents[1]
NEEDED = ("build", "hatchling", "twine")
needs_build = pytest.mark.skipif(
    not all(importlib.util.find_spec(package) for package in NEEDED),
    reason=f"not installed: pip install {' '.join(NEEDED)}",
)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m build` makes, with the hatchling that is installed instead of one from the network."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)], folder)
    return folder


def run(words: list[str], folder: Path, **environment: str) -> str:
    """The output of a command in a folder that is not the checkout."""
    done = subprocess.run(words, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_build
def test_wheel_and_sdist_pass_the_check_and_hold_what_they_should(dist: Path) -> None:
    names = sorted(file.name for file in dist.iterdir())
    assert names == [f"vitruvius-{__version__}-py3-none-any.whl", f"vitruvius-{__version__}.tar.gz"]
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir())], dist)
    with tarfile.open(dist / f"vitruvius-{__version__}.tar.gz") as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"README.md", "SECURITY.md", "Makefile", "recipes/digits/softmax.yaml"} <= inside
    assert "zoo/vit_digits_adversarial/best.safetensors" in inside


@needs_build
def test_the_installed_wheel_works_from_another_folder(dist: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (wheel,) = dist.glob("*.whl")
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)], tmp_path)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    vitruvius = [sys.executable, "-c", "from vitruvius.cli import run_and_exit; run_and_exit()"]
    code = "import vitruvius; print(vitruvius.__file__); vitruvius.load_model('zoo/vit_digits_adversarial')"
    assert str(site) in run([sys.executable, "-c", code], tmp_path, PYTHONPATH=path)
    assert "digits/softmax" in run([*vitruvius, "list", "recipes"], tmp_path, PYTHONPATH=path)
    words = ["evaluate", "zoo/vit_digits_adversarial", "--images", "40", "device=cpu"]
    assert "clean" in run([*vitruvius, *words], tmp_path, PYTHONPATH=path)
    assert (tmp_path / "runs").is_dir()


def test_the_image_is_built_by_readmes_command() -> None:
    commands = re.findall(r"^RUN (make \w+)$", (ROOT / "Dockerfile").read_text(), re.M)
    readme = (ROOT / "README.md").read_text()
    assert commands
    assert all(re.search(rf"^{command}\b", readme, re.M) for command in commands)


def test_a_release_is_checked_before_it_is_published() -> None:
    steps = [
        step.get("run", "") for step in read_yaml(ROOT / ".github/workflows/release.yml")["jobs"]["release"]["steps"]
    ]
    order = [
        next(i for i, run in enumerate(steps) if word in run) for word in ("-m build", "twine check", "gh release")
    ]
    assert order == sorted(order)
    assert order[1] < next(i for i, run in enumerate(steps) if "zoo/" in run) < order[2]
