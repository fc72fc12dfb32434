"""What data are: images by number or in memory, sources registered by name, and which of the images are used.

`dataset: npz` and `dataset: torch/cifar10` ask for the sources `npz` and `torch`; what follows the slash is for
the source to read. A source is one file of `sources`, or a plugin module that uses `data_source`.
N images, C channels, H height, W width
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from vitruvius._checks import check_labels
from vitruvius._errors import DataError, suggest
from vitruvius._files import is_url
from vitruvius._random import image_keys, seed_of
from vitruvius._registry import Registry, first_line
from vitruvius._secrets import redact
from vitruvius.data._config import DataConfig
from vitruvius.data._config import Mix as Mix
from vitruvius.data.classes import IMAGENET, class_names, in_words, read_class_map, subset_names

UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)
TRAIN_NAMES = ("train", "training")
VALIDATION_NAMES = ("val", "valid", "validation", "eval", "evaluation")

Size = tuple[int, int, int]  # channels, height, width of the model's input
InputSize = Mapping[str, Any] | Sequence[int]  # timm's data config of the model, or (channels, height, width)


class ImageSet(Protocol):
    """Images by number."""

    @property
    def name(self) -> str: ...

    @property
    def num_classes(self) -> int: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Decoded image and label; raises one of UNREADABLE if the image is broken. `index` counts from 0."""
        ...

    def describe(self, index: int) -> str:
        """Where the image is, for messages."""
        ...


@dataclass(frozen=True, kw_only=True)
class TensorSet:
    """Images and labels in memory."""

    name: str
    images: Tensor  # (N, C, H, W), uint8 or float32 in [0, 1]
    labels: Tensor  # (N,)
    num_classes: int
    pad: int = 0  # pixels of shift that suit the data, if the recipe does not say
    hflip: float = 0.0
    rows: Tensor | None = None  # id → row, -1 where there is none; None: ids are rows
    broken: tuple[str, ...] = ()
    decoded: bool = False  # whether these are images of another source, decoded once and otherwise as they are
    class_names: tuple[str, ...] = ()  # by number, where the data tell

    def __post_init__(self) -> None:
        check_labels(self.labels, where=f"{self.name}: the")

    def __len__(self) -> int:
        return len(self.labels) if self.rows is None else len(self.rows)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """One image as 8-bit PIL, for augmentations that work on those."""
        pixels = to_pixels(self.images[index]).mul(255).round().byte().movedim(0, -1).numpy()
        return Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels), int(self.labels[index])

    def describe(self, index: int) -> str:
        return f"image {index} of {self.name}"

    @property
    def pixels(self) -> Tensor:
        return self.images


AnySet = TensorSet | ImageSet
Open = Callable[..., Any]  # (config, split, size) → TensorSet or ImageSet; streams: see streams.py


def to_pixels(images: Tensor) -> Tensor:
    """uint8 → float32 in [0, 1]; floats are pixels already."""
    return images.float().div_(255) if images.dtype == torch.uint8 else images.float()


data_sources: Registry[Open] = Registry("data set", "data", homes=["vitruvius.data.sources"])


@dataclass(frozen=True)
class data_source:
    """Decorator: make a function `(config, split, size)` the source of `dataset: name`.

    The function gets the recipe's `data:` section, the name of the split and the model's input size (channels, height,
    width), and returns a `TensorSet` or anything that has what `ImageSet` asks for; a stream: see `sources/streams.py`.

    name: the word in `dataset:`, before the slash if there is one.
    after_slash: what a recipe writes after the slash, e.g. "<name>"; "" if nothing follows.
    root: what `data.root` must name, e.g. "the folder that holds the images": it is checked before the source is
        opened, unless the data are to be downloaded; "" leaves it to the source; None: it is not read, and refused.
    class_names, class_map: whether the source itself heeds `data.classes` and `data.class_map`; otherwise the key is
        refused.
    wordnet: whether its classes are folders named by WordNet ids, which `class_map: imagenet-1k` numbers.
    files: whether its images are files, which `data.subset` chooses by name.
    stream: whether the data can only be read in order.
    """

    name: str
    _: KW_ONLY
    after_slash: str = ""
    root: str | None = ""
    class_names: bool = False
    class_map: bool = False
    wordnet: bool = False
    files: bool = False
    stream: bool = False

    def __call__(self, opener: Open) -> Open:
        registered = data_sources.register(self.name)(opener)
        _TRAITS[self.name] = self
        return registered


_TRAITS: dict[str, data_source] = {}


def open_data(config: DataConfig, split: str, size: Size) -> AnySet:
    """The data set that `config` names, opened: what is wrong with it is an error here.

    `size` is the model's input; only `fake` images are made to fit it.
    """
    check_data(config)
    opener, traits = find_source(config.dataset)
    if traits.stream:
        raise DataError(f"{config.dataset} is a stream and has no images by number; choose another data set.")
    return opener(config, split, size)


