"""The Hopper kernel of attention under a pattern without such a GPU: its lists, whether it compiles."""

import importlib.util

import pytest
import torch
from another_process import answer_of
from heads_and_oracles import attend_slowly, make_heads, make_keep

from vitruvius.attention.fused import masked
from vitruvius.attention.fused.hopper._mask_plan import FEW, HALF, KEYS, ROWS, STEP, make_plan, num_places

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
SIZES = [(129, 129), (137, 137), (193, 193), (197, 197), (200, 200), (256, 256), (130, 250), (250, 130)]


def local(N, M):
    """Rows see what is near; some see everything."""
    near = (torch.arange(N)[:, None] * M // N - torch.arange(M)).abs() <= 9
    return near | (torch.arange(N) % 60 == 0)[:, None]


def masks(N, M):
    one, other = make_keep(2, N, M)
    other[N // 2] = False
    return torch.stack([one, other, torch.ones(N, M, dtype=torch.bool), local(N, M)])


def bits(words, count):
    return (words.long()[..., None] >> torch.arange(count) & 1).bool()


def windows_of(number):
    return [(int(number) >> (4 + 5 * i) & 31) * STEP for i in range(int(number) & 15)]


def follow(plan, heads):
    """What the lists say, step by step, as the kernel reads them: (B, H, N, D)."""
    q, k, v = heads[:3]
    out = torch.full_like(q, torch.nan)
    T = plan.windows.shape[1]
    for h, (rows, columns) in enumerate(zip(plan.rows.long(), plan.columns.long(), strict=True)):
        keys, values = k[:, h, columns], v[:, h, columns]
        for t in range(T):
            which = rows[t * ROWS : (t + 1) * ROWS]
            weights = q.new_zeros(len(q), ROWS, keys.shape[1])
            for i, start in enumerate(windows_of(plan.windows[h, t])):
                seen = slice(start, start + KEYS)
                part = (q[:, h, which] @ keys[:, seen].mT * heads.scale).exp()
                weights[:, :, seen] += part * bits(plan.words[h, t, i], KEYS)
            out[:, h, which] = share_out(weights, values)
        dense = rows[T * ROWS :]
        kept = bits(plan.dense[h], FEW).T  # (8, 256)
        weights = (q[:, h, dense] @ keys.mT * heads.scale).exp()
        counts = torch.zeros(FEW, keys.shape[1])
        counts[:, :HALF] += kept[:, :HALF]
        counts[:, -HALF:] += kept[:, HALF:]
        out[:, h, dense] = share_out(weights * counts, values)
    return out


def share_out(weights, values):
    return weights @ values / weights.sum(-1, keepdim=True).clamp(min=1e-30)


@pytest.mark.parametrize(("N", "M"), SIZES)
def test_the_lists_are_the_mask(N, M):
    keep = masks(N, M)
    heads = make_heads(max(N, M), 8, torch.float64, heads=len(keep))
    heads = heads._replace(q=heads.q[:, :, :N], k=heads.k[:, :, :M], v=heads.v[:, :, :M])
    torch.testing.assert_close(follow(make_plan(keep), heads), attend_slowly(heads, keep).nan_to_num(0.0))


@pytest.mark.parametrize(("N", "M"), SIZES)
def test_windows_stay_inside_and_need_no_more_room_than_there_is(N, M):
    plan = make_plan(masks(N, M))
    assert plan.columns.shape[1] == num_places(M) >= M
    for number in plan.windows.flatten():
        starts = windows_of(number)
        assert len(starts) <= plan.words.shape[2]
        assert all(0 <= start <= num_places(M) - KEYS for start in starts)
    assert all(set(rows.tolist()) == set(range(N)) for rows in plan.rows)


def test_a_local_mask_needs_few_windows():
    plan = make_plan(local(197, 197)[None])
    assert int((plan.windows & 15).sum()) <= 9  # 3 tiles of 64 rows and 9 columns on either side


def test_heads_neither_long_nor_very_short_have_a_plan_in_their_pattern():
    sizes = ((129, 256), (129, 257), (128, 256), (256, 128))
    lengths = [len(masked.make_pattern(make_keep(1, N, M, kept=0.02))) - masked.LISTS for N, M in sizes]
    assert lengths == [5, 0, 0, 0]


def test_the_kernel_takes_heads_of_its_width_with_a_plan_and_rows_that_are_near(monkeypatch):
    monkeypatch.setattr(masked, "on_hopper", lambda *tensors: True)
    pattern, wide = masked.make_pattern(make_keep(2, 130)), make_heads(130, 64, torch.bfloat16)
    assert masked._hopper_takes(*wide[:3], pattern)
    assert not masked._hopper_takes(*wide[:3], pattern[: masked.LISTS])
    assert not masked._hopper_takes(*make_heads(130, 32, torch.bfloat16)[:3], pattern)
    far = torch.empty_strided((1, 2, 130, 64), (64, 64, 2**23, 1), device="meta")
    assert not masked._hopper_takes(far, *wide[1:3], pattern)


@needs_triton
def test_it_compiles_for_the_gpu_and_three_programs_share_a_multiprocessor():
    table = answer_of("scripts/kernel_resources.py", "--only", "Hopper: mask", "--tokens", "137", "197", "256")
    rows = [line.split() for line in table.splitlines() if line.startswith("Hopper")]
    assert len(rows) == 3, table
    for row in rows:
        registers, spilled, shared, products, older = (int(row[place]) for place in range(-7, -2))
        assert 3 * 128 * registers <= 65536, table
        assert spilled <= 16, table
        assert 3 * (shared + 1024) <= 228 * 1024, table
        assert products > 0, table
        assert older == 0, table
