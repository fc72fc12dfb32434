"""Data sets → loaders that yield pixels in [0, 1]: the embedded digits, folders, torchvision, tfds, hf, wds."""

from vitruvius.data._config import DataConfig
from vitruvius.data._loader import Loader
from vitruvius.data._mixup import Mixer, make_mixup
from vitruvius.data._open import eval_loader, held_out, train_loader

__all__ = ["DataConfig", "Loader", "Mixer", "eval_loader", "held_out", "make_mixup", "train_loader"]
