"""Costs are what a count by hand gives."""

from __future__ import annotations

import pytest
import torch
from goldens import golden

import vitruvius
from vitruvius.attention import part
from vitruvius.compression.cost import account
from vitruvius.compression.sparse import use_sparse

C, H, N, D, MLP = 48, 3, 16, 16, 96


def digits(**kwargs: object) -> vitruvius.models.PixelModel:
    return vitruvius.create_model("vitruvius/vit_digits", depth=2, **kwargs)  # type: ignore[arg-type]


def test_multiplications_and_parameters_are_counted_by_hand() -> None:
    cost = account(digits())
    attention = N * C * 4 * C + 2 * H * N * N * D  # projections, then q kᵀ and map · v
    embedding, head = N * C * 3 * 2 * 2, C * 10
    assert [site.macs for site in cost.sites] == [attention] * 2
    assert [site.parameters for site in cost.sites] == [4 * C * C + 4 * C] * 2
    assert cost.macs == 2 * (attention + 2 * N * C * MLP) + embedding + head
    assert cost.sites[0].dense_macs == cost.sites[0].kept_macs == 2 * H * N * N * D
    assert cost.sites[0].bytes_moved == 4 * (4 * C * C + 4 * C + 4 * N * C + H * N * N)


def test_a_mask_saves_what_it_removes_and_an_auto_encoder_moves_less() -> None:
    keep = torch.eye(N, dtype=torch.bool).expand(H, N, N)
    masked = account(digits(attention=[part("low_rank", rank=2), part("mask", keep=keep)]))
    dense = account(digits())
    site = masked.sites[0]
    assert site.core == "low_rank → mask → softmax"
    assert site.kept_macs == 2 * H * N * D
    extra = 2 * (2 * H * 2 + 2 + H)  # parameters of the two auto-encoders
    q_and_k = 2 * H * N * D
    saved = H * N * N - H * N + q_and_k // 3
    assert site.bytes_moved == dense.sites[0].bytes_moved + 4 * (extra - saved)
    assert masked.parameters == dense.parameters + 2 * extra


def test_the_golden_saving_is_matched() -> None:
    tensors, metadata = golden("vitcod_accounting")
    width = int(metadata["C"])
    model = vitruvius.create_model(
        "vit_tiny_patch16_224", img_size=64, depth=len(tensors["masks"]), embed_dim=width, num_heads=int(metadata["H"])
    )
    for i, removed in enumerate(tensors["masks"]):
        vitruvius.rewire(model, part("mask", keep=_whole(~removed)), where=f"blocks.{i}.attn")
    saved = sum(
        2 * int(removed[head].sum()) * width // int(metadata["H"])
        for removed in tensors["masks"]
        for head in range(int(metadata["H"]))
    )
    assert saved / 1e9 == pytest.approx(float(tensors["reduced_gflops_total"]), rel=1e-12)
    regained = sum(int((_whole(~removed) & removed).sum()) for removed in tensors["masks"])
    assert sum(
        site.dense_macs - site.kept_macs for site in account(model).sites
    ) == saved - 2 * regained * width // int(metadata["H"])


def _whole(keep: torch.Tensor) -> torch.Tensor:
    """A key for every query, as our masks demand."""
    keep = keep.clone()
    keep[..., 0] |= ~keep.any(-1)
    return keep


def test_windows_count_as_often_as_they_are() -> None:
    model = vitruvius.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1), num_classes=10)
    first = account(model).sites[0]
    assert (
        first.dense_macs == first.kept_macs == 4 * 3 * 49 * 49 * 64
    )  # four windows of 49 tokens, three heads of width 32 + 32


def test_measured_times_stand_beside_the_counts() -> None:
    keep = torch.eye(N, dtype=torch.bool).expand(H, N, N)
    model = use_sparse(digits(attention=[part("mask", keep=keep)]))
    cost = account(model, measure=2)
    assert cost.seconds is not None
    assert 0 < sum(site.seconds or 0.0 for site in cost.sites) < cost.seconds
    assert "blocks.1.attn" in str(cost)
    assert str(cost).count(" ms") == 3
    assert cost.sites[0].core == "sparse_softmax"
