"""What classes are called: folders by their names, WordNet ids in words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from vitruvius._imagenet import imagenet_classes
from vitruvius.data import DataConfig
from vitruvius.data.base import class_words
from vitruvius.data.classes import in_words, names_by_number


def make_folder(root: Path, *names: str) -> Path:
    for split in ("train", "validation"):
        for name in names:
            (root / split / name).mkdir(parents=True)
            Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(root / split / name / "0.png")
    return root


def test_classes_of_a_folder_are_called_like_its_folders(tmp_path: Path) -> None:
    root = make_folder(tmp_path, "cat", "dog, small")
    assert class_words(DataConfig(dataset="folder", root=str(root))) == ("cat", "dog, small")


def test_wordnet_ids_are_told_in_words(tmp_path: Path) -> None:
    root = make_folder(tmp_path, "n01440764", "n02102040")
    assert class_words(DataConfig(dataset="folder", root=str(root))) == ("tench", "English springer")
    mapped = DataConfig(dataset="folder", root=str(root), class_map="imagenet-1k")
    assert len(class_words(mapped)) == 1000
    assert class_words(mapped)[217] == "English springer"


def test_every_class_of_imagenet_has_words_of_its_own() -> None:
    words = in_words(imagenet_classes())
    assert len(set(words)) == 1000
    assert [word for word in words if "crane" in word] == ["crane (n02012849)", "crane (n03126707)"]


def test_digits_have_numbers_only() -> None:
    assert class_words(DataConfig(dataset="digits")) == ()


def test_a_number_without_a_name_stands_for_itself() -> None:
    assert names_by_number({"b": 2, "a": 0, "also a": 0}) == ("a", "1", "b")
    assert names_by_number({}) == ()
