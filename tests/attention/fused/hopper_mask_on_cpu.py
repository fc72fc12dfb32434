"""The Hopper kernel of attention under a pattern, run on the CPU: by test_hopper.py, in a process of its own."""

import gluon_on_cpu as gluon  # before any kernel
import pytest
import torch
from heads_and_oracles import attend_slowly, make_heads, make_keep

from vitruvius.attention.fused import masked
from vitruvius.attention.fused.hopper import _mask

SIZES = [(129, 129), (137, 137), (193, 193), (197, 197), (200, 200), (256, 256), (130, 250), (250, 130)]


class Launcher:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments, **settings: gluon.launch(self.kernel, grid[0], arguments, **settings)


def attend(heads, keep, monkeypatch):
    """(out, log-sums)."""
    monkeypatch.setattr(_mask, "look", Launcher(_mask.look))
    q, k, v, _, scale, _ = heads
    pattern = masked.make_pattern(keep)
    out, sums = (torch.full_like(x, torch.nan) for x in masked._room(q, k, v, pattern, scale))
    masked._look_on_hopper(q, k, v, out, sums, pattern, scale)
    return out, sums


def check(heads, keep, monkeypatch):
    out, sums = attend(heads, keep, monkeypatch)
    heads = heads._replace(**{name: getattr(heads, name).double() for name in "qkv"})
    true = attend_slowly(heads, keep).nan_to_num(0.0)
    scores = (heads.q @ heads.k.mT * heads.scale).masked_fill(~keep, -torch.inf)
    assert (out - true).norm() < 5e-3 * true.norm()
    assert (out - true).norm(dim=-1).max() < 0.05 * true.norm(dim=-1).max()
    torch.testing.assert_close(sums.double() * torch.tensor(2.0).log(), scores.logsumexp(-1), rtol=1e-5, atol=1e-4)


def rectangular(N, M, **options):
    heads = make_heads(max(N, M), 64, torch.bfloat16, **options)
    return heads._replace(q=heads.q[:, :, :N], k=heads.k[:, :, :M], v=heads.v[:, :, :M])


@pytest.mark.parametrize(("N", "M"), SIZES)
def test_sparse_heads(N, M, monkeypatch):
    check(rectangular(N, M, batch=2), make_keep(2, N, M), monkeypatch)


def test_a_dense_head_beside_a_sparse_one(monkeypatch):
    keep = make_keep(2, 197)
    keep[1] = True
    check(rectangular(197, 197), keep, monkeypatch)


def test_a_row_that_keeps_nothing_is_nothing(monkeypatch):
    keep = make_keep(2, 137)
    keep[0, 5] = keep[1, 0] = False
    check(rectangular(137, 137), keep, monkeypatch)


def test_a_tile_that_keeps_nothing_is_nothing(monkeypatch):
    keep = make_keep(2, 197)
    keep[0, 60:] = False
    check(rectangular(197, 197), keep, monkeypatch)


def test_scores_too_large_for_an_exponential(monkeypatch):
    heads = rectangular(197, 197)
    check(heads._replace(q=heads.q * 8, k=heads.k * 8), make_keep(2, 197), monkeypatch)


def test_scores_all_too_small_for_an_exponential(monkeypatch):
    heads = rectangular(197, 197)
    check(heads._replace(q=heads.q.abs() * -8, k=heads.k.abs() * 8), make_keep(2, 197), monkeypatch)
