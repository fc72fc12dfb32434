"""RandAugment, AutoAugment, 3-Augment and AugMix on batches: timm's policies, each image with its own draw.

Cubuk et al. 2019, arXiv:1805.09501 and 1909.13719; Touvron et al. 2022, arXiv:2204.07118; Hendrycks et al. 2020,
arXiv:1912.02781. timm reads the words of a policy (`rand-m9-mstd0.5-inc1`); what it made of them is run here, with its
magnitudes. Choices and strengths are drawn on the CPU from each image's key, so no device is waited for; pixels stay
where they are, and each operation sees only the images that drew it.   B images, P sub-policies of K operations
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from timm.data.auto_augment import AugmentOp, AugMixAugment, AutoAugment, RandAugment
from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius._random import uniform
from vitruvius.data.augmentation import operations, resampling

Policy = Callable[[Tensor, Tensor], Tensor]  # (levels (B, C, H, W), keys (B,) on the CPU) → levels, in the same place
Operation = Callable[[Tensor, Tensor], Tensor]  # (levels (n, C, H, W), strengths (n,)) → levels

_STREAM = 1000  # of random numbers, one for the choice and then one for each operation in a row
_CHAIN = 100  # streams between the chains of AugMix
_INF = float("inf")
_AFFINE = ("rotate", "shear_x", "translate_x", "shear_y", "translate_y")
_AXES = (None, -1, -1, -2, -2)  # along which each of them moves pixels
_GROUP = {None: 0, -1: 1, -2: 2}

OPERATIONS: dict[str, Operation] = {
    "autocontrast": operations.autocontrast,
    "equalise": operations.equalise,
    "solarise": operations.solarise,
    "solarise_add": operations.solarise_add,
    "posterise": operations.posterise,
    "brightness": operations.brightness,
    "contrast": operations.contrast,
    "colour": operations.colour,
    "sharpness": operations.sharpness,
    "blur": operations.pillow_blur,
}
_KINDS = (*OPERATIONS, *_AFFINE)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """From a level 0 … 10 to the strength of an operation: offset ± level / 10 · span, between low and high."""

    kind: str  # one of _KINDS
    span: float = 0.0
    offset: float = 0.0
    falling: bool = False  # subtract instead of adding
    signed: bool = False  # add or subtract, by chance
    whole: bool = False  # level / 10 · span is cut to a whole number first
    low: float = -_INF
    high: float = _INF
    below: bool = False  # the strength is a random number between 0.1 and this one


def _enhance(kind: str) -> dict[str, Rule]:
    """A factor around 1: from 0.1 to 1.9 along the levels, or (`Increasing`) away from 1 in either direction."""
    name = {"colour": "Color"}.get(kind, kind.capitalize())
    return {
        name: Rule(kind=kind, span=1.8, offset=0.1),
        f"{name}Increasing": Rule(kind=kind, span=0.9, offset=1, signed=True, low=0.1),
    }


RULES: dict[str, Rule] = {
    "AutoContrast": Rule(kind="autocontrast"),
    "Equalize": Rule(kind="equalise"),
    "Invert": Rule(kind="solarise"),
    "Rotate": Rule(kind="rotate", span=30, signed=True),  # degrees
    "Posterize": Rule(kind="posterise", span=4, whole=True, high=8),  # bits that are kept
    "PosterizeIncreasing": Rule(kind="posterise", span=4, whole=True, offset=4, falling=True, low=0),
    "PosterizeOriginal": Rule(kind="posterise", span=4, whole=True, offset=4, high=8),
    "Solarize": Rule(kind="solarise", span=256, whole=True, high=256),  # threshold
    "SolarizeIncreasing": Rule(kind="solarise", span=256, whole=True, offset=256, falling=True, low=0),
    "SolarizeAdd": Rule(kind="solarise_add", span=110, whole=True, high=128),
    **_enhance("colour"),
    **_enhance("contrast"),
    **_enhance("brightness"),
    **_enhance("sharpness"),
    "ShearX": Rule(kind="shear_x", span=0.3, signed=True),
    "ShearY": Rule(kind="shear_y", span=0.3, signed=True),
    "TranslateX": Rule(kind="translate_x", signed=True),  # pixels; the span is the policy's
    "TranslateY": Rule(kind="translate_y", signed=True),
    "TranslateXRel": Rule(kind="translate_x", signed=True),
    "TranslateYRel": Rule(kind="translate_y", signed=True),
    "Desaturate": Rule(kind="colour", span=0.5, offset=0.5, falling=True, low=0),
    "GaussianBlur": Rule(kind="blur", span=1.9, offset=0.1, high=2),  # radius in pixels
    "GaussianBlurRand": Rule(kind="blur", span=2, high=2, below=True),
}


def make_policy(step: Any, size: tuple[int, int]) -> Policy:
    """timm's RandAugment, AutoAugment or AugMix for batches of images of this height and width."""
    kinds: dict[Any, Any] = {RandAugment: BatchedRandAugment, AutoAugment: BatchedAutoAugment}
    return kinds.get(type(step), BatchedAugMix)(step, size)


