"""What attacks climb, against golden numbers and in the limit of few classes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attacked import golden

from vitruvius.attacks.base import CE, KL, MARGIN
from vitruvius.attacks.losses import DLR, TARGETED_DLR, TARGETED_MARGIN, Loss, TargetedLoss


def test_dlr_is_the_released_one() -> None:
    tensors, _, _ = golden("aa_dlr")
    logits, y = tensors["logits"], tensors["y"]
    torch.testing.assert_close(DLR(logits, y), tensors["dlr"], rtol=0, atol=1e-14)
    torch.testing.assert_close(
        TARGETED_DLR(logits, y, tensors["y_target"]), tensors["dlr_targeted"], rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_dlr_does_not_change_when_logits_are_scaled_and_shifted_unless_it_is_a_plain_margin(classes: int) -> None:
    logits = torch.randn(20, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(classes))
    y = torch.arange(20) % classes
    scaled = DLR(5 * logits + 3, y)
    torch.testing.assert_close(scaled, DLR(logits, y) if classes > 2 else 5 * MARGIN(logits, y))


@pytest.mark.parametrize("classes", [2, 3])
def test_targeted_dlr_falls_back_to_the_margin_below_four_classes(classes: int) -> None:
    logits = torch.randn(6, classes)
    y, target = torch.zeros(6, dtype=torch.long), torch.ones(6, dtype=torch.long)
    assert torch.equal(TARGETED_DLR(logits, y, target), TARGETED_MARGIN(logits, y, target))


def test_the_margin_is_positive_exactly_where_the_model_is_wrong() -> None:
    logits, y = torch.randn(50, 4), torch.arange(50) % 4
    assert torch.equal(MARGIN(logits, y) > 0, logits.argmax(1) != y)


def test_soft_labels_count_as_their_largest_except_for_kl() -> None:
    logits, soft = torch.randn(8, 5), torch.rand(8, 5).softmax(1)
    for loss in (CE, DLR, MARGIN):
        assert torch.equal(loss(logits, soft), loss(logits, soft.argmax(1)))
    by_hand = (soft * (soft.log() - F.log_softmax(logits, 1))).sum(1)
    torch.testing.assert_close(KL(logits, soft), by_hand)


def test_losses_are_known_by_name() -> None:
    assert Loss.parse("dlr") is DLR
    assert TargetedLoss.parse("margin") is TARGETED_MARGIN
