"""Sparse softmax computes what mask → softmax computes."""

from __future__ import annotations

import copy
import itertools

import pytest
import timm
import torch
from goldens import deit_tiny_keep
from torch import Tensor

import vitruvius
from families import FAMILIES
from vitruvius._errors import ConfigError, SurgeryError
from vitruvius.attention import part
from vitruvius.attention.base import build_core
from vitruvius.attention.sparse_softmax import BUCKET, KEY, make_buckets, tile_order
from vitruvius.compression.rules.local_global import LocalGlobal
from vitruvius.compression.sparse import use_sparse
from vitruvius.heads import Heads, Site

GRID = Site(
    name="here", family="vit", attends="tokens", num_heads=3, num_queries=101, num_keys=101, key_dim=8, value_dim=8,
    dim=24, num_prefix_tokens=1, grid=(10, 10),
)  # fmt: skip


def some_heads(site: Site = GRID, *, bias: bool = False, seed: int = 0, batch: int = 2) -> Heads:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, site.num_heads, site.num_keys, 8, generator=generator).double() for _ in range(3))
    extra = torch.randn(site.num_heads, site.num_queries, site.num_keys, generator=generator).double() if bias else None
    return Heads(q[:, :, : site.num_queries], k, v, extra, 0.3)


def patterns(site: Site = GRID) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (site.num_heads, site.num_queries, site.num_keys)
    rare = torch.rand(shape, generator=generator) > 0.95
    rare[..., 0] = True
    one = torch.zeros(shape, dtype=torch.bool)
    one[..., 7] = True
    found = {"rare": rare, "one key": one, "everything": torch.ones(shape, dtype=torch.bool)}
    if site.grid is not None:
        map_ = torch.rand(shape, generator=generator).softmax(-1)
        rule = LocalGlobal(radius=1, tokens=2)
        found["local and global"] = rule.levels(map_, site) < rule.limit
    return found


@pytest.mark.parametrize("name", list(patterns()))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_it_equals_the_masked_dense_result(name: str, bias: bool, block: int) -> None:
    keep, heads = patterns()[name], some_heads(bias=bias)
    dense = build_core([part("mask", keep=keep)], GRID).double()
    sparse = build_core([part("sparse_softmax", keep=keep, block=block)], GRID).double()
    torch.testing.assert_close(sparse(heads), dense(heads), atol=1e-12, rtol=1e-12)


def side_by_side(heads: Heads) -> Heads:
    """The same numbers as one projection leaves them: q, k and v of a token beside each other, head by head."""
    qkv = torch.stack(heads[:3]).permute(1, 3, 0, 2, 4).contiguous()  # (B, N, 3, H, D)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return heads._replace(q=q, k=k, v=v)


@pytest.mark.parametrize("name", list(patterns()))
@pytest.mark.parametrize("batch", [1, 2, 300])
def test_rows_read_where_the_projection_left_them_give_the_masked_dense_result(name: str, batch: int) -> None:
    keep, heads = patterns()[name], some_heads(batch=batch)
    fused = side_by_side(heads)
    assert fused.k.stride() == (3 * 3 * 8 * 101, 8, 3 * 3 * 8, 1)
    dense = build_core([part("mask", keep=keep)], GRID).double()(heads)
    sparse = build_core([part("sparse_softmax", keep=keep)], GRID).double()
    for given in (heads, fused):
        torch.testing.assert_close(sparse(given), dense, atol=1e-12, rtol=1e-12)


def test_without_a_gradient_nothing_is_computed_by_the_differentiable_way(monkeypatch: pytest.MonkeyPatch) -> None:
    core = build_core([part("sparse_softmax", keep=patterns()["local and global"])], GRID).double()
    expected = core(some_heads())
    monkeypatch.setattr(type(core.kernel), "_attend", lambda *_: pytest.fail("the slower way"))
    torch.testing.assert_close(core(some_heads()), expected)
    leaf = some_heads().q.requires_grad_()
    with torch.no_grad():
        core(some_heads()._replace(q=leaf))
    with pytest.raises(pytest.fail.Exception):
        core(some_heads()._replace(q=leaf))


def test_heads_come_out_so_that_they_are_joined_without_a_copy() -> None:
    core = build_core([part("sparse_softmax", keep=patterns()["local and global"])], GRID).double()
    assert core(some_heads()).transpose(1, 2).is_contiguous()


