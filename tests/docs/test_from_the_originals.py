"""Every command of docs/from_the_originals.md runs, in the page's order, on tiny data in the originals' layouts."""

from __future__ import annotations

import pickle
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torchvision.datasets
from pages import SHELLS, read_blocks

from shift_layouts import write_corrupted, write_pictures
from vitruvius._imagenet import imagenet_classes
from vitruvius.cli import main
from vitruvius.listing import find_recipe
from vitruvius.training import read_recipe

PAGE = Path(__file__).parents[2] / "docs" / "from_the_originals.md"
SECTIONS = {  # of the page: those with commands, each README by itself
    title.strip(): text for title, _, text in (part.partition("\n") for part in PAGE.read_text().split("\n## ")[1:])
}


def commands_of(section: str) -> list[str]:
    """The commands of ours in a section."""
    found = [block for block in read_blocks(PAGE) if block.language in SHELLS and block.text in SECTIONS[section]]
    return [line for block in found for line in block.text.splitlines() if line.strip()]


READMES = [section for section in SECTIONS if commands_of(section)]
WNIDS = imagenet_classes()[:4]
TRAIN = (
    "data.batch_size=2", "data.workers=0", "data.aa=null", "data.aug_repeats=0", "data.image_size=32",
    "train.device=cpu", "train.precision=fp32", "train.holdout=0.5", "train.epochs=1", "train.warmup_epochs=0",
    "train.cooldown_epochs=0", "train.analyse_images=2", "train.alarm_images=2", "model.pretrained=false",
    "model.kwargs.num_classes=1000", "model.kwargs.img_size=32",
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
        write_pictures(home / f"imagenet-{kind}", imagenet_classes(kind)[:2], size=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
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


def test_the_page_has_a_command_for_each_of_the_originals() -> None:
    blocks = read_blocks(PAGE)
    theirs = [line for block in blocks if block.language == "text" for line in block.text.splitlines()]
    assert len(theirs) == 32
    assert len(READMES) == 5


@pytest.mark.parametrize("section", READMES)
def test_the_commands_of_a_section_run_one_after_the_other(section: str, home: Path) -> None:
    for line in commands_of(section):
        words = shlex.split(line)
        words = words[words.index("vitruvius") + 1 :]
        words = [word.replace("=/imagenet", "=imagenet").replace(":/imagenet", ":imagenet") for word in words]
        words = [word.replace("root=/cifar", "root=cifar") for word in words]
        if "--images" in words:
            place = words.index("--images")
            del words[place : place + 2]
        assert main([*words, *_smaller(words)]) == 0, line


SMALLER_STUDIES = {"attack-effectiveness": ["steps=[1, 2]", "seeds=[0]"], "kpca": ["analyses=[entropy]"]}


def _smaller(words: list[str]) -> list[str]:
    """What makes a command of the page small."""
    if words[0] == "train":
        return _smaller_training(words[1])
    if words[0] == "study":
        return ["--images", "2", *SMALLER_STUDIES.get(words[1], [])]
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
    if name == "structured/imagenet_impulse3":  # a 3×3 filter needs more than 2×2 patches
        small += ["data.image_size=64", "model.kwargs.img_size=64"]
    if config.init is not None and "optimised" in str(config.init):
        small.append("init.steps=2")
    if "kpca/reconstruction" in name:
        small.append("model.kwargs.num_heads=3")
    return small
