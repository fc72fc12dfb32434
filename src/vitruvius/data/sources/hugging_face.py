"""Hugging Face data sets with random access, through timm's reader."""

from __future__ import annotations

from vitruvius._errors import DataError
from vitruvius._registry import require
from vitruvius.data._config import DataConfig
from vitruvius.data.base import Size, check_num_classes, data_source
from vitruvius.data.sources.folder import FileImages


@data_source("hfds", after_slash="<owner>/<name>", class_map=True, files=True)
def open_hugging_face(config: DataConfig, split: str, size: Size) -> FileImages:
    """A Hugging Face data set with random access, cached under `root`."""
    require("datasets", "hf")
    from timm.data import create_dataset

    try:
        dataset = create_dataset(config.dataset, root=config.root, split=split, class_map=config.class_map)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise DataError(f"cannot open {config.dataset} ({split}): {error}") from error
    classes = check_num_classes(config, config.dataset, len(dataset.reader.class_to_idx) or None)
    return FileImages(dataset, f"{config.dataset}/{split}", classes)
