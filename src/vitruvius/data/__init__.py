"""Data sets → loaders that yield pixels in [0, 1]: the embedded digits, folders, torchvision, tfds, hf, wds.

`train_loader` and `eval_loader` read what a recipe names, `images_loader` any images that somebody else reads.
"""

from vitruvius.data._config import DataConfig
from vitruvius.data._decoding import ImageSet
from vitruvius.data._folder import split_folder
from vitruvius.data._images import images_loader
from vitruvius.data._loader import Loader
from vitruvius.data._mixup import Mixer, make_mixup
from vitruvius.data._open import eval_loader, held_out, train_loader
from vitruvius.data._preprocessing import InputSize
from vitruvius.data._tensors import TensorSet

__all__ = [
    "DataConfig",
    "ImageSet",
    "InputSize",
    "Loader",
    "Mixer",
    "TensorSet",
    "eval_loader",
    "held_out",
    "images_loader",
    "make_mixup",
    "split_folder",
    "train_loader",
]
