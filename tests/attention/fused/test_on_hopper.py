"""Which tensors the kernels for Hopper GPUs may have."""

from types import SimpleNamespace

import pytest
import torch

from vitruvius.attention.fused import _on_hopper
from vitruvius.attention.fused._on_hopper import on_hopper


def tensor(**changes):
    """As much of a tensor on a GPU as is looked at."""
    given = {"is_cuda": True, "dtype": torch.bfloat16, "address": 4096, "strides": (37824, 64, 192, 1)} | changes
    address, strides = given.pop("address"), given.pop("strides")
    pick = lambda axis=None: strides if axis is None else strides[axis]  # noqa: E731
    return SimpleNamespace(device=torch.device("cuda", 0), data_ptr=lambda: address, stride=pick, **given)


@pytest.fixture
def _hopper(monkeypatch):
    monkeypatch.setattr(_on_hopper, "_wanted", True)
    monkeypatch.setattr(_on_hopper, "INTERPRETED", False)
    monkeypatch.setattr(_on_hopper, "_is_hopper", lambda device: True)
    monkeypatch.setattr(_on_hopper, "_gluon_is_here", lambda: True)


@pytest.mark.usefixtures("_hopper")
def test_half_precision_in_rows_of_16_bytes_is_taken():
    assert on_hopper(tensor(), tensor())


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize(
    "change",
    [
        {"is_cuda": False},
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"address": 4096 + 8},
        {"strides": (37824, 64, 200, 1)},
        {"strides": (37824, 64, 192, 2)},
    ],
    ids=str,
)
def test_everything_else_is_refused(change):
    assert not on_hopper(tensor(), tensor(**change))


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_is_hopper", lambda device: False),
        ("_gluon_is_here", lambda: False),
        ("INTERPRETED", True),
        ("_wanted", False),
    ],
)
def test_so_is_another_machine_or_another_triton(name, value, monkeypatch):
    monkeypatch.setattr(_on_hopper, name, value)
    assert not on_hopper(tensor())
