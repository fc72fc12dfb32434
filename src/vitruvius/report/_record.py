"""What only the model itself can tell a report: where it looks in a few images, and what it is made of."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitruvius._errors import NoSiteError
from vitruvius._files import atomic_write_text
from vitruvius.heads import Site
from vitruvius.report._examples import save_examples
from vitruvius.surgery import inner, record, survey
from vitruvius.surgery.recording import map_of


@torch.no_grad()
def record_examples(
    run: str | Path, model: nn.Module, images: Tensor, labels: Sequence[str | int] = (), *, where: str = "*"
) -> list[str]:
    """Run the model on a few images (n, 3, h, w) and keep its attention for the viewer; the sites that were kept.

    A map holds the weights that a core really gives to its values (`Core.map`); a core without one is refused by name.
    Sites whose queries and keys do not lie on one grid (windows, channels, downsampling) have no place here.
    Train or eval mode is the caller's.

    run: the folder in which they are kept.
    model: rewired or bare, in eval mode as a rule.
    images: pixels in [0, 1].
    labels: what is written below each image, names or numbers; default: none.
    where: a glob over site names; default: all sites.
    """
    sites = survey(model)
    with record(model, where) as seen:
        predictions = model(images).argmax(-1).tolist()
    shown = [site for name in seen if _lies_on_grid(site := sites[name])]
    if not shown:
        raise NoSiteError(f"none of the {len(sites)} attention sites attends over a grid of patches; nothing to view.")
    maps = {site.name: map_of(model, site.name, seen[site.name]).cpu() for site in shown}
    places = {site.name: {"grid": site.grid, "num_prefix_tokens": site.num_prefix_tokens} for site in shown}
    first = shown[0]
    assert first.grid is not None
    save_examples(
        run,
        images=images.cpu(),
        maps=maps,
        grid=first.grid,
        num_prefix_tokens=first.num_prefix_tokens,
        labels=labels,
        predictions=predictions,
        sites={name: place for name, place in places.items() if place != places[first.name]},
    )
    return list(maps)


def save_model_facts(run: str | Path, model: nn.Module) -> None:
    """Write model.json: parameters of the model, and each attention site with its core.

    `run` is the folder, `model` rewired or bare.
    """
    try:
        sites = survey(model)
    except NoSiteError:
        sites = {}
    facts = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "sites": [{**dataclasses.asdict(site), "core": _core(model, name)} for name, site in sites.items()],
    }
    atomic_write_text(Path(run) / "model.json", json.dumps(facts, indent=1))


def _lies_on_grid(site: Site) -> bool:
    return site.attends == "tokens" and site.grid is not None and site.num_queries == site.num_keys


def _core(model: nn.Module, name: str) -> str:
    core: Any = getattr(inner(model).get_submodule(name), "core", None)
    if core is None:
        return "upstream"
    return str(core.describe())
