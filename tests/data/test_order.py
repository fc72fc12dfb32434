"""Order and shards are functions of seed and epoch alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.data.distributed_sampler import RepeatAugSampler

from vitruvius._errors import DataError
from vitruvius.data.order import Order


@given(st.integers(1, 300), st.integers(1, 5), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_evaluation_sees_each_image_exactly_once_whatever_the_number_of_processes(number, world_size, batch_size):
    seen = []
    for rank in range(world_size):
        order = Order(torch.arange(number), batch_size=batch_size, shuffle=False, rank=rank, world_size=world_size)
        ids, _ = order.epoch(0)
        assert len(order) == len(list(ids.split(batch_size))) if len(ids) else len(order) == 0
        seen += ids.tolist()
    assert sorted(seen) == list(range(number))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_shards_are_equally_long_and_disjoint(world_size):
    orders = [
        Order(torch.arange(100), batch_size=8, shuffle=True, rank=r, world_size=world_size) for r in range(world_size)
    ]
    seen = [order.epoch(3)[0] for order in orders]
    assert {len(ids) for ids in seen} == {100 // world_size // 8 * 8}
    together = torch.cat(seen).tolist()
    assert len(set(together)) == len(together)


def test_the_permutation_never_changes():
    """Pinned: a run of last year can be resumed."""
    ids, keys = Order(torch.arange(10), batch_size=2, shuffle=True, seed=42).epoch(3)
    assert ids.tolist() == [1, 4, 8, 9, 5, 2, 0, 3, 7, 6]
    assert keys[:2].tolist() == [1631999352894794527, 8114257437993665957]


@pytest.mark.parametrize(("number", "world_size"), [(1000, 2), (1000, 3), (513, 4)])
def test_repeated_augmentation_deals_out_images_like_timms_sampler(number, world_size, monkeypatch):
    """With timm's permutation in place of ours."""
    permutation = torch.randperm(number, generator=torch.Generator().manual_seed(7))
    monkeypatch.setattr(torch, "randperm", lambda *_, **__: permutation)
    for rank in range(world_size):
        theirs = RepeatAugSampler(range(number), num_replicas=world_size, rank=rank, num_repeats=3)
        ours = Order(torch.arange(number), batch_size=1, shuffle=True, rank=rank, world_size=world_size, repeats=3)
        assert ours.epoch(0)[0].tolist() == list(theirs)


def test_repetitions_of_an_image_have_different_luck():
    ids, keys = Order(torch.arange(20), batch_size=1, shuffle=True, repeats=3).epoch(0)
    assert ids.unique_consecutive(return_counts=True)[1][:6].tolist() == [3] * 6
    assert len(keys.unique()) == len(keys) == 20


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(DataError, match="10 training images do not fill one batch of 8 in each of 2 process"):
        Order(torch.arange(10), batch_size=8, shuffle=True, world_size=2)


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(DataError, match="rank 2 is not one of 2"):
        Order(torch.arange(10), batch_size=1, shuffle=True, rank=2, world_size=2)
