"""What only the model itself can tell a report: where it looks in a few images, and what it is made of."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitruvius._errors import DataError, NoSiteError, UnsuitableSite
from vitruvius._files import atomic_write_text
from vitruvius.analysis.explanations import relevance
from vitruvius.heads import Site
from vitruvius.report._examples import Examples, SiteMaps, save_examples
from vitruvius.report.sections.viewer import MAX_BYTES, fit
from vitruvius.surgery import inner, record, survey
from vitruvius.surgery.recording import map_of


def record_examples(
    run: str | Path,
    model: nn.Module,
    images: Tensor,
    labels: Sequence[str | int] = (),
    *,
    where: str = "*",
    attacked: Tensor | None = None,
    threat: str = "attacked",
    names: Sequence[str] = (),
    pictures: Sequence[str] = (),
) -> list[str]:
    """Run the model on a few images (n, 3, h, w) and keep its attention for the viewer; the sites that were kept.

    A map holds the weights that a core really gives to its values (`Core.map`); a core without one is refused by name.
    Sites whose queries and keys do not lie on one grid (windows, channels, downsampling) have no place here. Where
    relevance can be followed through the layers it is kept too; that needs eval mode. Else train or eval mode is the
    caller's.

    run: the folder that gets attention.safetensors and attention.json.
    model: what is run.
    images: in [0, 1].
    labels: what the images show, one per image; default unknown.
    where: a glob over the names of sites; default all.
    attacked: the same images attacked, shown beside them; default none.
    threat: what was done to those, in words.
    names: what classes are called, by their numbers; default their numbers.
    pictures: a name for each picture, the same in all runs that are to be compared on it; default their numbers.
    """
    views = _views(images, attacked)
    looks = [_look(model, view, where) for view in views]
    examples = Examples(
        images=_pixels(torch.cat(views)),
        labels=_named(labels, names, otherwise=[""] * len(images)) * len(views),
        predictions=_named(
            [answer for look in looks for answer in look.predictions], names, otherwise=[""] * len(images) * len(views)
        ),
        sites=_joined(looks),
        pictures=_named(pictures, (), otherwise=[str(place) for place in range(len(images))]) * len(views),
        threats=[""] * len(images) + [threat] * len(images) * (len(views) - 1),
        relevance=_relevance(model, views, looks),
    )
    fitted, _ = fit(examples, MAX_BYTES)
    _save(run, fitted)
    return [site.name for site in examples.sites]


class _Look(NamedTuple):
    """What a model answers to some images, and its maps by site."""

    predictions: list[int]  # none of a model without a head
    maps: dict[str, Tensor]  # (n, H, N, N)
    sites: list[Site]


@torch.no_grad()
def _look(model: nn.Module, images: Tensor, where: str) -> _Look:
    sites = survey(model)
    with record(model, where) as seen:
        predictions = model(images).argmax(-1).tolist()
    if getattr(inner(model), "num_classes", None) == 0:  # features, of which the largest is not a class
        predictions = []
    shown = [site for name in seen if _lies_on_grid(site := sites[name])]
    if not shown:
        raise NoSiteError(f"none of the {len(sites)} attention sites attends over a grid of patches; nothing to view.")
    maps = {site.name: map_of(model, site.name, seen[site.name]).cpu() for site in shown}
    return _Look(predictions, maps, shown)


def _joined(looks: Sequence[_Look]) -> list[SiteMaps]:
    """The maps of all views, one after the other, site by site."""
    found = []
    for site in looks[0].sites:
        assert site.grid is not None
        maps = torch.cat([look.maps[site.name] for look in looks]).half().numpy()
        found.append(SiteMaps(name=site.name, maps=maps, grid=site.grid, num_prefix_tokens=site.num_prefix_tokens))
    return found


def _relevance(model: nn.Module, views: Sequence[Tensor], looks: Sequence[_Look]) -> np.ndarray | None:
    """What the answers rest on, (n, rows, columns); None where it cannot be followed through the model."""
    if model.training or not looks[0].predictions:
        return None
    maps = []
    try:
        for view, look in zip(views, looks, strict=True):
            answers = torch.tensor(look.predictions, device=view.device)
            maps.append(relevance(model, view, answers).float().cpu())
    except (UnsuitableSite, NoSiteError):
        return None
    return torch.cat(maps).numpy()


def _views(images: Tensor, attacked: Tensor | None) -> list[Tensor]:
    if attacked is None:
        return [images]
    if attacked.shape != images.shape:
        raise DataError(f"attacked images are {tuple(attacked.shape)}, expected {tuple(images.shape)} as the others.")
    return [images, attacked]


def _named(labels: Sequence[str | int], names: Sequence[str], otherwise: Sequence[str] = ()) -> list[str]:
    """Classes by name where they have one; else as they are. Without labels, `otherwise`."""
    found = []
    for label in labels:
        if isinstance(label, int) and 0 <= label < len(names):
            found.append(names[label])
        else:
            found.append(str(label))
    return found or list(otherwise)


def _pixels(images: Tensor) -> np.ndarray:
    """(n, 1 or 3, h, w) in [0, 1] → uint8 (n, 3, h, w)."""
    return (images.float() * 255).round().clamp(0, 255).byte().expand(-1, 3, -1, -1).cpu().numpy()


def _save(run: str | Path, examples: Examples) -> None:
    first = examples.sites[0]
    others = {}
    for site in examples.sites:
        if (site.grid, site.num_prefix_tokens) != (first.grid, first.num_prefix_tokens):
            others[site.name] = {"grid": site.grid, "num_prefix_tokens": site.num_prefix_tokens}
    relevance = examples.relevance
    save_examples(
        run,
        images=torch.from_numpy(examples.images.copy()),
        maps={site.name: torch.from_numpy(site.maps) for site in examples.sites},
        grid=first.grid,
        num_prefix_tokens=first.num_prefix_tokens,
        labels=examples.labels,
        predictions=examples.predictions,
        sites=others,
        pictures=examples.pictures,
        threats=examples.threats,
        relevance=None if relevance is None else torch.from_numpy(relevance),
    )


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
