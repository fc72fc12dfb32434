"""Rewiring checks everything before it touches anything, and says what was wrong."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from zeros import Zeros

from families import FAMILIES
from vitruvius._errors import NoSiteError, SurgeryError, UnsuitableSite
from vitruvius.attention import Kernel
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads, Site
from vitruvius.surgery import Socket, head_weights, record, restore, rewire, sockets, survey

Vit = tuple[nn.Module, Tensor]


class Wrapper(nn.Module):
    """A wrapper that surgery looks through."""

    looks_through = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


class Scaled(Kernel):
    """Attention times a parameter."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(site.num_heads, 1, 1))

    def forward(self, heads: Heads) -> Tensor:
        return attend(heads) * self.factor


class Picky(Scaled):
    """Refuses one site, after others were built."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        if site.name == "blocks.1.attn":
            raise UnsuitableSite("not here")


def state(model: nn.Module) -> tuple[Any, ...]:
    """Everything surgery could change."""
    modules = dict(model.named_modules())
    return (
        {name: (id(m), type(m), m.training) for name, m in modules.items()},
        {key: value.clone() for key, value in model.state_dict(keep_vars=False).items()},
        {name: sorted(vars(m)) for name, m in modules.items()},
    )


def assert_untouched(model: nn.Module, before: tuple[Any, ...]) -> None:
    after = state(model)
    assert after[0] == before[0]
    assert after[2] == before[2]
    torch.testing.assert_close(after[1], before[1], atol=0, rtol=0, equal_nan=True)


def test_rewire_returns_the_same_model(tiny_vit: Vit) -> None:
    model, _ = tiny_vit
    assert rewire(model, "softmax") is model
    assert restore(model) is model


def test_no_parts_mean_softmax(tiny_vit: Vit) -> None:
    model, _ = tiny_vit
    assert rewire(model).blocks[0].attn.core.describe() == "softmax"  # type: ignore[index,union-attr]


def test_where_picks_sites(tiny_vit: Vit) -> None:
    model, _ = tiny_vit
    rewire(model, Zeros, where="blocks.1.*")
    assert [isinstance(b.attn, Socket) for b in model.blocks] == [False, True]  # type: ignore[union-attr]
    rewire(model, "softmax", where=["blocks.0.attn"])
    assert [b.attn.core.describe() for b in model.blocks] == ["softmax", "zeros"]  # type: ignore[union-attr]
    restore(model, "blocks.1.attn")
    assert [isinstance(b.attn, Socket) for b in model.blocks] == [True, False]  # type: ignore[union-attr]


def recorded(model: nn.Module, where: str = "*") -> None:
    with record(model, where):
        pass


@pytest.mark.parametrize("verb", [rewire, restore, recorded, head_weights])
def test_where_that_matches_nothing_lists_the_sites(tiny_vit: Vit, verb: Any) -> None:
    model, _ = tiny_vit
    before = state(model)
    with pytest.raises(NoSiteError) as caught:
        verb(model, where="block.*.attn")
    assert str(caught.value) == (
        "where='block.*.attn' matches none of the 2 attention sites of VisionTransformer.\n"
        "Sites: blocks.0.attn … blocks.1.attn"
    )
    assert_untouched(model, before)


def test_every_glob_of_a_list_must_match(tiny_vit: Vit) -> None:
    model, _ = tiny_vit
    before = state(model)
    with pytest.raises(NoSiteError, match=r"where='blocks\.7\.attn' matches none"):
        rewire(model, "softmax", where=["blocks.0.attn", "blocks.7.attn"])
    with pytest.raises(NoSiteError, match="matches none"):
        rewire(model, "softmax", where=[])
    assert_untouched(model, before)


def test_rewiring_twice_names_the_present_core_and_the_way_back(tiny_vit: Vit) -> None:
    model, _ = tiny_vit
    rewire(model, Zeros, where="blocks.1.attn")
    before = state(model)
    with pytest.raises(SurgeryError, match=r"'blocks\.1\.attn' is already rewired with zeros.*restore"):
        rewire(model, "softmax")
    assert_untouched(model, before)


def test_a_part_that_refuses_leaves_the_model_untouched(tiny_vit: Vit) -> None:
    model, _ = tiny_vit
    before = state(model)
    with pytest.raises(UnsuitableSite, match="not here"):
        rewire(model, Picky)
    with pytest.raises(ValueError, match="no attention named 'softmix'; did you mean 'softmax'"):
        rewire(model, "softmix")
    assert_untouched(model, before)


def test_a_compiled_model_is_refused_in_every_disguise(tiny_vit: Vit) -> None:
    model, _ = tiny_vit
    compiled = torch.compile(model, backend="eager")
    before = state(model)
    for disguise in (compiled, Wrapper(compiled)):  # type: ignore[arg-type]
        for verb in (rewire, restore, recorded):
            with pytest.raises(SurgeryError, match="VisionTransformer is compiled"):
                verb(disguise)  # type: ignore[operator,arg-type]
    assert list(survey(compiled)) == ["blocks.0.attn", "blocks.1.attn"]  # type: ignore[arg-type]
    assert_untouched(model, before)
    model.compile(backend="eager")
    with pytest.raises(SurgeryError, match="is compiled"):
        rewire(model, "softmax")


def test_models_without_a_socket_say_what_they_hold() -> None:
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "depth": 1}
    parallel = timm.create_model("vit_base_patch16_xp_224", **small)
    for verb in (rewire, restore, survey):
        with pytest.raises(NoSiteError, match="It holds ParallelScalingBlock, for which there is no socket"):
            verb(parallel)  # type: ignore[operator]
    with pytest.raises(NoSiteError, match=r"ResNet has no attention.*nothing that looks like attention"):
        survey(timm.create_model("test_resnet"))


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


def test_print_tells_the_truth(tiny_vit: Vit) -> None:
    model, _ = tiny_vit
    assert "ViTSocket" in repr(rewire(model, "softmax"))
    assert isinstance(model.blocks[0].attn, timm.layers.Attention)  # type: ignore[index,union-attr]


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
