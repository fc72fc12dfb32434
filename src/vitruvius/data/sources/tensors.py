"""Images stored as tensors in one safetensors file, lossless and in order.

`images` (N, C, H, W) uint8, or floats in [0, 1]; `labels` (N) whole numbers; the file's metadata may say `num_classes`,
else it is the largest label and one. `vitruvius attack` writes such files.
"""

from __future__ import annotations

from torch import Tensor

from vitruvius._checks import check_labels, check_pixels
from vitruvius._errors import CheckpointError, DataError
from vitruvius._files import load_tensors
from vitruvius.data._config import DataConfig
from vitruvius.data._tensors import TensorSet
from vitruvius.data.sources._base import Size, check_num_classes, data_source


@data_source("tensors")
def open_safetensors(config: DataConfig, split: str, size: Size) -> TensorSet:
    """A safetensors file `root` with images and labels; it has one split, whatever it is called.

    `data.num_classes` may say how many classes there are, if the file does not.

    `config` is the data section; `split` is not looked at; `size` what the model takes, which is left to the transform.
    """
    if config.root is None:
        raise DataError("data.root is not set; it must name the safetensors file that holds images and labels.")
    try:
        tensors, metadata = load_tensors(config.root)
    except CheckpointError as error:
        raise DataError(f"cannot read the images in {config.root}: {error}") from error
    if not {"images", "labels"} <= set(tensors):
        raise DataError(
            f"{config.root} holds {', '.join(tensors) or 'nothing'}; expected the tensors images and labels."
        )
    images = tensors["images"]
    labels = tensors["labels"]
    _check_pair(images, labels, config.root)
    largest = int(labels.max())
    found = int(metadata.get("num_classes", largest + 1))
    classes = check_num_classes(config, config.root, found)
    return TensorSet(name=f"tensors/{split}", images=images, labels=labels.long(), num_classes=classes)


def _check_pair(images: Tensor, labels: Tensor, file: str) -> None:
    """Refuse what is not pixels (N, C, H, W) with a class (N) each."""
    if images.dim() != 4 or len(images) != len(labels) or not len(labels):
        raise DataError(
            f"{file}: images {tuple(images.shape)} and labels {tuple(labels.shape)}, expected (N, C, H, W) and (N)."
        )
    check_labels(labels, where=f"{file}: the")
    if images.is_floating_point():
        check_pixels(images)
