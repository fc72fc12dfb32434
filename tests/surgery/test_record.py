"""Recording sees what the cores are given and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from operating import Zeros
from torch import Tensor, nn

from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads
from vitruvius.surgery import record, restore, rewire
from vitruvius.surgery.base import Socket

Vit = tuple[nn.Module, Tensor]


def is_bare(model: nn.Module) -> bool:
    return not any(isinstance(m, Socket) or hasattr(m, "core") for m in model.modules())


def test_recorded_heads_are_those_of_the_model(tiny_vit: Vit) -> None:
    model, x = tiny_vit
    attention = model.blocks[0].attn  # type: ignore[index,union-attr]
    outputs: list[Tensor] = []
    attention.proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    with record(model) as seen:
        model(x)
    heads = seen["blocks.0.attn"]
    assert heads.q.shape == heads.k.shape == heads.v.shape == (2, 2, 17, 16)
    torch.testing.assert_close(attend(heads).transpose(1, 2).flatten(2), outputs[0].detach())
    assert not heads.q.requires_grad


def test_model_is_bare_again_after_recording(tiny_vit: Vit) -> None:
    model, x = tiny_vit
    expected, keys = model(x), list(model.state_dict())
    with record(model) as seen:
        assert list(model.state_dict()) == keys
        torch.testing.assert_close(model(x), expected)
    assert is_bare(model)
    assert len(seen) == 2, "what was seen stays"
    model(x + 1)
    torch.testing.assert_close(model(x), expected, atol=0, rtol=0)


def test_model_is_bare_again_after_an_exception(tiny_vit: Vit) -> None:
    model, _ = tiny_vit
    with pytest.raises(RuntimeError, match="midway"), record(model):
        raise RuntimeError("midway")
    assert is_bare(model)


def test_a_rewired_site_keeps_its_core_and_loses_the_hook(tiny_vit: Vit) -> None:
    model, x = tiny_vit
    rewire(model, Zeros, where="blocks.1.attn")
    expected = model(x)
    core = model.blocks[1].attn.core  # type: ignore[index,union-attr]
    with record(model) as seen:
        torch.testing.assert_close(model(x), expected)
    assert set(seen) == {"blocks.0.attn", "blocks.1.attn"}
    assert seen["blocks.1.attn"].v.any()
    assert model.blocks[1].attn.core is core  # type: ignore[index,union-attr]
    assert not core._forward_pre_hooks
    assert not isinstance(model.blocks[0].attn, Socket)  # type: ignore[index,union-attr]


def test_where_limits_what_is_touched(tiny_vit: Vit) -> None:
    model, x = tiny_vit
    with record(model, where="blocks.0.*") as seen:
        assert not isinstance(model.blocks[1].attn, Socket)  # type: ignore[index,union-attr]
        model(x)
    assert list(seen) == ["blocks.0.attn"]


def test_streaming_keeps_nothing(tiny_vit: Vit) -> None:
    model, x = tiny_vit
    stream: list[tuple[str, Heads]] = []
    with record(model, on_heads=lambda name, heads: stream.append((name, heads))) as seen:
        model(x)
        model(x)
    assert [name for name, _ in stream] == ["blocks.0.attn", "blocks.1.attn"] * 2
    assert seen == {}


def test_gradients_flow_into_attached_heads(tiny_vit: Vit) -> None:
    model, x = tiny_vit
    with record(model, detach=False) as seen:
        out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), seen["blocks.0.attn"].k)
    assert gradient.any()


def test_recordings_nest_and_keep_the_last_run(tiny_vit: Vit) -> None:
    model, x = tiny_vit
    with record(model) as outer:
        with record(model, where="blocks.0.attn") as inside:
            model(x)
        model(x[:1])
    assert inside["blocks.0.attn"].q.shape[0] == 2
    assert outer["blocks.0.attn"].q.shape[0] == 1
    assert is_bare(model)


def test_restoring_meanwhile_is_no_accident(tiny_vit: Vit) -> None:
    model, _ = tiny_vit
    with record(model):
        restore(model)
        rewire(model, Zeros, where="blocks.0.attn")
    assert isinstance(model.blocks[0].attn.core.zeros, Zeros)  # type: ignore[index,union-attr]
    assert not isinstance(model.blocks[1].attn, Socket)  # type: ignore[index,union-attr]
