"""A linear auto-encoder across heads: q and k pass through fewer heads than they have.

You et al. 2023, "ViTCoD", arXiv:2210.09573.       B batch, H heads, N tokens, D key width, r rank
q'[b, h, n, d] = Σ_g M[h, g] q[b, g, n, d] + c[h],  M = W_decode W_encode of rank r, c = W_decode b_encode + b_decode
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from vitruvius._checks import in_eval_mode
from vitruvius._errors import ConfigError, DataError, SurgeryError
from vitruvius.attention.base import Stage, attentions, generator_of
from vitruvius.heads import Heads, HeadWeights, Site


@attentions.register("low_rank")
class LowRank(Stage):
    """Mix the heads of q and/or k through a bottleneck of fewer heads (ViTCoD, You et al. 2023, arXiv:2210.09573).

    `rank` is the number of heads of the bottleneck (default: half of them, rounded up). start="svd" begins as a
    projection; `start_from_weights` or `fit_low_rank` then choose the one that keeps most of the pretrained q and k
    (rank = H changes nothing at all). start="calibrated": a training run first fits q, k and the auto-encoder to the
    dense model's maps (`surgery.calibrating`). start="released" begins near zero as the published code does, with
    uniform maps, drawn from `seed` and the site's name. `reconstruction` is the penalty: "normalised" is the relative
    squared error, "released" ‖q' − q‖ + ‖k' − k‖ over the whole batch; `detach_target` stops it from training the
    projections. `tensors` says which are mixed, "qk", "q" or "k".
    """

    map_text = "the softmax of q and k as the bottleneck leaves them"

    def __init__(
        self,
        site: Site,
        *,
        rank: int | None = None,
        tensors: Literal["qk", "q", "k"] = "qk",
        start: Literal["svd", "calibrated", "released"] = "svd",
        reconstruction: Literal["normalised", "released"] = "normalised",
        detach_target: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        rank = -(-site.num_heads // 2) if rank is None else rank
        if not 1 <= rank <= site.num_heads:
            raise ConfigError(
                f"'low_rank' got rank={rank}; {site.name!r} has {site.num_heads} heads, so 1 … {site.num_heads}."
            )
        if site.family == "cait" and "k" in tensors:
            raise site.unsuitable("low_rank", "mixes the heads of k, and talking heads share one", "Use tensors='q'. ")
        self.tensors, self.reconstruction, self.detach_target = tensors, reconstruction, detach_target
        self.start = start
        self.writes = frozenset(tensors)
        generator = generator_of(site, seed)
        for name in tensors:
            with torch.random.fork_rng(devices=()):  # both starts overwrite what nn.Linear draws
                bottleneck = nn.Sequential(nn.Linear(site.num_heads, rank), nn.Linear(rank, site.num_heads))
            self.add_module(name, bottleneck)
            if start != "released":
                self.set_projection(name, torch.eye(site.num_heads)[:, :rank])
                continue
            for layer in self._layers(name):
                noise = torch.empty(layer.weight.shape, device="cpu")
                layer.weight.data.copy_(nn.init.trunc_normal_(noise, std=0.02, generator=generator))
                layer.bias.data.zero_()

    def forward(self, heads: Heads) -> Heads:
        mixed: dict[str, Any] = {name: self._mix(name, getattr(heads, name)) for name in self.tensors}
        return heads._replace(**mixed)

    def penalty(self, before: Heads, after: Heads) -> Tensor:
        """What the auto-encoder loses between the Heads that enter the stage and those that leave it."""
        return torch.stack([self._loss(getattr(before, name), getattr(after, name)) for name in self.tensors]).sum()

    def mixing(self, name: str) -> tuple[Tensor, Tensor]:
        """M (H, H) and c (H) of the whole auto-encoder of `name`."""
        encode, decode = self._layers(name)
        return decode.weight @ encode.weight, decode.weight @ encode.bias + decode.bias

    @torch.no_grad()
    def set_projection(self, name: str, basis: Tensor, mean: Tensor | None = None) -> None:
        """Make the auto-encoder of `name` the projection on `basis` (H, r), orthonormal, about `mean` (H)."""
        encode, decode = self._layers(name)
        mean = basis.new_zeros(len(basis)) if mean is None else mean
        encode.weight.copy_(basis.mT)
        encode.bias.zero_()
        decode.weight.copy_(basis)
        decode.bias.copy_(mean - basis @ (basis.mT @ mean))

    @torch.no_grad()
    def start_from_weights(self, weights: HeadWeights) -> None:
        """Begin as the projection that keeps most of q and k, judged by their weights (inputs taken as white)."""
        for name in self.tensors:
            weight, bias = getattr(weights, name), getattr(weights, f"{name}_bias")
            rows = weight if bias is None else torch.cat([weight, bias[..., None]], -1)  # (H, D, C + 1)
            self.set_projection(name, principal_heads(rows.flatten(1), self._layers(name)[0].out_features))

    def _mix(self, name: str, x: Tensor) -> Tensor:
        layers = self._layers(name)
        if not all(type(layer) is nn.Linear and type(layer.weight) is nn.Parameter for layer in layers):  # quantised
            return self.get_submodule(name)(x.movedim(1, -1)).movedim(-1, 1)
        mixing, constant = self.mixing(name)
        return torch.einsum("hg,bgnd->bhnd", mixing, x) + constant.to(x.dtype)[:, None, None]

    def _loss(self, before: Tensor, after: Tensor) -> Tensor:
        target = (before.detach() if self.detach_target else before).to(torch.promote_types(before.dtype, torch.float))
        if self.reconstruction == "released":
            return torch.linalg.vector_norm(after - target)
        return (after - target).square().mean() / target.square().mean().clamp(min=torch.finfo(target.dtype).tiny)

    def _layers(self, name: str) -> tuple[nn.Linear, nn.Linear]:
        encode, decode = self.get_submodule(name).children()
        return cast(nn.Linear, encode), cast(nn.Linear, decode)


def principal_heads(rows: Tensor, rank: int) -> Tensor:
    """The `rank` left singular vectors of `rows` (H, …) with the largest singular values, (H, rank)."""
    if not rows.isfinite().all():
        raise SurgeryError("'low_rank' cannot start from weights that are not finite; the checkpoint is damaged.")
    return torch.linalg.svd(rows.double(), full_matrices=False).U[:, :rank]


@torch.no_grad()
def fold_into(weights: HeadWeights, low_rank: LowRank) -> None:
    """Merge the auto-encoder into a site's `weights`: W' = (M ⊗ I) W, b' = M b + c. Exact; the stage can then go."""
    merged: list[tuple[Tensor, Tensor]] = []
    for name in low_rank.tensors:
        mixing, constant = (part.double() for part in low_rank.mixing(name))
        weight, bias = getattr(weights, name), getattr(weights, f"{name}_bias")
        if not (mixing.isfinite().all() and constant.isfinite().all() and weight.isfinite().all()):
            raise SurgeryError(f"the {name} weights or the auto-encoder are not finite; there is nothing to fold.")
        merged.append((weight, torch.einsum("hg,gdc->hdc", mixing, weight.double())))
        if bias is not None:
            merged.append((bias, mixing @ bias.double() + constant[:, None]))
        elif constant.any():
            raise SurgeryError(f"folding needs a bias for {name}, and this projection has none.")
    for old, new in merged:
        old.copy_(new)


