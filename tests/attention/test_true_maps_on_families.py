"""Maps are true everywhere: every registered kernel and stage, at every kind of site of every family."""

import pytest
import torch
from attending import CHAINS
from torch import nn

from families import FAMILIES
from vitruvius._errors import SurgeryError, UnsuitableSite
from vitruvius.attention import part
from vitruvius.attention.base import build_core
from vitruvius.heads import Context, RecordedHeads
from vitruvius.surgery import record, restore, rewire, survey
from vitruvius.surgery.recording import map_of

ALL = {**CHAINS, "low_rank": ["low_rank"], "gated": ["gated"]}  # rank: half of the heads that there are
KNOW_MORE = ("gated", "elliptical", "value_residual", "tome")  # which are told more than Heads, by the whole model
PATTERNED = ("mask", "sparse_softmax", "scaled_then_mask")


def chain_for(name, site):
    """A chain for this site; patterns are as large as the site and leave every query its own keys."""
    if name not in PATTERNED:
        return ALL[name]
    generator = torch.Generator().manual_seed(3)
    keep = torch.rand(site.num_heads, site.num_queries, site.num_keys, generator=generator) < 0.6
    keep[..., 0] = True
    if name == "scaled_then_mask":
        return [part("scaled", form="alpha"), part("mask", keep=keep), part("rpc", asymmetric=True)]
    return [part(name, keep=keep)]


def core_for(name, site):
    """A core with numbers for every parameter; None where the site refuses it."""
    try:
        core = build_core(chain_for(name, site), site).double()
    except SurgeryError:
        return None
    move(core)
    return core


def move(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))


def kinds_of(model, family):
    """One site of each kind: sites of one kind differ in nothing that a core sees."""
    sites = survey(model, input_size=family.input_size)
    return list({(site.family, site.attends): name for name, site in sites.items()}.values()), sites


def heads_at(model, x, where, family):
    """What enters the cores, in float64: some of timm's rotary positions know float32 alone."""
    with torch.no_grad(), record(model, where) as seen:
        model(x)
    return {name: in_float64(heads) for name, heads in seen.items()}


def in_float64(heads):
    fields = {name: getattr(heads, name).double() for name in "qkv"}
    found = heads._replace(**fields, bias=None if heads.bias is None else heads.bias.double())
    if hasattr(heads, "x"):
        found = RecordedHeads(*found)
        found.x = None if heads.x is None else heads.x.double()
        found.states = {name: value.double() for name, value in heads.states.items()}
    return found


def output_from(core, heads, found):
    """What the core must put out if it gives these weights to the values."""
    values = heads.v
    if any(stage.adds_values for stage in core.stages.values()):
        values = core.run_stages(heads).heads.v
    out = core.kernel.finish(found @ values)
    if hasattr(core.kernel, "gate"):
        out = out * core.kernel.gate(heads, Context(heads.x))
    return out


def run(core, heads):
    return core(heads, getattr(heads, "x", None), getattr(heads, "states", None))


def disturbed(heads):
    """The same Heads with one field changed, by its name."""
    generator = torch.Generator().manual_seed(7)

    def noise(like):
        return torch.randn(like.shape, generator=generator, dtype=like.dtype)

    yield "q", heads._replace(q=noise(heads.q))
    yield "k", heads._replace(k=noise(heads.k))
    yield "v", heads._replace(v=noise(heads.v))
    yield "scale", heads._replace(scale=2 * heads.scale)
    if heads.bias is not None:
        yield "bias", heads._replace(bias=noise(heads.bias))


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_map_times_the_values_is_the_output_and_what_is_ignored_changes_no_map(family):
    model, x = family.randomised()
    kinds, sites = kinds_of(model, family)
    used = set()
    for site, heads in heads_at(model, x, kinds, family).items():
        for name in ALL.keys() - set(KNOW_MORE):
            core = core_for(name, sites[site])
            if core is None:
                continue
            used.add(name)
            out, found = core(heads), core.map(heads)
            assert found is not None, (name, site)
            torch.testing.assert_close(
                output_from(core, heads, found), out, msg=lambda m, n=name, s=site: f"{n} {s} {m}"
            )
            for field, other in disturbed(heads):
                if torch.equal(core(other), out):
                    assert torch.equal(core.map(other), found), (name, site, field)
    assert used >= {"softmax", "mask", "sink", "pro", "truncated"}


@pytest.mark.parametrize("name", KNOW_MORE)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_so_are_the_maps_of_parts_that_know_more_than_heads(family, name):
    model, x = family.randomised()
    sites = survey(model, input_size=family.input_size)
    accepted = [where for where, site in sites.items() if core_for(name, site) is not None]
    if not accepted:
        refusals = [refusal(name, site) for site in sites.values()]
        assert all(repr(name) in text for text in refusals)
        return
    rewire(model, *ALL[name], where=accepted, input_size=family.input_size)
    for where in accepted:
        move(model.get_submodule(where).core)
    for where, heads in heads_at(model, x, accepted, family).items():
        core = model.get_submodule(where).core.double()
        found = map_of(model, where, heads)
        torch.testing.assert_close(output_from(core, heads, found), run(core, heads))
    restore(model)


def refusal(name, site):
    with pytest.raises(UnsuitableSite) as refused:
        build_core(ALL[name], site)
    return str(refused.value)