def test_buckets_cost_no_more_than_any_other_way_to_gather_the_blocks() -> None:
    keep = patterns()["local and global"]
    order = tile_order(101, (10, 10), 1, 4)
    buckets = make_buckets(keep, order, 4)
    widths = sorted(width for bucket in buckets for width in (bucket.bias > -torch.inf).any(1).sum(-1).tolist())
    spent = sum(bucket.bias.shape[0] * bucket.bias.shape[2] * (4 + KEY) + BUCKET for bucket in buckets)
    sizes = sorted(set(widths))
    assert 2 < len(sizes) < 12
    cheapest = min(
        sum(
            sum(low < width <= high for width in widths) * high * (4 + KEY) + BUCKET
            for low, high in itertools.pairwise((0, *chosen, sizes[-1]))
        )
        for number in range(len(sizes))
        for chosen in itertools.combinations(sizes[:-1], number)
    )
    assert spent == cheapest


def test_fewer_queries_than_keys_are_fine() -> None:
    site = Site(**{**GRID.__dict__, "attends": "downsampled", "num_queries": 25, "grid": None, "num_prefix_tokens": 0})
    for keep in patterns(site).values():
        heads = some_heads(site)
        dense = build_core([part("mask", keep=keep)], site).double()(heads)
        torch.testing.assert_close(build_core([part("sparse_softmax", keep=keep)], site).double()(heads), dense)


def test_gradients_are_those_of_the_dense_result() -> None:
    keep = patterns()["local and global"]
    grads = []
    for name in ("mask", "sparse_softmax"):
        heads = some_heads()
        leaves = [x.clone().requires_grad_() for x in heads[:3]]
        build_core([part(name, keep=keep)], GRID).double()(Heads(*leaves, None, 0.3)).square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(grads[0], grads[1])


def test_it_computes_little_more_than_a_window_keeps() -> None:
    side = 32
    site = Site(**{**GRID.__dict__, "num_heads": 1, "num_queries": 1025, "num_keys": 1025, "grid": (side, side)})
    rule = LocalGlobal(radius=2, tokens=0)
    keep = rule.levels(torch.full((1, 1025, 1025), 1 / 1025), site) < rule.limit
    kernel = part("sparse_softmax", keep=keep)(site)
    share = float(kernel.extra_repr().split("computes ")[1].split("%")[0]) / 100
    assert (
        float(keep.double().mean()) < share < 0.18
    )  # 12 x 12 neighbours of an 8 x 8 tile, padding and the class token


def test_a_pattern_from_a_checkpoint_is_planned_anew() -> None:
    keep = patterns()["rare"]
    core = build_core([part("sparse_softmax", keep="all")], GRID).double()
    state = build_core([part("sparse_softmax", keep=keep)], GRID).state_dict()
    assert list(state) == ["sparse_softmax.keep"]
    core.load_state_dict(state)
    expected = build_core([part("mask", keep=keep)], GRID).double()(some_heads())
    torch.testing.assert_close(core(some_heads()), expected)
    torch.testing.assert_close(copy.deepcopy(core)(some_heads()), expected)


def test_a_model_with_the_published_mask_answers_the_same_when_made_sparse() -> None:
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", depth=3).eval()
    for i, keep in enumerate(deit_tiny_keep()[:3]):
        vitruvius.rewire(model, part("mask", keep=keep), where=f"blocks.{i}.attn")
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        expected = model(x)
        use_sparse(model)
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert model.blocks[0].attn.core.describe() == "sparse_softmax"


@pytest.mark.parametrize("name", ["levit", "swin", "beit"])
def test_families_with_biases_answer_the_same_when_made_sparse(name: str) -> None:
    model, x = next(family for family in FAMILIES if family.name == name).randomised()
    generator = torch.Generator().manual_seed(0)
    for site in vitruvius.survey(model).values():
        keep = torch.rand(site.num_heads, site.num_queries, site.num_keys, generator=generator) > 0.6
        keep[..., 0] = True
        vitruvius.rewire(model, part("mask", keep=keep), where=site.name)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(use_sparse(model)(x), expected, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_made_sparse_is_said() -> None:
    model = vitruvius.create_model("vitruvius/vit_digits", depth=1)
    with pytest.raises(SurgeryError, match="no site with mask → softmax"):
        use_sparse(model)
    with pytest.raises(ConfigError, match="block = 0"):
        build_core([part("sparse_softmax", keep="all", block=0)], GRID)
    core, heads = build_core([part("sparse_softmax", keep="all")], GRID), Heads(*(torch.rand(1, 3, 50, 8),) * 3)
    with pytest.raises(SurgeryError, match="101 queries and 101 keys and met 50 and 50"):
        core(heads)