class BatchedRandAugment:
    """A fixed number of operations for each image, drawn with replacement, or without it where they have weights."""

    def __init__(self, policy: RandAugment, size: tuple[int, int]) -> None:
        self.operations = Operations(policy.ops, size)
        self.layers = int(policy.num_layers)
        weights = policy.choice_weights
        self.weights = None if weights is None else torch.as_tensor(weights, dtype=torch.float64)

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        chosen = self.choose(keys)
        for layer in range(self.layers):
            x = self.operations.apply(x, chosen[:, layer], keys, _STREAM + 1 + layer)
        return x

    def choose(self, keys: Tensor) -> Tensor:
        """(B, layers): which operations each image gets."""
        number = len(self.operations)
        if self.weights is None:
            return (uniform(keys, _STREAM, self.layers) * number).long()
        u = uniform(keys, _STREAM, number).double().clamp(min=2**-25)
        return (u.log() / self.weights).topk(self.layers, dim=1).indices  # Efraimidis & Spirakis 2006


class BatchedAutoAugment:
    """One of P sub-policies for each image: its operations in turn."""

    def __init__(self, policy: AutoAugment, size: tuple[int, int]) -> None:
        self.operations = Operations([one for sub in policy.policy for one in sub], size)
        depth = max(len(sub) for sub in policy.policy)
        self.table = torch.full((len(policy.policy), depth), -1)  # (P, K) numbers of operations, -1 for none
        number = 0
        for row, sub in enumerate(policy.policy):
            self.table[row, : len(sub)] = torch.arange(number, number + len(sub))
            number += len(sub)

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        chosen = (uniform(keys, _STREAM, 1)[:, 0] * len(self.table)).long()
        for step in range(self.table.shape[1]):
            x = self.operations.apply(x, self.table[chosen, step], keys, _STREAM + 1 + step)
        return x


class BatchedAugMix:
    """A convex mixture of chains of operations, mixed with the image itself; alpha is 1."""

    def __init__(self, policy: AugMixAugment, size: tuple[int, int]) -> None:
        if policy.alpha != 1:
            raise ConfigError("data.aa: AugMix in batches mixes with alpha = 1; other values need data.cache=none.")
        self.operations = Operations(policy.ops, size)
        self.width, self.depth, self.blended = policy.width, policy.depth, policy.blended

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        u = uniform(keys, _STREAM, self.width + 1).double().clamp(min=2**-25)
        share = -u[:, : self.width].log()
        share = share / share.sum(1, keepdim=True)  # (B, width): Dirichlet with alpha = 1
        mixing = u[:, self.width]  # (B,)
        if self.blended:
            return self._blend_in_turn(x, keys, share * mixing[:, None])
        mixed = torch.zeros_like(x)
        for chain in range(self.width):
            weight = share[:, chain].to(x.device, x.dtype, non_blocking=True).view(-1, 1, 1, 1)
            mixed += weight * self._chain(x, keys, chain)
        return operations.blend(x, mixed.clamp_(0, 255).floor_(), mixing.to(x.device, x.dtype, non_blocking=True))

    def _blend_in_turn(self, x: Tensor, keys: Tensor, share: Tensor) -> Tensor:
        """timm's faster form: each chain is blended into the image, with weights that come to the same mixture."""
        left = torch.ones_like(share[:, 0])
        weights: list[Tensor] = []
        for chain in reversed(range(self.width)):
            weight = share[:, chain] / left
            left = left * (1 - weight)
            weights.insert(0, weight)
        mixed = x
        for chain, weight in enumerate(weights):
            mixed = operations.blend(
                mixed, self._chain(x, keys, chain), weight.to(x.device, x.dtype, non_blocking=True)
            )
        return mixed

    def _chain(self, x: Tensor, keys: Tensor, chain: int) -> Tensor:
        """One to three operations in a row, or as many as the policy says, on a copy."""
        x = x.clone()
        stream = _STREAM + 1 + _CHAIN * (chain + 1)
        most = self.depth if self.depth > 0 else 3
        u = uniform(keys, stream, most + 1)
        chosen = (u[:, :most] * len(self.operations)).long()
        depth = 1 + (u[:, most] * 3).long() if self.depth <= 0 else torch.full((len(keys),), most)
        for step in range(most):
            wanted = torch.where(step < depth, chosen[:, step], -1)
            x = self.operations.apply(x, wanted, keys, stream + 1 + step)
        return x


