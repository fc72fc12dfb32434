"""A survey learns every size at every site and leaves no trace in the model."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import timm
import torch
from torch import nn

from families import FAMILIES, SMALL, SWIN, Family
from vitruvius._errors import SurgeryError
from vitruvius.heads import Heads, Site
from vitruvius.surgery import record, survey

BY_NAME = {family.name: family for family in FAMILIES}


@torch.no_grad()
def test_sites_are_what_the_cores_are_given(family: Family) -> None:
    model, x = family.randomised()
    sites = survey(model, input_size=family.input_size)
    with record(model) as seen:
        model(x)
        assert survey(model, input_size=family.input_size) == sites, "rewired or not, the sites are the same"
    assert set(sites) == set(seen)
    for name, site in sites.items():
        assert sizes_of(seen[name]) == (site.num_heads, site.num_queries, site.num_keys, site.key_dim, site.value_dim)
        softmaxes = 2 if site.family == "differential" else 1  # of each of upstream's heads
        assert softmaxes * model.get_submodule(name).num_heads == site.num_heads
        if site.grid is not None and site.attends != "channels":
            assert site.grid[0] * site.grid[1] + site.num_prefix_tokens == site.num_keys


def sizes_of(heads: Heads) -> tuple[int, ...]:
    H, N, D = heads.q.shape[1:]
    M, E = heads.v.shape[2:]
    assert heads.k.shape[1:] == (H, M, D)
    return H, N, M, D, E


@pytest.mark.parametrize(
    ("name", "prefix", "grid"),
    [("vit", 1, (4, 4)), ("vit_registers", 4, (4, 4)), ("deit_distilled", 2, (4, 4)), ("dinov3", 5, (4, 4)),
     ("beit", 1, (4, 4)), ("relpos", 0, (4, 4)), ("cait", 0, (4, 4)), ("xcit", 0, None), ("levit", 0, (4, 4)),
     ("swin", 0, (4, 4))],
)  # fmt: skip
def test_prefix_tokens_and_grid_are_known(name: str, prefix: int, grid: tuple[int, int] | None) -> None:
    model, _ = BY_NAME[name].randomised()
    first = next(iter(survey(model).values()))
    assert (first.num_prefix_tokens, first.grid) == (prefix, grid)


def test_sites_of_levit_and_xcit_say_how_they_attend() -> None:
    levit = survey(BY_NAME["levit"].randomised()[0])
    assert [site.attends for site in levit.values()] == ["tokens", "downsampled", "tokens"]
    assert [(site.num_queries, site.num_keys) for site in levit.values()] == [(16, 16), (4, 16), (4, 4)]
    xcit = survey(BY_NAME["xcit"].randomised()[0])
    assert [site.attends for site in xcit.values()] == ["channels", "channels", "class"]
    channels = xcit["blocks.0.attn"]
    assert (channels.num_queries, channels.key_dim) == (16, 16)  # 16 channels of a head, each known on 16 patches


def vit(**settings: Any) -> nn.Module:
    return timm.create_model("test_vit", **{"img_size": 32, "patch_size": 8, **SMALL, **settings})


def test_survey_takes_the_size_the_model_was_built_for() -> None:
    assert survey(vit(img_size=64))["blocks.0.attn"].grid == (8, 8)
    assert survey(vit(img_size=(32, 64), dynamic_img_size=False))["blocks.0.attn"].grid == (4, 8)
    assert survey(vit(in_chans=1))["blocks.0.attn"].grid == (4, 4)
    assert survey(vit(in_chans=5), input_size=(5, 16, 48))["blocks.0.attn"].grid == (2, 6)
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, in_chans=1, **SWIN)
    assert next(iter(survey(swin).values())).grid == (4, 4)


def test_a_model_of_unknown_size_asks_for_it() -> None:
    family = BY_NAME["coatnet"]
    model, _ = family.randomised()
    known = survey(model, input_size=family.input_size)
    assert known
    if tuple(int(number) for number in re.findall(r"\d+", timm.__version__)[:3]) >= (1, 0, 31):
        assert survey(model) == known  # from then on such models say their size
        return
    with pytest.raises(SurgeryError, match=r"was built for \d+ x \d+ items.*input_size="):
        survey(model)


def test_a_wrong_size_is_one_clear_error() -> None:
    with pytest.raises(SurgeryError, match=r"one image of size \(3, 7, 7\) failed.*input_size="):
        survey(vit(dynamic_img_size=False), input_size=(3, 7, 7))


def test_survey_leaves_no_trace(family: Family) -> None:
    model, _ = family.randomised()
    model.train()
    calls: list[nn.Module] = []
    for module in model.modules():
        module.register_forward_hook(lambda m, *_: calls.append(m))
    before, classes = copy.deepcopy(dict(model.state_dict())), [(type(m), m.training) for m in model.modules()]
    caches = [dict(getattr(m, "attention_bias_cache", {})) for m in model.modules()]
    luck = torch.get_rng_state()
    survey(model, input_size=family.input_size)
    assert torch.equal(torch.get_rng_state(), luck)
    assert [(type(m), m.training) for m in model.modules()] == classes
    assert [dict(getattr(m, "attention_bias_cache", {})) for m in model.modules()] == caches
    torch.testing.assert_close(dict(model.state_dict()), before, atol=0, rtol=0)
    assert calls == []


def test_a_model_that_has_run_can_be_surveyed() -> None:
    """LeViT caches tensors that hang in a graph; those cannot be copied, only imagined."""
    model, x = BY_NAME["levit"].randomised()
    model(x)
    assert survey(model)


def test_a_site_knows_every_size() -> None:
    assert survey(vit(embed_dim=64, num_heads=4))["blocks.0.attn"] == Site(
        name="blocks.0.attn", family="vit", attends="tokens", num_heads=4, num_queries=17, num_keys=17, key_dim=16,
        value_dim=16, dim=64, num_prefix_tokens=1, grid=(4, 4), knows_input=True, chained=True,
    )  # fmt: skip
