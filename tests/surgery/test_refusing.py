"""Rewiring checks everything before it touches anything, and says what was wrong."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from operating import Scaled, Wrapper, Zeros
from torch import Tensor, nn

from vitruvius._errors import ConfigError, NoSiteError, SurgeryError, UnsuitableSite
from vitruvius.heads import Site
from vitruvius.surgery import head_weights, initialise, record, restore, rewire, survey

Vit = tuple[nn.Module, Tensor]


def recorded(model: nn.Module, where: str = "*") -> None:
    with record(model, where):
        pass


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


VERBS = [rewire, restore, recorded, head_weights]


class Picky(Scaled):
    """Refuses one site, after others were built."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        if site.name == "blocks.1.attn":
            raise UnsuitableSite("not here")


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
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
    assert_untouched(model, before)


@pytest.mark.parametrize("where", [[0, 1], [], 0, None, ["blocks.0.attn", 1]], ids=repr)
@pytest.mark.parametrize("verb", [*VERBS, initialise], ids=lambda verb: verb.__name__)
def test_a_pattern_that_is_no_text_is_refused_in_one_sentence(verb: Any, where: Any, tiny_vit: Vit) -> None:
    model, _ = tiny_vit
    before = state(model)
    arguments = {rewire: ["softmax"], initialise: ["mimetic"]}.get(verb, [])
    with pytest.raises(ConfigError, match=r"expected globs .*, such as where='blocks\.0\.attn'") as error:
        verb(model, *arguments, where=where)
    assert str(error.value).startswith(f"where={where!r}, ")
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