class Operations:
    """timm's operations with their probabilities and magnitudes, as tables; and how a batch goes through them."""

    def __init__(self, operations: Sequence[AugmentOp], size: tuple[int, int]) -> None:
        rules = [_rule_of(one, size) for one in operations]
        self.size = size
        self.kind = torch.tensor([_KINDS.index(rule.kind) for rule in rules])
        self.probability = _table(operations, "prob")
        self.magnitude = _table(operations, "magnitude")
        self.deviation = _table(operations, "magnitude_std")
        self.most = _table(operations, "magnitude_max", default=10)  # where the policy sets no limit
        self.span = _table(rules, "span")
        self.offset = _table(rules, "offset")
        self.direction = 1 - 2 * _table(rules, "falling")
        self.low = _table(rules, "low")
        self.high = _table(rules, "high")
        self.signed = _table(rules, "signed").bool()
        self.whole = _table(rules, "whole").bool()
        self.below = _table(rules, "below").bool()
        self.filters, self.fill = _settings(operations)

    def __len__(self) -> int:
        return len(self.kind)

    def apply(self, x: Tensor, chosen: Tensor, keys: Tensor, stream: int) -> Tensor:
        """Each image through the operation it has chosen, (B,) numbers, with its probability; -1 means none."""
        u = uniform(keys, stream, 5).double()
        gate, level, sign, filter_choice, radius = u.unbind(1)
        active = (chosen >= 0) & (gate < self.probability[chosen])
        rows = active.nonzero()[:, 0]
        if not len(rows):
            return x
        group = self._groups(chosen[rows], filter_choice[rows])
        order = group.argsort(stable=True)
        rows, group = rows[order], group[order]
        strength = self.strengths(chosen[rows], level[rows], sign[rows], radius[rows])
        matrix = affine_matrices(self.kind[chosen[rows]] - len(OPERATIONS), strength, self.size)
        settings = torch.cat([strength[:, None], matrix], 1).float()  # (n, 7)
        moved = self._run(x[rows.to(x.device, non_blocking=True)], group, settings)
        return x.index_copy_(0, rows.to(x.device, non_blocking=True), moved)

    def _groups(self, chosen: Tensor, u: Tensor) -> Tensor:
        """What is computed together: a number for each kind, and for affine maps one for each filter."""
        kind = self.kind[chosen]
        first = len(OPERATIONS)
        filters = torch.tensor(self.filters)[(u * len(self.filters)).long()]
        axis = torch.tensor([_GROUP[one] for one in _AXES])[(kind - first).clamp(min=0)]
        axis = axis * (filters == resampling.BICUBIC)  # of which a bicubic map alone has so much to look at
        return torch.where(kind < first, kind, first + len(_GROUP) * filters + axis)

    def strengths(self, chosen: Tensor, level: Tensor, sign: Tensor, radius: Tensor) -> Tensor:
        """(n,) from three uniform numbers for each image: its level, its sign and, for random blur, its radius."""
        magnitude, deviation = self.magnitude[chosen], self.deviation[chosen]
        normal = magnitude + deviation.clamp(max=1e9) * torch.special.ndtri(level.clamp(min=2**-25))
        drawn = torch.where(deviation == _INF, magnitude * level, torch.where(deviation > 0, normal, magnitude))
        drawn = drawn.clamp(min=0).minimum(self.most[chosen])
        amount = drawn / 10 * self.span[chosen]
        amount = torch.where(self.whole[chosen], amount.trunc(), amount)
        direction = torch.where(self.signed[chosen] & (sign > 0.5), -1.0, self.direction[chosen])
        strength = (self.offset[chosen] + direction * amount).maximum(self.low[chosen]).minimum(self.high[chosen])
        return torch.where(self.below[chosen], 0.1 + (strength - 0.1) * radius, strength)

    def _run(self, x: Tensor, group: Tensor, settings: Tensor) -> Tensor:
        """Images sorted by group, each group through its operation."""
        settings = settings.to(x.device, non_blocking=True)
        counts = torch.bincount(group).tolist()
        begin = 0
        for number, count in enumerate(counts):
            if not count:
                continue
            here = slice(begin, begin + count)
            if number < len(OPERATIONS):
                operation = OPERATIONS[_KINDS[number]]
                x[here] = operation(x[here], settings[here, 0])
            else:
                kind, place = divmod(number - len(OPERATIONS), len(_GROUP))
                axis = list(_GROUP)[place]
                fill = torch.tensor(self.fill[: x.shape[1]]).to(x.device, x.dtype, non_blocking=True)
                x[here] = resampling.affine(x[here], settings[here, 1:], fill, kind, axis)
            begin += count
        return x


