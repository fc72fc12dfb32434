"""What is refused before any work begins, whatever package asks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vitruvius._checks import check_eval_mode, check_labels, check_logits, check_pixels, device_of
from vitruvius._errors import ConfigError, DataError


def test_one_block_in_train_mode_is_enough_to_refuse_a_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    check_eval_mode(model)
    model[1].train()
    with pytest.raises(ConfigError, match=r"'1' of the model is in train mode; call model.eval\(\)"):
        check_eval_mode(model)


def test_the_device_of_a_model_without_parameters_is_known_too() -> None:
    assert device_of(nn.Identity()).type == "cpu"
    buffered = nn.Module()
    buffered.register_buffer("mean", torch.zeros(1, device="meta"))
    assert device_of(buffered).type == "meta"
    assert device_of(nn.Linear(1, 1, device="meta")).type == "meta"
    assert device_of(len).type == "cpu"


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(1, 3, 2, 2, dtype=torch.uint8), "dtype torch.uint8"),
        (torch.full((1, 3, 2, 2), torch.nan), "NaN"),
        (torch.full((1, 3, 2, 2), 255.0), r"expected \[0, 1\]"),
        (torch.full((1, 3, 2, 2), -0.1), r"from -0.1"),
    ],
)
def test_images_that_are_not_pixels_are_refused(x: torch.Tensor, words: str) -> None:
    with pytest.raises(DataError, match=words):
        check_pixels(x)


def test_pixels_and_labels_of_empty_batches_pass() -> None:
    check_pixels(torch.zeros(0, 3, 2, 2))
    check_labels(torch.zeros(0, dtype=torch.long), 10)


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (torch.tensor([0.5]), "dtype torch.float32"),
        (torch.tensor([True]), "dtype torch.bool"),
        (torch.tensor([-1, 2]), "down to -1"),
        (torch.tensor([1, 10]), "up to 10, but the model has 10 classes"),
    ],
)
def test_labels_that_are_not_classes_are_refused(y: torch.Tensor, words: str) -> None:
    with pytest.raises(DataError, match=words):
        check_labels(y, 10)


@pytest.mark.parametrize(
    ("logits", "words"),
    [
        (torch.zeros(2, 3, 4), "expected logits"),
        (torch.zeros(3, 4), r"expected logits \(2, classes\)"),
        (torch.zeros(2, 1), "one output"),
        (torch.tensor([[0.0, torch.nan], [0.0, 1.0]]), "not finite for 1 of 2 images"),
        (torch.tensor([[0.0, torch.inf], [0.0, 1.0]]), "not finite for 1 of 2 images"),
    ],
)
def test_answers_that_are_not_logits_are_refused(logits: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_logits(logits, 2)