class Moments:
    """Mean and covariance of heads over samples, tokens and width, streamed in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.total = torch.zeros(())
        self.gram = torch.zeros(())

    def add(self, x: Tensor) -> None:
        rows = x.detach().double().transpose(0, 1).flatten(1)  # (H, B N D)
        self.count += rows.shape[1]
        self.total = self.total.to(rows.device) + rows.sum(1)
        self.gram = self.gram.to(rows.device) + rows @ rows.mT

    def mean(self) -> Tensor:
        return self.total / self.count

    def covariance(self) -> Tensor:
        return self.gram / self.count - torch.outer(self.mean(), self.mean())


@torch.no_grad()
def fit_low_rank(model: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """Start every `low_rank` of `model` from what flows through it on `batches` of input; in place, returns the model.

    Each begins as the principal components of its activations. While they are observed, the stages pass their input on
    unchanged, so each sees the pretrained activations.
    """
    stages = {name: module for name, module in model.named_modules() if isinstance(module, LowRank)}
    if not stages:
        raise SurgeryError("the model has no 'low_rank' part to fit; rewire it first.")
    moments = {(name, tensor): Moments() for name, stage in stages.items() for tensor in stage.tensors}

    def observe(name: str, stage: LowRank, args: tuple[Heads], _: Heads) -> Heads:
        for tensor in stage.tensors:
            moments[name, tensor].add(getattr(args[0], tensor))
        return args[0]

    with contextlib.ExitStack() as hooks, in_eval_mode(model):
        for name, stage in stages.items():
            hooks.enter_context(stage.register_forward_hook(functools.partial(observe, name)))
        for batch in batches:
            model(batch)
    for (name, tensor), seen in moments.items():
        if seen.count == 0:
            raise DataError(f"no batch reached {name!r}; fitting needs at least one.")
        rank = stages[name].get_parameter(f"{tensor}.0.weight").shape[0]
        stages[name].set_projection(tensor, principal_heads(seen.covariance(), rank), seen.mean())
    return model
