"""What a data source is: a function that opens the data set a recipe names, registered under the word before the slash.

`dataset: npz` and `dataset: torch/cifar10` ask for the sources `npz` and `torch`; what follows the slash is the
source's own to read. A new source is one file in this folder, or a plugin module that uses `data_source`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitruvius._errors import DataError, suggest
from vitruvius._registry import Registry, first_line
from vitruvius.data._config import DataConfig
from vitruvius.data._image_loader import ImageSet
from vitruvius.data._subsets import IMAGENET
from vitruvius.data._tensors import TensorSet

AnySet = TensorSet | ImageSet
Size = tuple[int, int, int]  # channels, height, width of the model's input
Open = Callable[[DataConfig, str, Size], Any]  # → TensorSet or ImageSet; streams: see streams.py

TRAIN_NAMES = ("train", "training")
VALIDATION_NAMES = ("val", "valid", "validation", "eval", "evaluation")

data_sources: Registry[Open] = Registry("data set", "data", homes=["vitruvius.data.sources"])


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What must be known of a source before it opens anything."""

    after_slash: str = ""  # what follows the slash in `dataset:`, for messages; "" means there is no slash
    class_names: bool = False  # `data.classes` can choose its classes by name
    wordnet: bool = False  # `data.class_map: imagenet-1k` can number its folders
    stream: bool = False  # can only be read in order


_TRAITS: dict[str, Traits] = {}


def data_source(
    name: str, *, after_slash: str = "", class_names: bool = False, wordnet: bool = False, stream: bool = False
) -> Callable[[Open], Open]:
    """Decorator: make a function `(config, split, size)` the source of `dataset: name`.

    The function gets the recipe's `data:` section, the name of the split and the model's input size (channels, height,
    width), and returns a `TensorSet` or anything that has what `ImageSet` asks for.

    name: the word in `dataset:`, before the slash if there is one.
    after_slash: what a recipe writes after the slash, e.g. "<name>"; "" (default) if nothing follows.
    class_names: whether the source itself heeds `data.classes`; default no, then the key is refused.
    wordnet: whether its classes are folders named by WordNet ids, which `class_map: imagenet-1k` numbers; default no.
    stream: whether the data can only be read in order; default no.
    """

    def add(opener: Open) -> Open:
        registered = data_sources.register(name)(opener)
        _TRAITS[name] = Traits(after_slash=after_slash, class_names=class_names, wordnet=wordnet, stream=stream)
        return registered

    return add


def open_data(config: DataConfig, split: str, size: Size) -> AnySet:
    """The data set that `config` names, opened: what is wrong with it is an error here.

    config: the recipe's `data:` section.
    split: the split to open, e.g. `config.val_split`.
    size: channels, height and width of the model's input; only `fake` images are made to fit it.
    """
    opener, traits = find_source(config.dataset)
    if traits.stream:
        raise DataError(f"{config.dataset} is a stream and has no images by number; choose another data set.")
    if config.classes is not None and not traits.class_names:
        raise DataError(f"data.classes chooses classes by name, {config.dataset} has none; use a folder or torch/….")
    if config.class_map == IMAGENET and not traits.wordnet:
        raise DataError(f"data.class_map={IMAGENET} numbers folders named by WordNet ids; {config.dataset} has none.")
    opened: AnySet = opener(config, split, size)
    return opened


def find_source(dataset: str) -> tuple[Open, Traits]:
    """The function that opens a data set, and its traits; a name that nobody registered is an error."""
    kind, slash, _ = dataset.partition("/")
    traits = _traits(kind)
    if kind not in data_sources or bool(slash) != bool(traits.after_slash):
        known = source_names()
        raise DataError(f"no data set named {dataset!r}{suggest(dataset, known)} Known: {', '.join(known)}.")
    return data_sources[kind], traits


def source_names() -> list[str]:
    """Every source as a recipe writes it: `digits`, `torch/…`."""
    return [f"{name}/…" if _traits(name).after_slash else name for name in data_sources]


def describe_sources() -> list[tuple[str, str, str]]:
    """(name, settings, one line) of every source, for `vitruvius list data`."""
    rows = []
    for name in data_sources:
        after = _traits(name).after_slash
        written = f"{name}/{after}" if after else name
        rows.append((written, "", first_line(data_sources[name])))
    return rows


def is_stream(config: DataConfig) -> bool:
    """Whether the data set that `config` names can only be read in order, image after image."""
    return _traits(config.dataset.partition("/")[0]).stream


def check_num_classes(config: DataConfig, place: str, found: int | None) -> int:
    """The number of classes, from the data or the recipe; they must agree unless a class map relates them.

    config: the recipe's `data:` section, whose `num_classes` counts.
    place: where the data are, for messages.
    found: how many classes the data have; None if they do not say.
    """
    wanted = config.num_classes
    if wanted is None:
        if found is None:
            raise DataError(f"{place} does not say how many classes it has; set data.num_classes.")
        return found
    if found is None:
        return wanted
    if found > wanted or (found < wanted and config.class_map is None):
        raise DataError(
            f"{place} has {found} classes, data.num_classes says {wanted}. "
            "Correct it, or map a subset with data.class_map."
        )
    return wanted


def existing_folder(root: str | None) -> Path:
    """The folder itself, or an error that says what is wrong with it. `root` is what `data.root` says."""
    if root is None:
        raise DataError("data.root is not set; it must name the folder that holds the images.")
    path = Path(root).expanduser()
    if not path.is_dir():
        kind = "is a file" if path.is_file() else "does not exist"
        raise DataError(f"data folder {path} {kind}; set data.root to the folder that holds the images.")
    return path


def _traits(kind: str) -> Traits:
    return _TRAITS.get(kind, Traits())
