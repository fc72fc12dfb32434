"""Every command of docs/from_the_originals.md runs, in the page's order, on tiny data in the originals' layouts.

A number of each block is compared with the formula of the original, written out in from_the_originals.py. Every feature
of the originals is named with where it is here or why it is not, and these names exist.
"""

from __future__ import annotations

import pickle
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

import from_the_originals
import numpy as np
import pytest
import timm
import torch
import torchvision.datasets
from pages import SHELLS, read_blocks

from shift_layouts import write_corrupted, write_pictures
from vitruvius._imagenet import imagenet_classes
from vitruvius._registry import Registry, parse_spec, signature_of
from vitruvius.analysis import analyses
from vitruvius.attacks.base import attacks
from vitruvius.attention import attentions
from vitruvius.cli import main, make_app
from vitruvius.compression.rules import rules
from vitruvius.data.base import data_sources
from vitruvius.data.sources.torchvision import SETS
from vitruvius.init import bases, inits
from vitruvius.listing import find_recipe, recipes, recipes_folder
from vitruvius.models import models
from vitruvius.recipe_keys import sections
from vitruvius.studies import studies
from vitruvius.tasks import tasks
from vitruvius.tracking import trackers
from vitruvius.training import read_recipe

PAGE = Path(__file__).parents[2] / "docs" / "from_the_originals.md"
SECTIONS = {  # of the page: those with commands, each README by itself
    title.strip(): text for title, _, text in (part.partition("\n") for part in PAGE.read_text().split("\n## ")[1:])
}


@dataclass(frozen=True)
class Block:
    """Commands of ours under a title of the page."""

    title: str
    lines: list[str]


def blocks_of(section: str) -> list[Block]:
    """The commands of ours in a section, block by block."""
    found = [block for block in read_blocks(PAGE) if block.language in SHELLS and block.text in SECTIONS[section]]
    return [
        Block(
            title=re.findall(r"^\*\*(.+?)\*\*", SECTIONS[section].partition(block.text)[0], re.M)[-1],
            lines=[line for line in block.text.splitlines() if line.strip() and not line.startswith("#")],
        )
        for block in found
    ]


