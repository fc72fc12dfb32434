"""Head weights are views into a family's own storage, of the right head."""

from __future__ import annotations

import pytest
import torch
from operating import BY_NAME, ONE_EACH, Disturbed, heads_of, rewired

from families import Family
from vitruvius._errors import UnsuitableSite
from vitruvius.surgery import head_weights, restore

SHARED_VALUES = "differential"  # two heads of the core over one set of values
OWN_STORAGE = [
    *(f for f in ONE_EACH if f.name != SHARED_VALUES),
    *(BY_NAME[name] for name in ("vit_narrow", "rope_separate", "eva_fused", "maxvit_tf")),
]
MIXES_HEADS = {"vit_qk_norm", "vit_gated", "rope_gated", "eva_fused", "eva_gated", "cait"}  # scale norm, talking heads


@pytest.mark.parametrize("family", OWN_STORAGE, ids=str)
@torch.no_grad()
def test_head_weights_are_views_of_the_right_head(family: Family) -> None:
    model, x = family.randomised()
    views = head_weights(rewired(model, family), input_size=family.input_size)
    before = heads_of(model, x)
    for name, (site, weights) in {site.family: (name, (site, w)) for name, (site, w) in views.items()}.values():
        assert weights.q.shape[0] == weights.k.shape[0] == weights.v.shape[0] == weights.out.shape[1] == site.num_heads
        assert weights.q.shape[2] == weights.k.shape[2] == weights.v.shape[2] == site.dim
        kept = weights.v[0].clone()
        weights.v[0].mul_(-1.7)
        new, old = heads_of(model, x)[name].v, before[name].v
        weights.v[0].copy_(kept)
        if site.family == "cait":  # every head of its softmax sees the values of all heads, one after the other
            new, old = (v[:, 0].unflatten(-1, (site.num_heads, -1)).movedim(-2, 1) for v in (new, old))
        changed = [not torch.equal(a, b) for a, b in zip(new.unbind(1), old.unbind(1), strict=True)]
        assert changed == [True] + [False] * (site.num_heads - 1)


@pytest.mark.parametrize("family", OWN_STORAGE, ids=str)
@torch.no_grad()
def test_output_weights_are_views_of_the_right_head(family: Family) -> None:
    if family.name in MIXES_HEADS:
        pytest.skip("what one head says reaches the output by way of others too")
    model, x = family.randomised()
    expected = model(x)
    assert not torch.allclose(rewired(model, family, Disturbed)(x), expected, atol=1e-3)
    for _, weights in head_weights(restore(model), input_size=family.input_size).values():
        weights.out[:, 0] = 0
    expected = model(x)
    torch.testing.assert_close(rewired(model, family, Disturbed)(x), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["vit", "beit", "eva", "xcit", "cait", "swin", "coatnet"])
@torch.no_grad()
def test_queries_and_keys_are_made_by_the_views(name: str) -> None:
    family = BY_NAME[name]
    model, x = family.randomised()
    views = head_weights(rewired(model, family), input_size=family.input_size)
    for _, weights in views.values():
        for part in (weights.q, weights.q_bias, weights.v, weights.v_bias):
            if part is not None:
                part.zero_()
    seen = heads_of(model, x)
    assert not any(seen[n].q.any() or seen[n].v.any() for n in views)
    assert all(seen[n].k.any() for n in views)


def test_two_heads_over_one_set_of_values_have_no_weights_of_their_own() -> None:
    model, _ = BY_NAME[SHARED_VALUES].randomised()
    with pytest.raises(UnsuitableSite, match="two heads share one value projection"):
        head_weights(model)
