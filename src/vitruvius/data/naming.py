"""What the classes of a data set are called: the names of folders, and words for WordNet ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from timm.data import ImageNetInfo

from vitruvius.data._config import DataConfig
from vitruvius.data.sources import is_stream, open_data


def class_words(config: DataConfig) -> tuple[str, ...]:
    """What people call each class, by its number; empty where the data have only numbers.

    config: a recipe's `data:` section. A stream is not opened and has no words.
    """
    if is_stream(config):
        return ()
    names = getattr(open_data(config, config.val_split, (3, 1, 1)), "class_names", ())
    return in_words(names)


def in_words(names: Sequence[str]) -> tuple[str, ...]:
    """The same names, with the first word that ImageNet has for a WordNet id; all words where others share the first.

    names: one per class, such as n01440764.
    """
    lemmas = _lemmas()
    whole = [lemmas.get(name, name) for name in names]
    first = [words.split(", ")[0] if name in lemmas else name for name, words in zip(names, whole, strict=True)]
    found = []
    for name, words, word in zip(names, whole, first, strict=True):
        if first.count(word) == 1:
            found.append(word)
        elif whole.count(words) == 1:
            found.append(words)
        else:
            found.append(f"{words} ({name})")
    return tuple(found)


@cache
def _lemmas() -> dict[str, str]:
    """WordNet id → words, such as `tench, Tinca tinca`."""
    found: dict[str, str] = {}
    for subset in ("imagenet-22k", "imagenet-1k"):
        found |= ImageNetInfo(subset).label_descriptions(as_dict=True)
    return found
