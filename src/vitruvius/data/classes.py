"""Which classes and which files are used, by lists: packaged ones, or text files with one name per line.

Packaged are RobustBench's 5,000 ImageNet images, and the 100 classes of the light recipe's ablations (Debenedetti,
Sehwag & Mittal 2023, arXiv:2209.07399). Classes are numbered in the order of their list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitruvius._errors import DataError
from vitruvius._imagenet import imagenet_labels

IMAGENET = "imagenet-1k"  # class map of folders named by WordNet ids
LISTS = {"imagenet-100": "imagenet_100.txt"}
MAPS = {"caltech-101": "caltech_101.txt", "caltech-102": "caltech_102.txt"}
ROBUSTBENCH = "robustbench-imagenet"


def subset_ids(name: str, data: Any) -> Tensor:
    """Ids of the images whose file names a list holds; an image of the list that is not there is an error."""
    wanted = subset_names(name)
    place = {Path(data.describe(index)).name: index for index in range(len(data))}
    absent = [file for file in wanted if file not in place]
    if absent:
        missing = (
            f"{len(absent)} of the {len(wanted)} images of data.subset={name!r}, among them {', '.join(absent[:3])}"
        )
        raise DataError(f"{data.name} lacks {missing}.")
    return torch.tensor(sorted(place[file] for file in wanted))


def subset_names(name: str) -> list[str]:
    """The file names of a list: RobustBench's, or the lines of a text file."""
    if name == ROBUSTBENCH:
        numbers = " ".join(_packaged("robustbench_imagenet.txt")).split()
        return [f"ILSVRC2012_val_{int(number):08d}.JPEG" for number in numbers]
    if Path(name).is_file():
        return [Path(line).name for line in _lines(Path(name).read_text(encoding="utf-8"))]
    raise DataError(f"data.subset={name!r} is neither {ROBUSTBENCH!r} nor a text file with one file name per line.")


def class_names(name: str) -> list[str]:
    """The classes of a packaged subset, or of a text file with one class name per line."""
    if name in LISTS:
        names = _packaged(LISTS[name])
    elif Path(name).expanduser().is_file():
        names = _lines(Path(name).expanduser().read_text(encoding="utf-8"))
    else:
        raise DataError(
            f"data.classes={name!r} is neither {', '.join(LISTS)} nor a text file, one class name per line."
        )
    if not names or len(set(names)) < len(names):
        raise DataError(f"data.classes={name!r} lists {len(names)} classes, {len(set(names))} of them different.")
    return names


def read_class_map(name: str, root: Path) -> dict[str, int]:
    """Class name → number: ImageNet's, or by the lines of a text file, which may lie in `root`."""
    if name == IMAGENET:
        return imagenet_labels()
    if name in MAPS:
        return {line: number for number, line in enumerate(_packaged(MAPS[name]))}
    for path in (Path(name), root / name):
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            return {line.strip(): number for number, line in enumerate(lines) if line.strip()}
    known = ", ".join((IMAGENET, *MAPS))
    raise DataError(f"class map {name} is neither {known} nor a text file, here or in {root}, one class name per line.")


def names_by_number(numbers: Mapping[str, int]) -> tuple[str, ...]:
    """The names of classes in the order of `numbers`, name → number; a number without a name stands for itself."""
    names: dict[int, str] = {}
    for name, number in numbers.items():
        names.setdefault(number, name)
    return tuple(str(names.get(number, number)) for number in range(max(names, default=-1) + 1))


def in_words(names: Sequence[str]) -> tuple[str, ...]:
    """The same names, with ImageNet's first word for a WordNet id, all its words where others share the first."""
    lemmas = _lemmas()
    whole = [lemmas.get(name, name) for name in names]
    first = [words.split(", ")[0] if name in lemmas else name for name, words in zip(names, whole, strict=True)]
    words = []
    for name, long, short in zip(names, whole, first, strict=True):
        if first.count(short) == 1:
            words.append(short)
        else:
            words.append(long if whole.count(long) == 1 else f"{long} ({name})")
    return tuple(words)


@cache
def _lemmas() -> dict[str, str]:
    """WordNet id → words, such as `tench, Tinca tinca`."""
    from timm.data import ImageNetInfo

    every = [ImageNetInfo(subset).label_descriptions(as_dict=True) for subset in ("imagenet-22k", "imagenet-1k")]
    return {**every[0], **every[1]}


def require_classes(wanted: Iterable[str], found: Sequence[str], place: str) -> None:
    """Refuse data that lack a class: accuracy over a part of a subset would be another number."""
    absent = [name for name in wanted if name not in found]
    if absent:
        raise DataError(f"{place} lacks {len(absent)} of the classes of data.classes, among them {absent[0]}.")


def _packaged(file: str) -> list[str]:
    return _lines(files("vitruvius.data").joinpath(file).read_text(encoding="utf-8"))


def _lines(text: str) -> list[str]:
    """Lines without those that are empty or begin with #."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
