"""Calibrate: let squeezed attention begin as close to the dense one as its rank allows, one site after the other.

A projection of q and k on few heads loses pairs that matter. But scores do not care in which basis a head writes its
q and k, so the projections before the auto-encoder can be turned until little is lost: each site is fitted to give
the dense model's maps on a few images, min Σ KL(P ‖ P') over its own projections and auto-encoder. No labels are used.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitruvius._checks import in_eval_mode
from vitruvius._errors import ConfigError, DataError, SurgeryError
from vitruvius._progress import Progress, no_progress
from vitruvius.attention.low_rank import LowRank, fit_low_rank
from vitruvius.heads import Heads
from vitruvius.surgery.base import cores_of, inner
from vitruvius.surgery.rewiring import refuse_compiled

logger = logging.getLogger(__name__)

CLOSE = 1e-6  # a mean KL of maps that are equal but for rounding
Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a module was called with


class Lesson(NamedTuple):
    """What a site was given for one batch, and the maps it should answer with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    maps: Tensor  # (B, H, N, M)


def calibrate_low_rank(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    steps: int = 150,
    rate: float = 0.05,
    progress: Progress = no_progress,
) -> dict[str, tuple[float, float]]:
    """Fit every `low_rank` of the model to the maps it has without; in place. Mean KL of each site, before and after.

    `batches` are images as the model takes them; a few hundred do. Adam runs over them in turn, `steps` times a site,
    its steps at first `rate` times the size of what they change, falling to nothing. Of the model only the sites' own
    q and k projections and auto-encoders change, and a site that comes no closer is left as it was. `progress` counts
    sites; the log has a line about each.
    """
    refuse_compiled(model)
    if steps < 1 or not rate > 0:
        raise ConfigError(f"calibration with steps={steps}, rate={rate}; expected at least 1 and a rate above 0.")
    stages = _stages(model)
    images = list(batches)
    if not images:
        raise DataError("calibration got no images; it needs at least one batch.")
    fit_low_rank(model, images)  # principal heads: none begins at zero in both q and k, where its gradient is zero too
    dense = copy.deepcopy(model).eval().requires_grad_(False)
    for stage in _stages(dense).values():
        stage.register_forward_hook(lambda _, args, __: args[0])
    calls = _calls(dense, list(stages), images)
    losses: dict[str, tuple[float, float]] = {}
    for number, (name, stage) in enumerate(stages.items(), 1):
        lessons = _lessons(dense, name, calls.pop(name))
        before, after = losses[name] = _fit(inner(model).get_submodule(name), stage, lessons, steps, rate)
        progress(number, len(stages), name)
        logger.info(
            "calibrated %s, %d of %d: KL from the dense maps %.3g, now %.3g", name, number, len(stages), before, after
        )
        if not after < before and before > CLOSE:
            logger.warning(
                "%s came no closer to the dense maps (KL %.3g) and was left as it was; lower rate.", name, before
            )
    return losses


def _stages(model: nn.Module) -> dict[str, LowRank]:
    """The auto-encoder of every site that has one."""
    parts = {name: core.children() for name, core in cores_of(model).items()}
    stages = {name: part for name in parts for part in parts[name] if isinstance(part, LowRank)}
    if not stages:
        raise SurgeryError("the model has no 'low_rank' part to calibrate; rewire it first.")
    return stages


@torch.no_grad()
def _calls(dense: nn.Module, names: Sequence[str], images: Sequence[Tensor]) -> dict[str, list[Call]]:
    """What every site of the dense model is called with, batch by batch, in one pass over the images."""
    calls: dict[str, list[Call]] = {name: [] for name in names}
    with contextlib.ExitStack() as hooks:
        for name in names:
            hook = functools.partial(lambda calls, _, args, kwargs: calls.append((args, kwargs)), calls[name])
            site = inner(dense).get_submodule(name)
            hooks.enter_context(site.register_forward_pre_hook(hook, with_kwargs=True))
        for batch in images:
            dense(batch)
    return calls


@torch.no_grad()
def _lessons(dense: nn.Module, name: str, calls: Sequence[Call]) -> list[Lesson]:
    """The maps that one site of the dense model gives when it is called so."""
    site = inner(dense).get_submodule(name)
    maps: list[Tensor] = []
    with _stages(dense)[name].register_forward_hook(lambda _, args, __: maps.append(_log_map(args[0]).exp())):
        for args, kwargs in calls:
            site(*args, **kwargs)
    return [Lesson(*call, each) for call, each in zip(calls, maps, strict=True)]


def _fit(site: nn.Module, stage: LowRank, lessons: Sequence[Lesson], steps: int, rate: float) -> tuple[float, float]:
    """Adam over one site's parameters; the mean KL over all lessons before and after."""
    trained = {parameter: parameter.requires_grad for parameter in site.parameters()}
    before = {parameter: parameter.detach().clone() for parameter in trained}
    sizes = {p: max(value.square().mean().sqrt().item(), 0.02) for p, value in before.items()}  # biases may be zero
    site.requires_grad_(True)
    optimizer = torch.optim.Adam([{"params": [p], "lr": rate * size} for p, size in sizes.items()])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    @torch.no_grad()
    def mean_loss() -> float:
        return float(torch.stack([_loss(site, stage, lesson) for lesson in lessons]).mean())

    closer = False
    try:
        with in_eval_mode(site):
            first = mean_loss()
            for step in range(steps):
                optimizer.zero_grad(set_to_none=True)
                _loss(site, stage, lessons[step % len(lessons)]).backward()
                optimizer.step()
                schedule.step()
            last = mean_loss()
        closer = last < first  # false where it is not a number
    finally:
        for parameter, flag in trained.items():
            if not closer:
                parameter.detach().copy_(before[parameter])
            parameter.requires_grad_(flag).grad = None
    return first, last if closer else first


def _loss(site: nn.Module, stage: LowRank, lesson: Lesson) -> Tensor:
    """Mean KL of the maps a site should give from those it gives, over queries."""
    seen: list[Heads] = []
    with stage.register_forward_hook(lambda _, __, heads: seen.append(heads)):
        site(*lesson.args, **lesson.kwargs)
    given = _log_map(seen[0])
    gaps = torch.xlogy(lesson.maps, lesson.maps) - torch.where(lesson.maps > 0, lesson.maps * given, 0.0)
    return gaps.sum(-1).mean()


def _log_map(heads: Heads) -> Tensor:
    """log softmax(q kᵀ scale + bias), (B, H, N, M)."""
    scores = heads.q @ heads.k.mT * heads.scale
    if heads.bias is not None:
        scores = scores + heads.bias
    return torch.log_softmax(scores, -1)
