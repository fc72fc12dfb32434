"""Rewiring puts cores where it is told, and only there."""

from __future__ import annotations

from typing import Any

import timm
import torch
from operating import Scaled, Wrapper, Zeros
from torch import Tensor, nn

from families import FAMILIES
from vitruvius.surgery import record, restore, rewire, survey
from vitruvius.surgery.base import Socket, sockets

Vit = tuple[nn.Module, Tensor]


def test_rewire_and_restore_return_the_same_model_whose_print_tells_the_truth(tiny_vit: Vit) -> None:
    model, _ = tiny_vit
    assert rewire(model) is model
    attention: Any = model.blocks[0].attn  # type: ignore[index,union-attr]
    assert attention.core.describe() == "softmax"  # which no parts mean
    assert "ViTSocket" in repr(model)
    assert isinstance(attention, timm.layers.Attention)
    assert restore(model) is model


def test_where_picks_sites(tiny_vit: Vit) -> None:
    model, _ = tiny_vit
    rewire(model, Zeros, where="blocks.1.*")
    assert [isinstance(b.attn, Socket) for b in model.blocks] == [False, True]  # type: ignore[union-attr]
    rewire(model, "softmax", where=["blocks.0.attn"])
    assert [b.attn.core.describe() for b in model.blocks] == ["softmax", "zeros"]  # type: ignore[union-attr]
    restore(model, "blocks.1.attn")
    assert [isinstance(b.attn, Socket) for b in model.blocks] == [True, False]  # type: ignore[union-attr]


def test_wrappers_are_looked_through(tiny_vit: Vit) -> None:
    model, x = tiny_vit
    wrapped = Wrapper(Wrapper(model))
    assert list(survey(wrapped)) == ["blocks.0.attn", "blocks.1.attn"]
    expected = model(x)
    with record(wrapped) as seen:
        wrapped(x)
    assert list(seen) == ["blocks.0.attn", "blocks.1.attn"]
    assert rewire(wrapped, "softmax", where="blocks.0.attn") is wrapped
    assert isinstance(model.blocks[0].attn, Socket)  # type: ignore[index,union-attr]
    torch.testing.assert_close(restore(wrapped)(x), expected)


def test_cores_take_mode_precision_and_device_of_their_site(tiny_vit: Vit) -> None:
    model, _ = tiny_vit
    model.double().train()
    rewire(model, Scaled, where="blocks.0.attn")
    core = model.blocks[0].attn.core  # type: ignore[index,union-attr]
    assert core.training
    assert {p.dtype for p in core.parameters()} == {torch.float64}
    restore(model).eval().to("meta")
    rewire(model, Scaled)
    core = model.blocks[0].attn.core  # type: ignore[index,union-attr]
    assert not core.training
    assert {p.device.type for p in core.parameters()} == {"meta"}


def test_new_parameters_live_under_the_name_of_their_part(tiny_vit: Vit) -> None:
    model, x = tiny_vit
    keys = set(model.state_dict())
    rewire(model, Scaled)
    assert set(model.state_dict()) - keys == {f"blocks.{i}.attn.core.scaled.factor" for i in (0, 1)}
    model(x).sum().backward()
    assert all(b.attn.core.scaled.factor.grad.any() for b in model.blocks)  # type: ignore[union-attr]


def test_subclasses_of_upstream_attention_are_left_alone(tiny_vit: Vit) -> None:
    class Other(timm.layers.Attention):  # type: ignore[misc,name-defined]
        """May do something else in its forward."""

    model, _ = tiny_vit
    model.blocks[1].attn.__class__ = Other  # type: ignore[index,union-attr]
    assert list(survey(model)) == ["blocks.0.attn"]


def test_levit_biases_follow_the_weights_in_eval_mode() -> None:
    model, x = next(family for family in FAMILIES if family.name == "levit").randomised()
    rewire(model, "softmax")
    before = model(x)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attention_biases"):
                parameter.add_(torch.randn_like(parameter))
    assert not torch.allclose(model(x), before)


def test_sockets_are_listed_for_the_command_line() -> None:
    rows = {family: (upstream, doc) for family, upstream, doc in sockets()}
    assert rows["vit"] == ("timm.layers.attention.Attention", "ViT and DeiT, with q/k-norm, scale-norm and gates.")
    assert {"rope", "eva", "beit", "swin", "xcit", "cait", "cait_class", "levit", "levit_downsample"} <= set(rows)
    assert all(doc.endswith(".") for _, doc in rows.values())
