"""Data sets → loaders that yield pixels in [0, 1]: the embedded digits, folders, torchvision, tfds, hf, wds.

`train_loader` and `eval_loader` read what a recipe names, `images_loader` any images that you read yourself.
`data_source` registers a data set of your own; `vitruvius list data` shows what there is.
"""

from vitruvius._errors import DataError
from vitruvius.data._config import DataConfig, Mix
from vitruvius.data._image_loader import ImageSet
from vitruvius.data._loader import Loader
from vitruvius.data._open import eval_loader, held_out, images_loader, train_loader
from vitruvius.data._preprocessing import InputSize, resolve
from vitruvius.data._subsets import chosen_files, chosen_ids
from vitruvius.data._tensors import TensorSet
from vitruvius.data.augmentation.mixup import Mixer, make_mixup
from vitruvius.data.naming import class_words
from vitruvius.data.sources import data_source, data_sources, describe_sources, is_stream, open_data
from vitruvius.data.sources.folder import split_folder

__all__ = [
    "DataConfig",
    "DataError",
    "ImageSet",
    "InputSize",
    "Loader",
    "Mix",
    "Mixer",
    "TensorSet",
    "chosen_files",
    "chosen_ids",
    "class_words",
    "data_source",
    "data_sources",
    "describe_sources",
    "eval_loader",
    "held_out",
    "images_loader",
    "is_stream",
    "make_mixup",
    "open_data",
    "resolve",
    "split_folder",
    "train_loader",
]
