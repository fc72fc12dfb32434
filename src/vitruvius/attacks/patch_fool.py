"""Patch-Fool: a few patches of the image, chosen and optimised by attention (Fu et al. 2022, arXiv:2203.08392).

The patch that receives most attention in a layer is replaced by what raises the loss and, in the first half of the
layers, the attention that all tokens pay to it; a gradient of attention that contradicts that of the loss is first made
perpendicular to it (equation 9). It needs a model whose attention `vitruvius.record` can see. B images, L layers, N
tokens, P chosen patches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitruvius._errors import ConfigError, NoSiteError, UnsuitableSite
from vitruvius._random import Dice
from vitruvius.attacks._models import full_precision, note_grad, tell_step, unwrapped
from vitruvius.attacks.base import Attack, Model, attacks
from vitruvius.attacks.losses import CE, hard_labels
from vitruvius.heads import Heads, Site

DECAY = 0.95  # of the learning rate, after every EVERY steps
EVERY = 10
LEAST = 1e-12  # attention below which a logarithm is cut


@attacks.register("patch_fool")
@dataclass(frozen=True, kw_only=True)
class PatchFool(Attack):
    """Patch-Fool: the patches that attention looks at are replaced by what misleads it; for models with attention.

    Settings beside seed; the norm is linf:
    `eps`: how far pixels inside the patches may move; default 1, any pixel (smaller: the paper's "mild" form).
    `patches`: how many are replaced.
    `steps`: of Adam.
    `lr`: learning rate of Adam, in pixels of images in [0, 1]; it falls by 5 % every ten steps.
    `attention_weight`: of the attention that all tokens pay to the patches, against cross-entropy; 0 leaves it out.
    `layer`: whose attention chooses the patches, from 0; the last one where there are fewer.
    """

    norms = ("linf",)

    eps: float = 1.0
    patches: int = 1
    steps: int = 250
    lr: float = 0.05
    attention_weight: float = 0.002
    layer: int = 4

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        """Adam on the chosen patches; an image stays as it is once the model is fooled."""
        from vitruvius.surgery import record

        network: Any = unwrapped(model)
        sites = token_sites(network, x)
        y = hard_labels(y)
        with record(network, list(sites), detach=False) as seen:
            chosen = self._choose(model, x, seen, sites, network)  # (B, P)
            mask = patch_mask(chosen, _grid(sites), x)  # (B, 1, H, W)
            point = torch.where(mask, self._start(x, dice), x)
            look = _Look(model, network, seen, sites, chosen)
            moments = (torch.zeros_like(x), torch.zeros_like(x))
            for step in range(1, self.steps + 1):
                grad, fooled = self._ascent(look, point, y, mask)
                if bool(fooled.all()):
                    break
                moments = (moments[0].lerp(grad, 0.1), moments[1].lerp(grad * grad, 0.001))
                moved = self._moved(point, moments, step, x)
                point = torch.where(mask & ~fooled.view(-1, 1, 1, 1), moved, point)
                tell_step(model, step, self.steps)
        return (x + self.norm.project(point - x, self.eps)).clamp(0, 1)

    def _choose(
        self, model: Model, x: Tensor, seen: Mapping[str, Heads], sites: Mapping[str, Site], network: Any
    ) -> Tensor:
        """(B, P): numbers of the patches that get most attention, mean over heads and queries of one layer."""
        from vitruvius.surgery.recording import map_of

        model(x)
        name = list(sites)[min(self.layer, len(sites) - 1)]
        site = sites[name]
        paid = map_of(network, name, seen[name]).mean((1, 2))[:, site.num_prefix_tokens :]  # (B, patches)
        if self.patches > paid.shape[1]:
            raise ConfigError(f"PatchFool with patches={self.patches}; the image has {paid.shape[1]}.")
        return paid.argsort(1, descending=True)[:, : self.patches]

    def _start(self, x: Tensor, dice: Dice) -> Tensor:
        """Random pixels, within eps of the image's."""
        noise = dice.uniform("patch", x.shape[1:]).to(x.dtype)
        if self.eps >= 1:
            return noise
        return (x + self.eps * (2 * noise - 1)).clamp(0, 1)

    def _ascent(self, look: _Look, point: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The direction in which loss and attention rise together, and whether the model is fooled, (B,)."""
        with torch.enable_grad():
            point = point.detach().requires_grad_()
            logits = full_precision(look.model(point))
            fooled = logits.detach().argmax(1) != y
            (grad,) = torch.autograd.grad(CE(logits, y).sum(), point, retain_graph=True)
            grad = grad * mask
            total = grad
            if self.attention_weight > 0:
                for paid in look.attention_paid():
                    (pull,) = torch.autograd.grad(paid.sum(), point, retain_graph=True)
                    total = total + self.attention_weight * without_conflict(pull * mask, grad)
        note_grad(look.model, total)
        return total, fooled

    def _moved(self, point: Tensor, moments: tuple[Tensor, Tensor], step: int, x: Tensor) -> Tensor:
        """A step of Adam, within the ball and the image."""
        rate = self.lr * DECAY ** ((step - 1) // EVERY)
        mean = moments[0] / (1 - 0.9**step)
        square = moments[1] / (1 - 0.999**step)
        delta = self.norm.project(point + rate * mean / (square.sqrt() + 1e-8) - x, self.eps)
        return (x + delta).clamp(0, 1)


class _Look(NamedTuple):
    """The model, what was seen inside it in its last pass, and the patches that attention is drawn to."""

    model: Model
    network: Any  # the same without its wrappers
    seen: Mapping[str, Heads]
    sites: Mapping[str, Site]
    chosen: Tensor  # (B, P)

    def attention_paid(self) -> Iterator[Tensor]:
        """(B,) for each attacked layer: log of the attention to the patches, mean over heads, then over queries."""
        from vitruvius.surgery.recording import map_of

        for name in attacked_layers(list(self.sites)):
            attention = map_of(self.network, name, self.seen[name]).mean(1)  # (B, N, M)
            tokens = self.chosen + self.sites[name].num_prefix_tokens
            paid = attention.gather(2, tokens[:, None].expand(-1, attention.shape[1], -1))
            yield paid.clamp(min=LEAST).log().mean((1, 2))


def token_sites(model: Any, x: Tensor) -> dict[str, Site]:
    """Sites of a model that attend from all tokens to all, over a grid of patches, in order.

    `x` are images (B, C, H, W), for models that do not know their size.
    """
    from vitruvius.surgery import survey

    try:
        sites = survey(model, input_size=(x.shape[1], x.shape[2], x.shape[3]))
    except NoSiteError as error:
        raise UnsuitableSite(f"patch_fool needs a model with attention over patches: {error}") from None
    found = {name: site for name, site in sites.items() if site.is_over_patches()}
    grids = {site.grid for site in found.values()}
    if len(grids) != 1:
        raise UnsuitableSite(
            f"patch_fool needs attention over one grid of patches; {len(found)} of the {len(sites)} attention sites of "
            f"{type(model).__name__} attend over tokens, on {len(grids)} grids."
        )
    return found


def patch_mask(chosen: Tensor, grid: tuple[int, int], x: Tensor) -> Tensor:
    """(B, 1, H, W) bool: the pixels of the patches `chosen` (B, P) of a `grid` of rows and columns."""
    rows, columns = grid
    marked = torch.zeros(len(chosen), rows * columns, dtype=torch.bool, device=x.device).scatter(1, chosen, True)
    coarse = marked.view(-1, 1, rows, columns)
    return coarse.repeat_interleave(x.shape[2] // rows, 2).repeat_interleave(x.shape[3] // columns, 3)


def attacked_layers(names: Sequence[str]) -> Sequence[str]:
    """The first half of the layers `names` without the very first, as released."""
    return names[1 : max(len(names) // 2, 2)]


def without_conflict(pull: Tensor, grad: Tensor) -> Tensor:
    """`pull` where it agrees with `grad`, else its part perpendicular to it (PCGrad, Yu et al. 2020); by images."""
    pulls = pull.flatten(1)
    grads = grad.flatten(1)
    product = (pulls * grads).sum(1, keepdim=True)
    along = product / grads.square().sum(1, keepdim=True).clamp(min=1e-30) * grads
    return torch.where(product < 0, pulls - along, pulls).view_as(pull)


def _grid(sites: Mapping[str, Site]) -> tuple[int, int]:
    grid = next(iter(sites.values())).grid
    assert grid is not None
    return grid
