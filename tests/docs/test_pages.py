"""Every Python and shell block of the documentation runs, page by page, in reading order, in a folder of its own."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from pages import Block, commands, read_blocks, run_blocks
from PIL import Image
from safetensors.torch import save_file

import vitruvius.cli
from small_run import small_run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_HERE = [page for page in PAGES if page.stem != "from_the_originals"]  # whose commands have a test of their own
QUICK = [page for page in RUN_HERE if any(block.is_run and not block.is_long for block in read_blocks(page))]
LONG = [page for page in RUN_HERE if any(block.is_run and block.is_long for block in read_blocks(page))]
SHORTER = {  # of the tutorial: what is replaced so that its models are trained and judged in seconds
    "train.epochs=12": "train.epochs=1",
    'DataConfig(dataset="digits")': 'DataConfig(dataset="digits", val_num_samples=32)',
    "--threat pgd:eps=8/255,steps=10 --threat": "--images 32 --threat pgd:eps=8/255,steps=10 --threat",
}
WORDNET_IDS = ("n01440764", "n02102040", "n02979186")


@pytest.mark.parametrize("page", QUICK, ids=lambda page: page.stem)
def test_the_code_on_a_page_runs(page: Path, tmp_path: Path, runs: Path) -> None:
    prepare(page.stem, tmp_path, runs)
    blocks = [block for block in read_blocks(page) if block.is_run and not block.is_long]
    for words, shorter in SHORTER.items() if page.stem == "tutorial" else ():
        assert any(words in block.text for block in blocks), words
        blocks = [replace(block, text=block.text.replace(words, shorter)) for block in blocks]
    run_page(page, blocks, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("page", LONG, ids=lambda page: page.stem)
def test_the_long_commands_on_a_page_run(page: Path, tmp_path: Path, runs: Path) -> None:
    prepare(page.stem, tmp_path, runs)
    run_page(page, [block for block in read_blocks(page) if block.is_run], tmp_path)


def run_page(page: Path, blocks: list[Block], folder: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=run_in, args=(folder, blocks, page.name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads at a fork
        child.start()
    child.join()
    assert child.exitcode == 0, (folder / "output.txt").read_text(encoding="utf-8")[-3000:]


def run_in(folder: Path, blocks: list[Block], name: str) -> None:
    """Run a page in its folder, in a process that has already imported PyTorch."""
    os.chdir(folder)
    warnings.resetwarnings()
    with Path("output.txt").open("w", encoding="utf-8") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        try:
            run_blocks(blocks, name)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        sys.stdout.flush()
    os._exit(0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small trained run, which stands in for the runs that pages speak of."""
    folder = tmp_path_factory.mktemp("runs")
    small_run(folder / "small")
    return folder


def prepare(page: str, folder: Path, runs: Path) -> None:
    """What a page expects to exist: small runs under its names, and tiny data sets."""
    for name in RUNS.get(page, ()):
        shutil.copytree(runs / "small", folder / "runs" / name)
    for make in DATA.get(page, ()):
        make(folder)


def photographs(folder: Path) -> None:
    """data/imagenette: train and val, three classes of ImageNet with eight noisy images each."""
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "val"):
        for wordnet_id in WORDNET_IDS:
            place = folder / "data" / "imagenette" / split / wordnet_id
            place.mkdir(parents=True)
            for number in range(8):
                pixels = torch.randint(256, (128, 128, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(place / f"{number}.png")


def weights(folder: Path) -> None:
    """lite0.safetensors and dinov2.safetensors: untrained weights of the models that the pages name."""
    lite = vitruvius.create_model("tf_efficientnet_lite0")
    save_file(lite.model.state_dict(), folder / "lite0.safetensors")
    dinov2 = vitruvius.create_model("vit_small_patch14_dinov2", num_classes=0)
    save_file(dinov2.model.state_dict(), folder / "dinov2.safetensors")


def plugin(folder: Path) -> None:
    shutil.copytree(ROOT / "docs" / "plugin", folder / "docs" / "plugin")


RUNS: dict[str, tuple[str, ...]] = {
    "analysis": ("rpc", "a"),
    "attacks": ("rpc", "softmax", "a", "b", "other"),
    "corruptions": ("rpc",),
    "shift": ("rpc", "softmax"),
}
DATA: dict[str, tuple[Callable[[Path], None], ...]] = {
    "add_an_attention": (plugin,),
    "attacks": (photographs, weights),
    "corruptions": (photographs,),
    "fine_tuning": (photographs, weights),
}


def test_what_is_not_run_says_why() -> None:
    for page in PAGES:
        for block in read_blocks(page):
            if block.how not in ("", "long"):
                assert re.fullmatch(r"no, .{8,}", block.how), f"{page.name}:{block.line}: {block.how}"


def test_every_command_of_the_documentation_begins_with_a_known_word() -> None:
    """A block that is not run is at least a command of ours, or of a program that README or CONTRIBUTING names."""
    known = {"vitruvius", "torchrun", "python", "make", "pip", "pre-commit", "cd"}
    known |= {"srun", "scontrol", "[", "sleep", "exit"}
    for page in PAGES:
        for block in read_blocks(page):
            if block.language in ("sh", "bash"):
                assert {words[0] for words in commands(block.text)} <= known, f"{page.name}:{block.line}"


def test_yaml_on_the_pages_can_be_read() -> None:
    for page in PAGES:
        for block in read_blocks(page):
            if block.language == "yaml":
                assert yaml.safe_load(block.text), f"{page.name}:{block.line}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
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


def test_the_site_has_every_page_in_its_navigation() -> None:
    """What mkdocs would say too; here without installing it."""
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    named = set(pages_in(navigation))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= named
    for name in named - {"index.md", "gallery.md"}:
        place = ROOT / "docs" / name
        package = ROOT / "src" / "vitruvius" / Path(name).stem
        known = place.exists() or place.with_suffix(".ipynb").exists() or (ROOT / name).exists()
        known = known or package.is_dir() or name == "api/vitruvius.md"
        assert known, f"mkdocs.yml names {name}, which does not exist"


def pages_in(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        yield from pages_in(list(entry.values()))
    elif isinstance(entry, list):
        for inner in entry:
            yield from pages_in(inner)
