"""Polarisation and the accelerator's cycles are those of the published code and of its one published mask."""

from __future__ import annotations

import pytest
import torch
from goldens import cases, deit_tiny_keep, golden, unpacked

from vitruvius._errors import ConfigError
from vitruvius.compression.cost import attention_cycles, dense_layers, linear_cycles
from vitruvius.compression.polarisation import describe, polarise, polarise_all

PUBLISHED = [
    [1, 10, 1], [1, 1, 1], [70, 1, 1], [1, 1, 1], [1, 1, 1], [20, 3, 1],
    [17, 1, 1], [1, 1, 1], [1, 5, 1], [9, 1, 7], [10, 6, 15], [31, 21, 28],
]  # fmt: skip
DEIT_TINY = {"layers": 12, "tokens": 197, "dim": 192, "num_heads": 3, "ratio": 2 / 3}


@pytest.mark.parametrize("name", ["vitcod_masks_a", "vitcod_masks_b"])
def test_golden_permutations_and_counts_are_matched(name: str) -> None:
    tensors, metadata = golden(name)
    for case in cases(metadata):
        for threshold in case["reorders"]:
            layers = [polarise(~removed, threshold=threshold) for removed in tensors[f"{case['id']}.mask"]]
            stem = f"{case['id']}.thr{threshold}"
            assert torch.equal(torch.stack([one.keep for one in layers]), ~tensors[f"{stem}.reordered"])
            assert torch.equal(torch.stack([one.num_global for one in layers]), tensors[f"{stem}.num_global"])
            assert torch.equal(torch.stack([one.dense_kept for one in layers]), tensors[f"{stem}.dense_count"])
            assert torch.equal(torch.stack([one.kept for one in layers]), tensors[f"{stem}.kept_count"])


def test_a_golden_mask_of_197_tokens_is_reordered_as_published() -> None:
    tensors, metadata = golden("vitcod_polarise_197")
    removed, reordered = (unpacked(tensors[f"{name}_bits"], metadata) for name in ("mask", "reordered"))
    for layer, one in enumerate(polarise(~pattern, threshold=int(metadata["threshold"])) for pattern in removed):
        assert torch.equal(one.keep, ~reordered[layer])
        assert torch.equal(one.num_global, tensors["num_global"][layer])
        assert torch.equal(one.dense_kept, tensors["dense_count"][layer])


def test_the_published_mask_has_the_published_global_tokens_and_densities() -> None:
    layers = [polarise(keep, threshold=50) for keep in deit_tiny_keep()]
    assert [one.num_global.tolist() for one in layers] == PUBLISHED
    assert sum(int(one.dense_kept.sum()) for one in layers) == 34_508
    dense, sparse = (torch.stack([one.densities[i] for one in layers]) for i in (0, 1))
    assert round(float(dense.mean()), 3) == 0.861
    assert round(float(sparse.mean()), 4) == 0.0304
    assert "31 21 28" in describe(dict(zip("abcdefghijkl", layers, strict=True)))


def test_the_new_order_is_a_permutation_of_the_tokens() -> None:
    keep = torch.rand(2, 30, 30, generator=torch.Generator().manual_seed(0)) > 0.6
    one = polarise(keep, threshold=12)
    assert 0 < int(one.num_global[0]) < 30
    for head, order in enumerate(one.order):
        assert torch.equal(one.keep[head], keep[head][order][:, order])
        assert torch.equal(order.sort().values, torch.arange(30))


def test_masks_that_are_not_square_are_refused_or_left_out() -> None:
    square, wide = torch.ones(1, 4, 4, dtype=torch.bool), torch.ones(1, 2, 4, dtype=torch.bool)
    with pytest.raises(ConfigError, match="permuted together"):
        polarise(wide)
    assert list(polarise_all({"a": square, "b": wide})) == ["a"]
    assert polarise_all({"b": wide}) == {}


def test_the_published_cycle_counts_are_reproduced_with_head_0_standing_for_all() -> None:
    layers = [polarise(keep, threshold=50) for keep in deit_tiny_keep()]
    cycles = attention_cycles(layers, head_dim=64, ratio=2 / 3, heads="first")
    assert (cycles.load, cycles.decode, cycles.compute, cycles.total) == (9_492, 4_728, 4_709, 9_492)
    linear = linear_cycles(**DEIT_TINY, rounding="released")  # type: ignore[arg-type]
    assert (linear.projections, linear.load, linear.mlp, linear.total) == (681_492, 23_304, 1_361_664, 2_043_156)


def test_all_heads_take_as_long_as_the_slowest_and_rounding_up_makes_small_jobs_count() -> None:
    layers = [polarise(keep, threshold=50) for keep in deit_tiny_keep()]
    first, every = (attention_cycles(layers, head_dim=64, ratio=2 / 3, heads=heads) for heads in ("first", "all"))
    assert every.compute > first.compute
    assert every.load == first.load
    linear = linear_cycles(**DEIT_TINY)  # type: ignore[arg-type]
    assert linear.encode > 0
    assert linear.mlp_load > 0
    assert 2_043_156 < linear.total < 1.02 * 2_043_156


def test_cycles_fall_with_sparsity_and_nothing_divides_by_zero() -> None:
    everything = torch.ones(2, 20, 20, dtype=torch.bool)
    dense = attention_cycles([polarise(everything, threshold=0)], head_dim=16)
    assert dense == attention_cycles(dense_layers([polarise(everything)]), head_dim=16)
    only_itself = torch.eye(20, dtype=torch.bool).expand(2, 20, 20)
    no_globals = attention_cycles([polarise(only_itself, threshold=19)], head_dim=16)
    assert 0 < no_globals.compute < dense.compute
    nothing = attention_cycles([polarise(torch.zeros(2, 20, 20, dtype=torch.bool))], head_dim=16)
    assert nothing.compute == 0
    one_global = torch.zeros(2, 20, 20, dtype=torch.bool)
    one_global[..., 0] = True
    assert attention_cycles([polarise(one_global, threshold=5)], head_dim=16).compute > 0


def test_bad_cycle_questions_are_refused() -> None:
    with pytest.raises(ConfigError, match="no layers"):
        attention_cycles([], head_dim=64)
    with pytest.raises(ConfigError, match="ratio = 0"):
        attention_cycles([polarise(torch.ones(1, 4, 4, dtype=torch.bool))], head_dim=4, ratio=0)