def affine_matrices(kind: Tensor, strength: Tensor, size: tuple[int, int]) -> Tensor:
    """(n, 6) maps of rotations, shears and shifts, by number in _AFFINE; a negative number gives some map or other.

    `strength` (n,) is in degrees, as a factor, or in pixels.
    """
    height, width = size
    one, zero = torch.ones_like(strength), torch.zeros_like(strength)
    maps = torch.stack(
        [
            resampling.rotation_matrix(strength, height, width),
            torch.stack([one, strength, zero, zero, one, zero], 1),
            torch.stack([one, zero, strength, zero, one, zero], 1),
            torch.stack([one, zero, zero, strength, one, zero], 1),
            torch.stack([one, zero, zero, zero, one, strength], 1),
        ]
    )  # (5, n, 6)
    return maps[kind.clamp(min=0), torch.arange(len(strength))]


def _rule_of(operation: AugmentOp, size: tuple[int, int]) -> Rule:
    if operation.name not in RULES:
        raise ConfigError(f"data.aa: {operation.name} cannot be done in batches; use data.cache=none.")
    rule = RULES[operation.name]
    if not operation.name.startswith("Translate"):
        return rule
    height, width = size
    side = width if rule.kind == "translate_x" else height
    span = operation.hparams.get("translate_const", 250)
    if operation.name.endswith("Rel"):
        span = operation.hparams.get("translate_pct", 0.45) * side
    return Rule(kind=rule.kind, signed=True, span=span)


def _settings(operations: Sequence[AugmentOp]) -> tuple[list[int], tuple[int, ...]]:
    """Filters to choose from, and the colour that fills what an affine map leaves empty; all operations share them."""
    settings = operations[0].kwargs
    filters = settings["resample"]
    filters = filters if isinstance(filters, tuple | list) else (filters,)
    kinds = [resampling.FILTERS[Image.Resampling(one).name.lower()] for one in filters]
    if max(kinds) > resampling.BICUBIC:
        expected = "data.train_interpolation = nearest, bilinear, bicubic or random"
        raise ConfigError(f"data.aa turns and shears images, which needs {expected}.")
    return kinds, tuple(settings["fillcolor"])


def _table(pieces: Sequence[Any], name: str, default: float = 0.0) -> Tensor:
    """One attribute of every piece; None counts as the default."""
    numbers = [getattr(piece, name) for piece in pieces]
    return torch.tensor([default if number is None else float(number) for number in numbers], dtype=torch.float64)
