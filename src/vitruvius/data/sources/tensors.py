"""Images stored as tensors in one safetensors file, lossless and in order.

`images` (N, C, H, W) uint8, or floats in [0, 1]; `labels` (N) whole numbers; the file's metadata may say `num_classes`,
else it is the largest label and one. `vitruvius attack` writes such files.
"""

from __future__ import annotations

from vitruvius._checks import check_labels, check_pixels
from vitruvius._errors import CheckpointError, DataError
from vitruvius._files import load_tensors
from vitruvius.data._config import DataConfig
from vitruvius.data.base import Size, TensorSet, check_num_classes, data_source


@data_source("tensors", root="the safetensors file that holds images and labels")
def open_safetensors(config: DataConfig, split: str, size: Size) -> TensorSet:
    """A safetensors file `root` with images and labels; it has one split, whatever it is called.

    `data.num_classes` may say how many classes there are, if the file does not.
    """
    file = config.root or ""
    try:
        tensors, metadata = load_tensors(file)
    except CheckpointError as error:
        raise DataError(f"cannot read the images in {file}: {error}") from error
    if not {"images", "labels"} <= set(tensors):
        raise DataError(f"{file} holds {', '.join(tensors) or 'nothing'}; expected the tensors images and labels.")
    images, labels = tensors["images"], tensors["labels"]
    if images.dim() != 4 or len(images) != len(labels) or not len(labels):
        raise DataError(
            f"{file}: images {tuple(images.shape)} and labels {tuple(labels.shape)}, expected (N, C, H, W) and (N)."
        )
    check_labels(labels, where=f"{file}: the")
    if images.is_floating_point():
        check_pixels(images)
    classes = check_num_classes(config, file, int(metadata.get("num_classes", int(labels.max()) + 1)))
    return TensorSet(name=f"tensors/{split}", images=images, labels=labels.long(), num_classes=classes)
