"""What the classes of a data set are called: the names of folders, and words for WordNet ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from vitruvius.data._config import DataConfig
from vitruvius.data.base import is_stream, open_data


def class_words(config: DataConfig) -> tuple[str, ...]:
    """What people call each class, by its number; empty where the data have only numbers, and for a stream.

    `config` is a recipe's `data:` section.
    """
    if is_stream(config):
        return ()
    return in_words(getattr(open_data(config, config.val_split, (3, 1, 1)), "class_names", ()))


def in_words(names: Sequence[str]) -> tuple[str, ...]:
    """The same names, with ImageNet's first word for a WordNet id, all its words where others share the first."""
    lemmas = _lemmas()
    whole = [lemmas.get(name, name) for name in names]
    first = [words.split(", ")[0] if name in lemmas else name for name, words in zip(names, whole, strict=True)]
    words = []
    for name, long, short in zip(names, whole, first, strict=True):
        if first.count(short) == 1:
            words.append(short)
        else:
            words.append(long if whole.count(long) == 1 else f"{long} ({name})")
    return tuple(words)


@cache
def _lemmas() -> dict[str, str]:
    """WordNet id → words, such as `tench, Tinca tinca`."""
    from timm.data import ImageNetInfo

    every = [ImageNetInfo(subset).label_descriptions(as_dict=True) for subset in ("imagenet-22k", "imagenet-1k")]
    return {**every[0], **every[1]}
