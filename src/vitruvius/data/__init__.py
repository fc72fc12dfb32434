"""Data sets → loaders that yield pixels in [0, 1]: the embedded digits, folders, torchvision, tfds, hf, wds.

`train_loader` and `eval_loader` read what a recipe names, `images_loader` any images that you read yourself.
`data_source` registers a data set of your own; `vitruvius list data` shows what there is.
"""

from typing import TYPE_CHECKING

from vitruvius._lazy import exports

if TYPE_CHECKING:
    from vitruvius.data._config import DataConfig as DataConfig
    from vitruvius.data.base import TensorSet as TensorSet
    from vitruvius.data.base import data_source as data_source
    from vitruvius.data.loading import eval_loader as eval_loader
    from vitruvius.data.loading import images_loader as images_loader
    from vitruvius.data.loading import train_loader as train_loader
else:
    __getattr__, __dir__, __all__ = exports(__name__)
