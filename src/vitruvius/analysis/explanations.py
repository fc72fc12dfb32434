"""Explanations: which patches an answer rests on, and how well removing or showing them agrees.

`relevance` follows gradient-weighted attention through all layers (Chefer, Gur & Wolf 2021, arXiv:2103.15679),
`attention_gradient` takes the last layer alone, `integrated_gradients` is captum's (Sundararajan et al. 2017,
arXiv:1703.01365). The output of a core is its map times the values, so the gradient of the map is g vᵀ, with g that of
the output: no map need be kept in the graph, and fused kernels do. B images, H heads, N tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius._checks import check_count, check_eval_mode, check_head, check_pixels
from vitruvius._errors import ConfigError, DataError, UnsuitableSite
from vitruvius._registry import Registry, require
from vitruvius.attacks.base import explain_images
from vitruvius.attention.base import Kernel
from vitruvius.heads import Heads, Site
from vitruvius.surgery import record, survey
from vitruvius.surgery.recording import core_of, map_of

Explanation = Callable[..., Tensor]  # (model, images, classes) → (B, rows, columns), large where the answer rests
explanations: Registry[Explanation] = Registry("explanation")


class Layer(NamedTuple):
    """One site on some images."""

    site: Site
    map: Tensor  # (B, H, N, N)
    gradient: Tensor  # (B, H, N, N), of the logits asked for


def explain(
    model: nn.Module, images: Tensor, explanation: str | Explanation = "relevance", *, classes: Tensor | None = None
) -> Tensor:
    """How much each place of each image matters for a class, (B, rows, columns).

    model: in eval mode.
    images: (B, 3, h, w) in [0, 1].
    explanation: a registered name with settings, `"integrated_gradients:steps=20"`, or a function.
    classes: (B) those asked about; default: those the model answers.
    """
    check_eval_mode(model)
    check_head(model)
    if not isinstance(images, Tensor) or images.dim() != 4:
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise DataError(f"images are {got}; expected a tensor (B, channels, rows, columns), of one image image[None].")
    check_pixels(images)
    try:
        if classes is None:
            with torch.no_grad():
                classes = model(images).argmax(-1)
        if classes.shape != images.shape[:1]:
            raise ConfigError(
                f"classes have shape {tuple(classes.shape)}; expected one class per image, ({len(images)},)."
            )
        maps: Tensor = explanations.bind(explanation, where="explanation")(model, images, classes)
    except (AssertionError, RuntimeError, ValueError) as error:
        explain_images(model, images, error)
        raise
    return maps


@explanations.register("relevance")
def relevance(model: nn.Module, images: Tensor, classes: Tensor, sites: Mapping[str, Site] | None = None) -> Tensor:
    """Gradient-weighted attention through all layers, R ← R + relu(A ⊙ ∇A) R (Chefer et al. 2021, arXiv:2103.15679).

    The sites must attend over the same tokens in every layer.
    """
    layers = attended_layers(model, images, classes, sites)
    first = layers[0].map
    flow = torch.eye(first.shape[-1], dtype=first.dtype, device=first.device).expand_as(first[:, 0])  # (B, N, N)
    for layer in layers:
        step = (layer.map * layer.gradient).relu().mean(1)
        if flow.shape != step.shape:
            raise UnsuitableSite(
                f"'relevance' follows {flow.shape[-1]} tokens through the layers; {layer.site.name!r} has "
                f"{step.shape[-1]}. Models that merge or shift tokens cannot be followed."
            )
        flow = flow + step @ flow
    return _on_grid(flow, layers[-1].site)


@explanations.register("attention_gradient")
def attention_gradient(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """relu(A ⊙ ∇A) of the last layer, mean over heads (Chefer et al. 2021, arXiv:2103.15679, one step)."""
    last = attended_layers(model, images, classes)[-1]
    return _on_grid((last.map * last.gradient).relu().mean(1), last.site)


@explanations.register("integrated_gradients")
def integrated_gradients(model: nn.Module, images: Tensor, classes: Tensor, *, steps: int = 50) -> Tensor:
    """Gradients along the way from a black image, captum's (Sundararajan et al. 2017, arXiv:1703.01365).

    model: any that returns logits, with or without attention.
    steps: points on the way from black to the image, of which each costs a forward and a backward pass.
    """
    check_count(steps, "'integrated_gradients' got steps")
    captum: Any = require("captum.attr", "explain")
    gradients: Tensor = captum.IntegratedGradients(model).attribute(images, target=classes, n_steps=steps)
    return gradients.sum(1).abs().detach()


def attended_layers(
    model: nn.Module, images: Tensor, classes: Tensor, sites: Mapping[str, Site] | None = None
) -> list[Layer]:
    """Every token site in order: its true map, and the gradient of the logits of `classes` (B,) with respect to it.

    `sites` are what `survey` found, where that is known already.
    """
    if sites is None:
        sites = survey(model, input_size=tuple(images.shape[1:]))  # type: ignore[arg-type]
    chosen = [name for name, site in sites.items() if site.attends == "tokens" and site.num_queries == site.num_keys]
    if not chosen:
        raise UnsuitableSite(f"none of the {len(sites)} attention sites attends over tokens; nothing to follow.")
    outputs: dict[str, Tensor] = {}
    with torch.enable_grad(), record(model, chosen, detach=False, sites=sites) as seen, ExitStack() as hooks:
        for name in chosen:
            core: Any = core_of(model, name)
            keep = functools.partial(lambda name, _, __, out: outputs.__setitem__(name, out), name)
            hooks.enter_context(core.register_forward_hook(keep))
        logits = model(images.detach().clone().requires_grad_())
        total = logits.gather(1, classes[:, None]).sum()
        gradients = torch.autograd.grad(total, [outputs[name] for name in chosen])
        with torch.no_grad():
            return [_layer(model, sites[n], seen[n], g) for n, g in zip(chosen, gradients, strict=True)]


def _layer(model: nn.Module, site: Site, heads: Heads, gradient: Tensor) -> Layer:
    core = core_of(model, site.name)
    assert core is not None
    if type(core.kernel).finish is not Kernel.finish or core.kernel.takes_context:
        raise UnsuitableSite(
            f"{core.describe()} at {site.name!r} does more than weigh values (a norm or a gate behind the sum), so the "
            "gradient of its map is not to be had from its output."
        )
    values = core.run_stages(heads).heads.v if any(s.adds_values for s in core.stages.values()) else heads.v
    return Layer(site, map_of(model, site.name, heads), gradient @ values.mT)


def _on_grid(flow: Tensor, site: Site) -> Tensor:
    """What the tokens that answer rest on, patch by patch."""
    if site.grid is None:
        raise UnsuitableSite(f"{site.name!r} ({site.family}) has no grid of patches to lay an explanation on.")
    seen = flow[:, site.answering(), site.num_prefix_tokens :].mean(1)
    return seen.unflatten(-1, site.grid)


class Score(NamedTuple):
    """Agreement of an explanation with the model: mean probability of the class while patches go, or come."""

    deletion: Tensor  # (B): low where the patches that matter went first
    insertion: Tensor  # (B): high where the patches that matter came first


@torch.no_grad()
def score(model: nn.Module, images: Tensor, maps: Tensor, *, classes: Tensor | None = None, steps: int = 10) -> Score:
    """Deletion and insertion (Petsiuk et al. 2018, arXiv:1806.07421), removed patches are the mean colour.

    model: in eval mode, returns logits.
    images: (B, 3, h, w) in [0, 1].
    maps: (B, rows, columns) as `explain` makes them.
    classes: (B,) those explained; by default those the model answers.
    steps: parts in which patches go and come; each costs two forward passes.
    """
    check_eval_mode(model)
    check_count(steps, "steps")
    if classes is None:
        classes = model(images).argmax(-1)
    plain = images.mean((-2, -1), keepdim=True).expand_as(images)
    rank = maps.flatten(1).argsort(-1, descending=True).argsort(-1).view_as(maps)  # 0: matters most
    deleted: list[Tensor] = []
    inserted: list[Tensor] = []
    for step in range(steps + 1):
        first = (rank < step * rank[0].numel() / steps)[:, None].to(images.dtype)
        first = F.interpolate(first, size=images.shape[-2:], mode="nearest")
        for probabilities, shown in ((deleted, (images, plain)), (inserted, (plain, images))):
            answers = model(torch.lerp(*shown, first)).softmax(-1)
            probabilities.append(answers.gather(1, classes[:, None]).squeeze(1))
    return Score(torch.stack(deleted).mean(0), torch.stack(inserted).mean(0))


def chance_map(maps: Tensor, *, seed: int = 0) -> Tensor:
    """An explanation that knows nothing, of the shape of `maps`: the row to compare scores with."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(maps.shape, generator=generator).to(maps)