def check_data(config: DataConfig) -> None:
    """Refuse what is wrong with a `config` without opening the data: an unknown set, files that are not there."""
    _, traits = find_source(config.dataset)
    if config.classes is not None:
        if not traits.class_names:
            raise DataError(f"data.classes chooses classes by name, {config.dataset} has none; use folder or torch/….")
        class_names(config.classes)
    if traits.root is None and config.root is not None:
        raise DataError(f"data.root={redact(config.root)} is not read: {config.dataset} needs no files. Leave it out.")
    if traits.root and not (config.download and config.root):
        _check_root(config.root, traits.root)
    if config.class_map is not None:
        if not (traits.class_map or traits.wordnet) or (config.class_map == IMAGENET and not traits.wordnet):
            raise DataError(f"data.class_map={config.class_map} cannot number the classes of {config.dataset}.")
        read_class_map(config.class_map, Path(config.root or ".").expanduser())
    if config.subset is not None:
        if not traits.files:
            raise DataError(f"data.subset={config.subset} chooses images by file name; {config.dataset} has none.")
        subset_names(config.subset)


def _check_root(root: str | None, what: str) -> None:
    if root is None:
        raise DataError(f"data.root is not set; it must name {what}.")
    path = Path(root).expanduser()
    if is_url(root) or path.is_dir() or (path.exists() and "folder" not in what):
        return
    state = "is a file" if path.exists() else "does not exist"
    raise DataError(f"data.root {path} {state}; it must name {what}.")


def find_source(dataset: str) -> tuple[Open, data_source]:
    """The function that opens a data set, and what it said of itself; a name that nobody registered is an error."""
    kind, slash, _ = dataset.partition("/")
    traits = _traits(kind)
    if kind not in data_sources or bool(slash) != bool(traits.after_slash):
        known = [f"{name}/…" if _traits(name).after_slash else name for name in data_sources]
        raise DataError(f"no data set named {dataset!r}{suggest(dataset, known)} Known: {', '.join(known)}.")
    return data_sources[kind], traits


def describe_sources() -> list[tuple[str, str, str]]:
    """(name, settings, one line) of every source, for `vitruvius list data`."""
    afters = {name: _traits(name).after_slash for name in data_sources}
    return [(f"{name}/{a}" if a else name, "", first_line(data_sources[name])) for name, a in afters.items()]


def is_stream(config: DataConfig) -> bool:
    """Whether the data set that `config` names can only be read in order, image after image."""
    return _traits(config.dataset.partition("/")[0]).stream


def class_words(config: DataConfig) -> tuple[str, ...]:
    """What people call each class, by its number; empty where the data have only numbers, and for a stream."""
    if is_stream(config):
        return ()
    return in_words(getattr(open_data(config, config.val_split, (3, 1, 1)), "class_names", ()))


def _traits(kind: str) -> data_source:
    return _TRAITS[kind] if kind in data_sources else data_source(kind)  # looked up first, which imports its file


def check_num_classes(config: DataConfig, place: str, found: int | None) -> int:
    """The number of classes, from the data or the recipe; they must agree unless a class map relates them."""
    wanted = found if config.num_classes is None else config.num_classes
    if wanted is None:
        raise DataError(f"{place} does not say how many classes it has; set data.num_classes.")
    if found is not None and (found > wanted or (found < wanted and config.class_map is None)):
        advice = "Correct it, or map a subset with data.class_map."
        raise DataError(f"{place} has {found} classes, data.num_classes says {wanted}. {advice}")
    return wanted


def split_folder(root: Path, split: str) -> Path:
    """The folder of a split: its name or a synonym, such as val or validation; `.` is the root itself."""
    synonyms = next((names for names in (TRAIN_NAMES, VALIDATION_NAMES) if split in names), ())
    for name in (split, *synonyms):
        if (root / name).is_dir():
            return root / name
    tried = ", ".join(dict.fromkeys((split, *synonyms)))
    advice = "If the classes' folders lie directly in the root, write '.' as the name of the split."
    raise DataError(f"no folder for the split {split!r} in {root} (tried {tried}). {advice}")


def chosen_ids(data: AnySet, limit: int | None, *, without: Tensor | None = None, only: Tensor | None = None) -> Tensor:
    """Ids of all images of a data set, of at most `limit` of them, or those that are asked for.

    limit: how many images at most, a fixed random choice; None means all.
    without: ids to leave out.
    only: exactly these ids, checked; then `limit` and `without` do not count.
    """
    number = len(data)
    if only is not None:
        if len(only) and not 0 <= int(only.min()) <= int(only.max()) < number:
            raise DataError(f"{data.name} has {number} images; ids must lie between 0 and {number - 1}.")
        return only
    ids = torch.arange(number) if limit is None or limit >= number else choice(number, limit, seed=0)
    return ids if without is None else ids[~torch.isin(ids, without)]


def smallest_of_each_class(labels: Tensor, wanted: float) -> Tensor:
    """(N,) which images have the smallest hashed numbers of their class, for ever: so many, or below 1 such a share."""
    rank = image_keys(torch.arange(len(labels)), torch.zeros(len(labels), dtype=torch.int64), seed=0, epoch=0)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        count = round(wanted * len(members)) if wanted < 1 else round(wanted)
        chosen[members[rank[members].argsort()[:count]]] = True
    return chosen


def choice(number: int, count: int, seed: int) -> Tensor:
    """`count` of `number` ids, a fixed random choice, sorted."""
    generator = torch.Generator().manual_seed(seed_of(seed))
    return torch.randperm(number, generator=generator)[:count].sort().values
