"""Fold trained auto-encoders into the projections before them, exactly; or let them begin from those projections.

You et al. 2023, "ViTCoD", arXiv:2210.09573: q' = (M ⊗ I) q + c ⊗ 1 is linear, so W' = (M ⊗ I) W and b' = M b + c do
the same without the stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitruvius._checks import in_eval_mode
from vitruvius._errors import SurgeryError
from vitruvius.attention.base import Core
from vitruvius.attention.low_rank import LowRank, fold_into
from vitruvius.heads import Heads
from vitruvius.surgery.base import Socket, inner
from vitruvius.surgery.recording import record
from vitruvius.surgery.rewiring import head_weights, refuse_compiled
from vitruvius.surgery.sites import Size, Where, guess_input_size, match

PROJECTIONS = ("qkv", "q", "k", "q_proj", "k_proj")  # linear layers that may be given a bias


@torch.no_grad()
def fold(model: nn.Module, where: Where = "*", *, add_bias: bool = False, input_size: Size | None = None) -> nn.Module:
    """Merge the `low_rank` of every matching site into its projections and take the stage out; in place.

    `where` is a glob over site names, or several (default: all); `input_size` is the size of an image, (channels, rows,
    columns), for models that do not know it themselves. `model` is run on noise before and after: where the
    projections do not reach the stage unchanged (a norm of q and k, rotary positions, batch norm …) the result would
    differ, and everything is put back with an error that says so. A projection without bias that needs one is given
    it if `add_bias` (default: no); plain timm then needs qkv_bias=True.
    """
    refuse_compiled(model)
    stages = _first_stages(model, where)
    expected = _watch(model, stages, input_size)
    undo = _Undo()
    try:
        if add_bias:
            for name in stages:
                undo.biased += _add_biases(inner(model).get_submodule(name))
        for name, (_, weights) in head_weights(model, list(stages), input_size=input_size).items():
            undo.written += [(tensor, tensor.clone()) for tensor in weights if tensor is not None]
            _fold_one(name, stages[name], weights)
        _compare(_watch(model, stages, input_size, folded=True), expected)
    except Exception:
        undo.run()
        raise
    for name, stage in stages.items():
        _take_out(inner(model).get_submodule(f"{name}.core"), stage)
    return model


def start_low_rank(model: nn.Module, where: Where = "*", *, input_size: Size | None = None) -> nn.Module:
    """Let every matching `low_rank` begin as the projection that keeps most of the q and k of `model`; in place.

    `where` is a glob over site names, or several (default: all); `input_size` is the size of an image, (channels, rows,
    columns), for models that do not know it themselves.
    """
    stages = _first_stages(model, where)
    for name, (_, weights) in head_weights(model, list(stages), input_size=input_size).items():
        stages[name].start_from_weights(weights)
    return model


def _take_out(core: nn.Module, stage: nn.Module) -> None:
    for key, child in list(core.named_children()):
        if child is stage:
            delattr(core, key)


class _Undo:
    """What was written, to be put back if a check fails."""

    def __init__(self) -> None:
        self.written: list[tuple[Tensor, Tensor]] = []
        self.biased: list[nn.Linear] = []

    def run(self) -> None:
        for tensor, old in self.written:
            tensor.copy_(old)
        for layer in self.biased:
            layer.register_parameter("bias", None)


def _first_stages(model: nn.Module, where: Where) -> dict[str, LowRank]:
    """The auto-encoders of the matching sites; each must be the first thing its projections meet."""
    cores = _cores_with_low_rank(model)
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


def _cores_with_low_rank(model: nn.Module) -> dict[str, Core]:
    """The cores that hold an auto-encoder, by site."""
    found: dict[str, Core] = {}
    for name, module in inner(model).named_modules():
        if not isinstance(module, Socket) or not isinstance(module.core, Core):
            continue
        if any(isinstance(part, LowRank) for part in module.core.children()):
            found[name] = module.core
    return found


def _fold_one(name: str, stage: LowRank, weights: Any) -> None:
    try:
        fold_into(weights, stage)
    except SurgeryError as error:
        raise SurgeryError(
            f"{name!r} cannot be folded: {error} Where the projection may be given a bias, fold(model, add_bias=True) "
            "does it; the folded weights then belong to a timm model with qkv_bias=True."
        ) from None


def _add_biases(module: nn.Module) -> list[nn.Linear]:
    """Give the projections of a site a bias of zeros where they have none; those that got one."""
    layers: list[Any] = [layer for key, layer in module.named_children() if key in PROJECTIONS]
    given = [layer for layer in layers if isinstance(layer, nn.Linear) and cast(Any, layer).bias is None]
    for layer in given:
        layer.bias = nn.Parameter(layer.weight.new_zeros(len(layer.weight)))
    return given


def _watch(
    model: nn.Module, stages: Mapping[str, LowRank], input_size: Size | None, *, folded: bool = False
) -> dict[str, Heads]:
    """What leaves each stage on one image of noise; with `folded`, what enters it, the stage being passed by."""
    root = inner(model)
    size = input_size or guess_input_size(root)
    image = _noise(root, size)
    hooks = []
    if folded:
        hooks = [stage.register_forward_hook(_pass_by) for stage in stages.values()]
    try:
        with in_eval_mode(root), record(root, list(stages), input_size=input_size) as seen:
            root(image)
    finally:
        for hook in hooks:
            hook.remove()
    if folded:
        return seen
    return {name: stage(seen[name]) for name, stage in stages.items()}


def _noise(root: nn.Module, size: Size) -> Tensor:
    """One image where the model's weights are, in their precision."""
    weight = next(p for p in root.parameters() if p.is_floating_point())
    return torch.randn(1, *size, generator=torch.Generator().manual_seed(0)).to(weight)


def _pass_by(_: nn.Module, args: tuple[Heads], __: Heads) -> Heads:
    """A hook: what goes into a stage comes out."""
    return args[0]


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