TABLES = "What they have, and where it is here"
READMES = [section for section in SECTIONS if blocks_of(section)]
WNIDS = imagenet_classes()[:4]
TRAIN = (
    "data.batch_size=2", "data.workers=0", "data.aa=null", "data.aug_repeats=0", "data.image_size=32",
    "data.eval_batch_size=8",
    "train.device=cpu", "train.precision=fp32", "train.holdout=0.5", "train.epochs=1", "train.warmup_epochs=0",
    "train.min_lr=0", "train.cooldown_epochs=0", "train.analyse_images=2", "train.alarm_images=2",
    "model.pretrained=false", "model.kwargs.num_classes=1000", "model.kwargs.img_size=32",
)  # fmt: skip
SIZES = {
    "xcit": ("model.kwargs.depth=1", "model.kwargs.embed_dim=32", "model.kwargs.num_heads=2"),
    "vit": ("model.kwargs.depth=2", "model.kwargs.embed_dim=48"),
    "deit": ("model.kwargs.depth=2", "model.kwargs.embed_dim=96"),
}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A working folder with the data: ImageNet and its shifted versions as folders, CIFAR-10 as pickled batches."""
    home = tmp_path
    write_pictures(home / "imagenet" / "train", WNIDS, each=2, size=32)
    write_pictures(home / "imagenet" / "val", WNIDS, size=32)
    write_corrupted(home / "imagenet-c", ("fog",), (1,), WNIDS)
    for kind in "aro":
        each = 55 if kind == "a" else 1  # two bins of calibration
        write_pictures(home / f"imagenet-{kind}", imagenet_classes(kind)[: 4 if kind == "a" else 2], each=each, size=32)
    _write_checkpoints(home / "checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for verb in ("vitruvius.report.analysis_figures", "vitruvius.studies.kpca"):  # no number is read from a figure
            patch.setattr(f"{verb}.save_figures", lambda *_, **__: [])
        patch.setattr(torchvision.datasets.CIFAR10, "_check_integrity", lambda _: True)
        patch.setattr(torchvision.datasets.CIFAR10, "train_list", [["data_batch_1", ""]])
        patch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
        _write_cifar(home / "cifar" / "cifar-10-batches-py")
        yield home


def _write_cifar(folder: Path) -> None:
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, count in (("data_batch_1", 8), ("test_batch", 4)):
        pixels = random.integers(0, 256, (count, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [i % 10 for i in range(count)]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))


def _write_checkpoints(folder: Path) -> None:
    folder.mkdir()
    model = timm.create_model("xcit_nano_12_p16_224", num_classes=1000)
    torch.save({"state_dict": model.state_dict(), "args": {"normalize_model": False}}, folder / "checkpoint-0.pth.tar")


def test_the_page_has_a_command_for_each_of_the_originals() -> None:
    blocks = read_blocks(PAGE)
    theirs = [line for block in blocks if block.language == "text" for line in block.text.splitlines()]
    assert len(theirs) == 32
    assert len(READMES) == 5
    assert {block.title for section in READMES for block in blocks_of(section)} == set(NUMBERS)


@pytest.mark.parametrize("section", READMES)
def test_the_commands_of_a_section_run_one_after_the_other(section: str, home: Path) -> None:
    for block in blocks_of(section):
        for line in block.lines:
            words = shlex.split(line)
            words = words[words.index("vitruvius") + 1 :]
            for here, there in PLACES.items():
                words = [word.replace(here, there) for word in words]
            if "--images" in words:
                place = words.index("--images")
                del words[place : place + 2]
            assert main([*words[:2], *_smaller(words), *words[2:]]) == 0, line
        number, by_hand = getattr(from_the_originals, NUMBERS[block.title])(home)
        assert number == pytest.approx(by_hand, rel=1e-3), block.title


def test_every_computation_of_the_originals_stands_first() -> None:
    blocks = [block.text for block in read_blocks(PAGE) if block.language in SHELLS]
    for text in blocks:
        assert text.startswith("# as there") == ("# ours" in text), text


PLACES = {  # of the page: where its data are here
    "=/imagenet": "=imagenet",
    "=/flowers": "=imagenet",
    ":/imagenet": ":imagenet",
    "root=/cifar": "root=cifar",
    "CHECKPOINTS_DIR": "checkpoints",
    "xcit_small_12_p16_224": "xcit_nano_12_p16_224",  # of their checkpoints
    "0.9": "0.2",  # of a few tokens
}
NUMBERS = {  # title of a block → what of `from_the_originals` computes a number of it by hand
    "Training RPC-SymViT": "robust_attention",
    "Training scaled attention S": "scaled_by_a_matrix",
    "Training scaled attention α": "scaled_by_alpha",
    "Robustness evaluation": "calibration_without_the_last_bin",
    "Attack evaluation": "accuracy_under_their_pgd",
    "Step 1: low rank": "heads_through_the_auto_encoder",
    "Step 2: average maps": "average_map",
    "Step 3: masks": "kept_keys",
    "Step 4: low rank and masks": "masked_attention",
    "Small data sets": "mimetic_product",
    "ImageNet-1k": "peak_rate",
    "1) Reconstruction": "reconstruction_error",
    "2) to 5) Eigenvalues, norms, gammas, value vectors": "projected_norm",
    "XCiT-S12, XCiT-M12, ConvNeXt-T on ImageNet; XCiT-L12; ε = 8": "training_attack",
    "Fine-tuning on Oxford Flowers or Caltech-101": "last_step",
    "Fine-tuning on CIFAR-10 and CIFAR-100": "trades_loss",
    "Validating with RobustBench, and with the validation script": "accuracy_under_200_steps",
    "Attack effectiveness": "loss_of_the_longest_attack",
    "Data sets that they generate": "stretched_perturbation",
}
SMALLER_STUDIES = {"attack-effectiveness": ["steps=[1, 2]", "seeds=[0]"], "kpca": ["analyses=[entropy]"]}
SMALLER_TARGETS = {"runs/their_xcit": ["data.class_map=imagenet-1k"]}  # four of the classes


def _smaller(words: list[str]) -> list[str]:
    """What makes a command of the page small."""
    if words[0] == "train":
        return _smaller_training(words[1])
    if words[0] == "study":
        return ["--images", "2", *SMALLER_STUDIES.get(words[1], []), *SMALLER_TARGETS.get(words[2], [])]
    if words[0] in ("maps", "attack", "analyse"):
        return ["--images", "2"]
    return []


def _smaller_training(name: str) -> list[str]:
    config = read_recipe(find_recipe(name))
    family = config.model.name.removeprefix("vitruvius/").split("_")[0]
    small = [*TRAIN, *SIZES[family]]
    if config.data.dataset == "torch/flowers102":
        small += ["data.dataset=folder", "data.root=imagenet", "data.val_split=val"]
    if "attack" in str(config.task):
        small.append("train.select_threat=pgd:eps=4/255,steps=2")
    if name.startswith("structured/imagenet_impulse3"):  # a 3×3 filter needs more than 2×2 patches
        small += ["data.image_size=64", "model.kwargs.img_size=64"]
    if config.init is not None and "optimised" in str(config.init):
        small.append("init.steps=2")
    if "kpca/reconstruction" in name:
        small.append("model.kwargs.num_heads=3")
    return small


PIECES: tuple[Registry[Any], ...] = (analyses, attacks, attentions, rules, inits, bases, tasks, trackers)
RECIPES = [name for name, _, _ in recipes()] + [
    str(path.relative_to(recipes_folder()).with_suffix("")) for path in recipes_folder().rglob("*.yaml")
]
WORDS = {  # what is neither a piece, a key, a verb nor a recipe: files, flags, extras, functions
    "load_model", "metrics.jsonl", "rows.jsonl", "validation=", "analyses:", "tracking:", "cloud", "paper",
    "compression.cost.account", "compression.cost", "report.sections.maps.draw_accuracy", "analysis.shipped",
}  # fmt: skip


APP = make_app()
FEATURES = [
    line for line in SECTIONS[TABLES].splitlines() if line.startswith("| ") and not line.startswith("| feature")
]
NAMES = sorted(
    {word for row in FEATURES for word in re.findall(r"`([^`]+)`", row.split(" | ", 1)[1]) if not word.startswith("--")}
    - WORDS
)


def test_every_feature_is_ticked_or_named_as_left_out() -> None:
    assert len(FEATURES) > 100
    for row in FEATURES:
        feature, here = (cell.strip() for cell in row.strip("| ").split(" | ", 1))
        assert here.startswith(("✓ ", "— ")), row
        assert feature
    for number in range(1, 26):
        assert any(row.startswith(f"| F{number} ") for row in FEATURES), f"F{number}"


@pytest.mark.parametrize("name", NAMES)
def test_what_the_page_names_exists(name: str) -> None:
    word = name.split()[0]
    if word == "vitruvius":
        word = name.split()[1]
    if word in APP:
        _check_command(name.removeprefix("vitruvius ").split())
        return
    section, dot, key = name.partition(".")
    if dot and section in ("train", "data", "model", "task", "attention"):
        assert key in {one.name for part in sections(section).values() for one in part.keys}, name
    elif name.startswith("vitruvius/"):
        assert matching(list(models), name)
    elif "/" in name and name.split("/")[0] in {path.name for path in recipes_folder().iterdir()}:
        assert matching(RECIPES, name)
    elif name.startswith("torch/"):
        assert name.removeprefix("torch/") in SETS
    elif name.split("/")[0] not in data_sources:
        _check_piece(name)


def _check_command(words: list[str]) -> None:
    """A verb, its flags, and which study or list."""
    flags = {argument.name for argument in APP[words[0]].assemble_argument_collection()}
    assert {word for word in words if word.startswith("--")} <= flags, words
    if words[0] == "study":
        assert words[1] in studies


def _check_piece(name: str) -> None:
    piece, settings = parse_spec(name, where="docs")
    room = next((room for room in PIECES if piece in room), None)
    assert room is not None, f"nothing is called {piece!r}"
    known = signature_of(room[piece])
    assert all(re.search(rf"\b{key}\b", known) for key in settings), name
