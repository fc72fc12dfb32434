"""Hugging Face data sets with random access, through timm's reader."""

from __future__ import annotations

from PIL import Image
from timm.data import ImageDataset, create_dataset

from vitruvius._checks import as_label
from vitruvius._errors import DataError
from vitruvius._registry import require
from vitruvius.data._config import DataConfig
from vitruvius.data._subsets import names_by_number
from vitruvius.data.sources._base import Size, check_num_classes, data_source


class FileImages:
    """Images of one of timm's random-access readers: folders and Hugging Face data sets.

    `dataset` is timm's around the reader; `name` what errors and reports call it; `num_classes` its number of classes.
    """

    def __init__(self, dataset: ImageDataset, name: str, num_classes: int) -> None:
        self.reader, self.name, self.num_classes = dataset.reader, name, num_classes

    def __len__(self) -> int:
        return len(self.reader)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes in the order of their numbers; empty where the reader has no names."""
        return names_by_number(getattr(self.reader, "class_to_idx", None) or {})

    def read(self, index: int) -> tuple[Image.Image, int]:
        """The decoded image and its label, by its `index` from 0."""
        file, label = self.reader[index]
        with file:
            image = Image.open(file)
            image.load()
        return image, as_label(label)

    def read_bytes(self, index: int) -> tuple[bytes, int]:
        """The file of an image as it is, and its label, by its `index` from 0."""
        file, label = self.reader[index]
        with file:
            return file.read(), as_label(label)

    def describe(self, index: int) -> str:
        """Where the image of this `index` lies, for an error."""
        return self.reader.filename(index, absolute=True) or f"image {index} of {self.name}"


@data_source("hfds", after_slash="<owner>/<name>")
def open_hugging_face(config: DataConfig, split: str, size: Size) -> FileImages:
    """A Hugging Face data set with random access, cached under `root`.

    `config` is the data section; `split` of the data set; `size` what the model takes, which is left to the transform.
    """
    require("datasets", "hf")
    try:
        dataset = create_dataset(config.dataset, root=config.root, split=split, class_map=config.class_map)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise DataError(f"cannot open {config.dataset} ({split}): {error}") from error
    found = len(dataset.reader.class_to_idx) or None
    return FileImages(dataset, f"{config.dataset}/{split}", check_num_classes(config, config.dataset, found))
