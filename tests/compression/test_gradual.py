"""Masks tighten step by step, each within the last, and end exactly where they should."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import vitruvius
from vitruvius._errors import ConfigError
from vitruvius.attention import part
from vitruvius.compression.gradual import GradualMask, tighten
from vitruvius.compression.masks import make_masks
from vitruvius.compression.rules import rules


def parts() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    maps = {f"blocks.{i}.attn": torch.randn(3, 16, 16, generator=generator).softmax(-1) for i in range(2)}
    return make_masks(maps, rules["information"](), sparsity=0.8, protect=()).keep, maps


def removed(patterns: dict[str, Tensor]) -> int:
    return sum(int((~keep).sum()) for keep in patterns.values())


@pytest.mark.parametrize("sparse", [False, True])
def test_each_epoch_removes_the_cubic_share_and_nothing_comes_back(sparse: bool) -> None:
    """Sparse attention has many weights of exactly 0, which must not wait for the last epoch."""
    masks, maps = parts()
    if sparse:
        kept = {name: maps[name] * masks[name] for name in masks}
        maps = {name: map_ / map_.sum(-1, keepdim=True) for name, map_ in kept.items()}
    gradual, last = GradualMask(masks, maps, epochs=5), dict.fromkeys(masks, torch.tensor(True))
    for epoch in range(7):
        now = gradual.patterns(gradual.fraction(epoch))
        share = 1 - (1 - min((epoch + 1) / 5, 1)) ** 3
        assert removed(now) == round(share * removed(masks))
        assert all((now[name] <= last[name]).all() for name in now)
        assert gradual.finished(epoch) == (epoch >= 4)
        last = now
    assert all(torch.equal(last[name], masks[name]) for name in masks)


def test_the_least_attended_pairs_go_first() -> None:
    masks, maps = parts()
    half = GradualMask(masks, maps, epochs=2).patterns(0.5)
    gone = torch.cat([maps[name][~half[name]] for name in masks])
    later = torch.cat([maps[name][half[name] & ~masks[name]] for name in masks])
    assert gone.max() <= later.min()


def test_a_model_follows_epoch_by_epoch_and_its_checkpoint_holds_the_last_mask() -> None:
    masks, maps = parts()
    model = vitruvius.create_model("vitruvius/vit_digits", depth=2, attention=[part("mask", keep="all")])
    gradual = GradualMask(masks, maps, epochs=3)
    for epoch in (0, 1, 2):
        gradual.epoch_start(epoch, model)
        state = model.model.state_dict()
        kept = {name: state[f"{name}.core.mask.keep"].clone() for name in masks}
        assert removed(kept) == round(gradual.fraction(epoch) * removed(masks))
    assert all(torch.equal(kept[name], masks[name]) for name in masks)


def test_what_does_not_fit_is_refused_and_nothing_is_touched() -> None:
    masks, maps = parts()
    model = vitruvius.create_model("vitruvius/vit_digits", depth=2, attention=[part("mask", keep="all")])
    with pytest.raises(ConfigError, match="another resolution"):
        tighten(model, {"blocks.0.attn": masks["blocks.0.attn"], "blocks.1.attn": torch.ones(3, 9, 9) > 0})
    assert model.model.blocks[0].attn.core.mask.keep.all()
    with pytest.raises(ConfigError, match=r"'blocks.0.attn' holds no 'mask'"):
        tighten(vitruvius.create_model("vitruvius/vit_digits", depth=2), masks)
    with pytest.raises(ConfigError, match="no average map"):
        GradualMask(masks, {}, epochs=3)
    with pytest.raises(ConfigError, match="epochs=0"):
        GradualMask(masks, maps, epochs=0)
