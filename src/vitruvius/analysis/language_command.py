"""`vitruvius analyse MODEL --text …`: open an encoder and sentences, ask, keep table and figures in a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vitruvius._checks import check_count
from vitruvius._errors import ConfigError, DataError
from vitruvius._files import atomic_write_text, read_text
from vitruvius._processes import choose_device
from vitruvius._progress import Bar
from vitruvius._registry import require
from vitruvius._yaml import dump_yaml
from vitruvius.analysis._run import ask_all
from vitruvius.analysis._table import Table
from vitruvius.analysis.language import analyse_text, encode, load_encoder

Draw = Callable[[Table, Path], Any]
DEVICE = "device="
HUB = "hf:"
SENTENCES = 100
WIKITEXT = "wikitext"
SHORTEST = 30  # characters: shorter lines of WikiText are headings and blanks, which the reproduction study leaves out


def analyse_text_target(
    name: str,
    text: str,
    overrides: Sequence[str],
    asked: Sequence[str],
    sentences: int | None = None,
    seed: int = 0,
    out: str | None = None,
    *,
    max_length: int = 128,
    draw: Draw | None = None,
) -> Table:
    """Analyse a language model on sentences.

    name: of an encoder: an id on the hub or a folder, with or without `hf:`.
    text: a file with one sentence per line, or `wikitext`: the test split of WikiText-103, which `datasets` fetches.
    overrides: `device=cpu`; a language model has no other settings.
    asked: analyses such as `norms`; default: norms and value_vectors.
    sentences: how many, a random choice; default 100.
    seed: chooses the sentences and chance.
    out: folder for table and figures; default: none is written.
    max_length: tokens of a sentence; longer ones are cut.
    draw: called with the table and the folder, to draw what the table holds.
    """
    device = _device(overrides)
    ask_all(asked or ("norms",))  # a misspelt name is found before a model is loaded
    check_count(max_length, "--max-length")
    if sentences is not None:
        check_count(sentences, "--images")
    chosen = choose(read_sentences(text), sentences or SENTENCES, seed)
    model, tokenizer = load_encoder(name.removeprefix(HUB))
    batches = encode(tokenizer, chosen, max_length=max_length)
    facts = {"model": name, "data": text}
    with Bar("analysing") as bar:
        table = analyse_text(model.to(choose_device(device)), batches, *asked, seed=seed, progress=bar, facts=facts)
    if out is not None:
        _keep(table, Path(out), name, draw)
    return table


def read_sentences(text: str) -> list[str]:
    """The sentences of a file, or of WikiText-103.

    text: the path of a file with one sentence per line; empty lines are left out. Or `wikitext`.
    """
    if text == WIKITEXT:
        return _wikitext()
    if not Path(text).is_file():
        raise DataError(f"--text {text}: there is no such file. Give a file with one sentence per line, or wikitext.")
    lines = [line.strip() for line in read_text(text).splitlines()]
    found = [line for line in lines if line]
    if not found:
        raise DataError(f"--text {text}: the file holds no sentences; expected one per line.")
    return found


def choose(sentences: Sequence[str], count: int, seed: int) -> list[str]:
    """At most `count` of the `sentences`, chosen by `seed`, in their order."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(len(sentences), generator=generator)[:count].sort().values
    return [sentences[place] for place in places.tolist()]


def _wikitext() -> list[str]:
    """Lines of the test split that are longer than a heading, as in the reproduction study."""
    datasets: Any = require("datasets", "nlp")
    try:
        lines = datasets.load_dataset("Salesforce/wikitext", "wikitext-103-raw-v1", split="test")["text"]
    except (OSError, ValueError) as error:
        raise DataError(
            f"WikiText-103 cannot be fetched: {str(error).splitlines()[0]} Without a network, save its sentences in a "
            "file, one per line, and say --text FILE."
        ) from error
    return [line.strip() for line in lines if len(line.strip()) > SHORTEST]


def _device(overrides: Sequence[str]) -> str:
    device = "auto"
    for setting in overrides:
        if not setting.startswith(DEVICE):
            raise ConfigError(f"{setting!r} means nothing to a language model; with --text only device=… can be said.")
        device = setting.removeprefix(DEVICE)
    return device


def _keep(table: Table, folder: Path, name: str, draw: Draw | None) -> None:
    """Write the table and draw it; config.yaml says which model, so that `report` can read the folder."""
    table.save(folder)
    if draw is not None:
        draw(table, folder)
    atomic_write_text(folder / "config.yaml", dump_yaml({"model": {"name": name}}))
