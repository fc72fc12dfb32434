"""Which tensors the kernels for Hopper GPUs may have, and what happens where they cannot be compiled."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from vitruvius.attention.fused.hopper import _dispatch
from vitruvius.attention.fused.hopper._dispatch import on_hopper


def tensor(**changes):
    """As much of a tensor on a GPU as is looked at."""
    given = {"is_cuda": True, "dtype": torch.bfloat16, "address": 4096, "strides": (37824, 64, 192, 1)} | changes
    address, strides = given.pop("address"), given.pop("strides")
    pick = lambda axis=None: strides if axis is None else strides[axis]  # noqa: E731
    return SimpleNamespace(device=torch.device("cuda", 0), data_ptr=lambda: address, stride=pick, **given)


@pytest.fixture
def _hopper(monkeypatch):
    monkeypatch.setattr(_dispatch, "_wanted", True)
    monkeypatch.setattr(_dispatch, "INTERPRETED", False)
    monkeypatch.setattr(_dispatch, "_is_hopper", lambda device: True)
    monkeypatch.setattr(_dispatch, "_gluon_is_here", lambda: True)


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
    monkeypatch.setattr(_dispatch, name, value)
    assert not on_hopper(tensor())


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_triton_that_cannot_compile_them_is_told_once_and_not_asked_again(monkeypatch):
    monkeypatch.setattr(_dispatch, "_wanted", True)
    with pytest.warns(UserWarning, match="do not compile with Triton .*: no such layout; the general ones"):
        _dispatch.given_up(RuntimeError("no such layout\nand more"))
    assert not _dispatch._wanted
    with pytest.raises(torch.OutOfMemoryError):
        _dispatch.given_up(torch.OutOfMemoryError("full"))
