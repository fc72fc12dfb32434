"""PyTorch issue 196678: where cuDNN's backward pass may give NaN, softmax attention takes another backend."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvius.attention import softmax
from vitruvius.heads import Heads


class OnGPU(Tensor):
    """A tensor that says it lies on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def heads(keys: int, *, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> Heads:
    q, k, v = (torch.randn(1, 2, keys, 16).to(dtype) for _ in range(3))
    mask = torch.zeros(1, 1, keys, keys, dtype=dtype) if bias else None
    return Heads(q, k.as_subclass(OnGPU), v, mask, 0.25)


@pytest.mark.parametrize("keys", [64, 192, 320])
def test_lengths_that_leave_64_keys_in_the_last_tile_need_another_backend(keys: int) -> None:
    assert softmax.needs_another_backend(heads(keys))


@pytest.mark.parametrize(
    "fine", [heads(128), heads(65), heads(64, bias=False), heads(64, dtype=torch.float32)], ids=range(4)
)
def test_other_lengths_maps_without_a_mask_and_float32_do_not(fine: Heads) -> None:
    assert not softmax.needs_another_backend(fine)


def test_without_gradients_there_is_no_backward_pass_to_go_wrong() -> None:
    with torch.no_grad():
        assert not softmax.needs_another_backend(heads(64))


def test_such_heads_are_attended_without_cudnn_and_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = F.scaled_dot_product_attention

    def watch(*args: Tensor, **kwargs: object) -> Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    for needed in (True, False):
        monkeypatch.setattr(softmax, "needs_another_backend", lambda _, needed=needed: needed)
        plain = heads(64, dtype=torch.float32)
        softmax.attend(plain._replace(k=plain.k.as_subclass(Tensor)))
    assert seen == [False, before]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_it_stays_one_graph_when_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "needs_another_backend", lambda _: True)
    plain = heads(64, dtype=torch.float32)
    plain = plain._replace(k=plain.k.as_subclass(Tensor))
    compiled = torch.compile(softmax.attend, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(plain), softmax.attend(plain))
