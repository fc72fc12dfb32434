"""Fixed subsets of a folder of images, by file name: RobustBench's 5,000 ImageNet images, or a list of the user's."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitruvius._errors import DataError

ROBUSTBENCH = "robustbench-imagenet"


def subset_ids(name: str, data: Any) -> Tensor:
    """Ids of the images whose file names a list holds; an image of the list that is not there is an error."""
    if not hasattr(data, "reader"):
        raise DataError(f"data.subset={name!r} chooses images by file name; {data.name} has none. Use a folder.")
    wanted = robustbench_names() if name == ROBUSTBENCH else _names(name)
    place = {Path(data.describe(index)).name: index for index in range(len(data))}
    absent = [file for file in wanted if file not in place]
    if absent:
        raise DataError(
            f"{data.name} lacks {len(absent)} of the {len(wanted)} images of data.subset={name!r}, "
            f"among them {', '.join(absent[:3])}."
        )
    return torch.tensor(sorted(place[file] for file in wanted))


def robustbench_names() -> list[str]:
    """File names of RobustBench's ImageNet images."""
    text = files("vitruvius.data").joinpath("robustbench_imagenet.txt").read_text(encoding="utf-8")
    numbers = [int(n) for line in text.splitlines() if not line.startswith("#") for n in line.split()]
    return [f"ILSVRC2012_val_{number:08d}.JPEG" for number in numbers]


def _names(name: str) -> list[str]:
    path = Path(name)
    if not path.is_file():
        raise DataError(f"data.subset={name!r} is neither {ROBUSTBENCH!r} nor a text file with one file name a line.")
    return [Path(line.strip()).name for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
