"""The verb `analyse` as a command uses it: open the target, choose images, ask, keep table and figures in a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitruvius._checks import check_count
from vitruvius._files import Lock
from vitruvius._processes import Process, process_group
from vitruvius._progress import Bar
from vitruvius.analysis.analysing import analyse, split_asked
from vitruvius.analysis.explaining import ATTACK
from vitruvius.analysis.table import Table
from vitruvius.data import DataConfig, Loader, eval_loader
from vitruvius.data.base import is_stream
from vitruvius.evaluation.threats import make_threat
from vitruvius.models import PixelModel
from vitruvius.targets import Target, load_target_plugins, open_target

Draw = Callable[[Table, Path], Any]


def analyse_target(
    target: str,
    overrides: Sequence[str],
    names: Sequence[str],
    images: int | None = None,
    seed: int = 0,
    out: str | None = None,
    *,
    attack: str | None = ATTACK,
    draw: Draw | None = None,
) -> Table:
    """Analyse whatever names a model, on random images of its validation split.

    target: a run folder, a model's name, or another kind of target.
    overrides: settings of the target, `data.root=…`.
    names: analyses such as `gammas:variant=released`, and explanations such as `relevance`; all analyses if none is
        named.
    images: how many; default all.
    seed: chooses the images and chance.
    out: folder for table, curves and figures; by default `analysis` in the run, and none for a model by name.
    attack: explanations are also of the images after this attack, `pgd:eps=4/255` by default; None: clean alone.
    draw: called with the table and the folder, to draw what the table holds.
    """
    load_target_plugins(target, overrides)
    split_asked(names)  # a misspelt name is found before a model is loaded
    if attack is not None:
        make_threat(attack, where="--attack")
    if images is not None:
        check_count(images, "--images")
    opened = open_target(target, overrides)
    config = opened.config
    folder = _folder_for(opened, out)
    with process_group(config.device) as process:
        opened.model.to(process.device).eval()
        loader = open_images(config.data, opened.model, images, seed, process)
        facts = {"model": config.model.name, "target": Path(target).name}
        settings: dict[str, Any] = {"images": images, "seed": seed, "process": process, "facts": facts}
        with Bar("analysing", shown=process.first) as bar:
            table = analyse(opened.model, loader, *names, attack=attack, progress=bar, **settings)
        if folder is not None:
            process.on_first(lambda: keep(table, folder, opened, draw))
    return table


def _folder_for(target: Target, out: str | None) -> Path | None:
    if out:
        return Path(out)
    if target.is_run:
        return target.folder / "analysis"
    return None


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(analyses, overrides): `norms gammas:variant=released data.root=/imagenet`.

    `arguments` are the words of a command line behind the target, in any order.
    """
    is_override = ["=" in text and ":" not in text.partition("=")[0] for text in arguments]
    pairs = list(zip(arguments, is_override, strict=True))
    return [text for text, override in pairs if not override], [text for text, override in pairs if override]


def open_images(config: DataConfig, model: PixelModel, images: int | None, seed: int, process: Process) -> Loader:
    """The validation split as the model wants it, or `images` of it, chosen by `seed`; of a stream, its first ones.

    config: the data section of the target.
    model: whose input size and normalisation the images are prepared for.
    images: how many are chosen; None takes all.
    seed: of the choice.
    process: this one of several; the loader brings its share, on its device.
    """
    shares: dict[str, Any] = {
        "input_size": model.data_config,
        "rank": process.rank,
        "world_size": process.world_size,
        "device": process.device,
    }
    if images is None or is_stream(config):
        return eval_loader(config, **shares)
    whole = eval_loader(replace(config, val_num_samples=None), **shares)
    if images >= whole.num_images:
        return whole
    return eval_loader(config, only=_some(whole, images, seed), **shares)


def keep(table: Table, folder: Path, target: Target, draw: Draw | None) -> None:
    """Write the table and draw it; for a model without a run folder also its config, so that `report` can read it.

    table: what `analyse` returned.
    folder: is made if it does not exist; holds the table's files afterwards.
    target: what was analysed; its config is written where `folder` does not belong to a run.
    draw: called with the table and the folder; None draws nothing.
    """
    with Lock(folder):
        table.save(folder)
        if draw is not None:
            draw(table, folder)
        target.save_config(folder)


def _some(loader: Loader, images: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(loader.num_images, generator=generator)[:images].sort().values
