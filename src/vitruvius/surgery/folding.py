"""Fold trained auto-encoders into the projections before them, exactly; or let them begin from those projections.

You et al. 2023, "ViTCoD", arXiv:2210.09573: q' = (M ⊗ I) q + c ⊗ 1 is linear, so W' = (M ⊗ I) W and b' = M b + c do
the same without the stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitruvius._checks import in_eval_mode
from vitruvius._errors import SurgeryError
from vitruvius.attention.low_rank import LowRank, fold_into
from vitruvius.heads import Heads
from vitruvius.surgery.base import cores_of, inner
from vitruvius.surgery.recording import record
from vitruvius.surgery.rewiring import head_weights, refuse_compiled
from vitruvius.surgery.sites import Size, Where, guess_input_size, match

PROJECTIONS = ("qkv", "q", "k", "q_proj", "k_proj")  # linear layers that may be given a bias


@torch.no_grad()
def fold(model: nn.Module, where: Where = "*", *, add_bias: bool = False, input_size: Size | None = None) -> nn.Module:
    """Merge the `low_rank` of every matching site into its projections and take the stage out; in place.

    `where` and `input_size` are those of `rewire`. `model` is run on noise before and after: where the projections do
    not reach the stage unchanged (a norm of q and k, rotary positions, batch norm …) the result would
    differ, and everything is put back with an error that says so. A projection without bias that needs one is given
    it if `add_bias` (default: no); plain timm then needs qkv_bias=True.
    """
    refuse_compiled(model)
    stages = _first_stages(model, where)
    expected = _watch(model, stages, input_size)
    with contextlib.ExitStack() as undo:
        for name in stages if add_bias else ():
            for layer in _add_biases(inner(model).get_submodule(name)):
                undo.callback(layer.register_parameter, "bias", None)
        for name, (_, weights) in head_weights(model, list(stages), input_size=input_size).items():
            for tensor in weights:
                if tensor is not None:
                    undo.callback(tensor.copy_, tensor.clone())
            try:
                fold_into(weights, stages[name])
            except SurgeryError as error:
                raise SurgeryError(
                    f"{name!r} cannot be folded: {error} Where the projection may be given a bias, fold(model, "
                    "add_bias=True) does it; the folded weights then belong to a timm model with qkv_bias=True."
                ) from None
        _compare(_watch(model, stages, input_size, folded=True), expected)
        undo.pop_all()  # all went well
    for name, stage in stages.items():
        core = inner(model).get_submodule(f"{name}.core")
        for part, child in list(core.named_children()):
            if child is stage:
                delattr(core, part)
    return model


def start_low_rank(model: nn.Module, where: Where = "*", *, input_size: Size | None = None) -> nn.Module:
    """Let every matching `low_rank` begin as the projection that keeps most of the q and k of `model`; in place."""
    stages = _first_stages(model, where)
    for name, (_, weights) in head_weights(model, list(stages), input_size=input_size).items():
        stages[name].start_from_weights(weights)
    return model


def _first_stages(model: nn.Module, where: Where) -> dict[str, LowRank]:
    """The auto-encoders of the matching sites; each must be the first thing its projections meet."""
    cores = {n: core for n, core in cores_of(model).items() if any(isinstance(p, LowRank) for p in core.children())}
    if not cores:
        raise SurgeryError(f"{type(inner(model)).__name__} has no 'low_rank' part; there is nothing to fold or start.")
    stages: dict[str, LowRank] = {}
    for name in match(model, list(cores), where):
        first = next(iter(cores[name].children()))
        if not isinstance(first, LowRank):
            raise SurgeryError(
                f"{name!r} holds {cores[name].describe()}: 'low_rank' comes after another stage, so it cannot be "
                "merged into the projections. Only a first stage can."
            )
        stages[name] = first
    return stages


def _add_biases(module: nn.Module) -> list[nn.Linear]:
    """Give the projections of a site a bias of zeros where they have none; those that got one."""
    layers: list[Any] = [layer for key, layer in module.named_children() if key in PROJECTIONS]
    unbiased = [layer for layer in layers if isinstance(layer, nn.Linear) and cast(Any, layer).bias is None]
    for layer in unbiased:
        layer.bias = nn.Parameter(layer.weight.new_zeros(len(layer.weight)))
    return unbiased


def _watch(
    model: nn.Module, stages: Mapping[str, LowRank], input_size: Size | None, *, folded: bool = False
) -> dict[str, Heads]:
    """What leaves each stage on one image of noise; with `folded`, what enters it, the stage being passed by."""
    root = inner(model)
    weight = next(p for p in root.parameters() if p.is_floating_point())
    size = input_size or guess_input_size(root)
    image = torch.randn(1, *size, generator=torch.Generator().manual_seed(0)).to(weight)
    with contextlib.ExitStack() as hooks:
        for stage in stages.values() if folded else ():
            hooks.enter_context(stage.register_forward_hook(lambda _, args, __: args[0]))
        with in_eval_mode(root), record(root, list(stages)) as seen:
            root(image)
    return seen if folded else {name: stage(seen[name]) for name, stage in stages.items()}


def _compare(actual: Mapping[str, Heads], expected: Mapping[str, Heads]) -> None:
    for name, wanted in expected.items():
        for tensor in ("q", "k"):
            target: Tensor = getattr(wanted, tensor)
            error = (getattr(actual[name], tensor) - target).norm() / target.norm().clamp(min=1e-12)
            if not error <= torch.finfo(target.dtype).eps ** 0.5:
                raise SurgeryError(
                    f"{name!r} cannot be folded exactly: between its projections and 'low_rank' {tensor} is changed "
                    f"(normalised, rotated, mixed or scaled), so the result would differ by {float(error):.0%}. "
                    "Keep the stage; nothing was changed."
                )
