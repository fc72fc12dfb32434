"""Chains of parts: what goes together, what is refused, what survives in checkpoints, what compiles."""

import warnings

import pytest
import torch
from attending import make_heads, make_site
from torch import nn

from vitruvius._errors import SurgeryError
from vitruvius.attention import part
from vitruvius.attention.base import build_core
from vitruvius.attention.softmax import attend

LOW = part("low_rank", rank=2, tensors="k", start="released")
MASK = part("mask", keep=torch.eye(7, dtype=torch.bool).expand(3, 7, 7) | (torch.arange(7) % 2 == 0))
CHAIN = (LOW, "symmetric", MASK, part("rpc", iterations=2, sparsity=0.5))
OTHERS = ("standardised", "truncated", part("scaled", form="alpha"), part("rpc", iterations=2, asymmetric=True))


def randomised(parts, site=None):
    core = build_core(parts, site or make_site()).double()
    for parameter in core.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(7))
    return core


def gradients(core, heads):
    leaves = [x.detach().clone().requires_grad_() for x in heads[:3]]
    out = core(heads._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
    used = [*leaves, *core.parameters()]
    return out, torch.autograd.grad(out.square().sum(), used, allow_unused=True, materialize_grads=True)


def test_a_chain_does_what_its_parts_do_one_after_the_other():
    heads, core = make_heads(), randomised(CHAIN)
    by_hand = heads
    for stage in list(core.children())[:-1]:
        by_hand = stage(by_hand)
    assert torch.equal(core(heads), list(core.children())[-1](by_hand))
    assert core.describe() == "low_rank → symmetric → mask → rpc"


@pytest.mark.parametrize("hider", [MASK, part("sparse_softmax", keep="all")], ids=["mask", "sparse_softmax"])
def test_what_hides_keys_comes_before_what_chooses_among_them(hider):
    with pytest.raises(SurgeryError, match="choice of keys"):
        build_core([part("top_k", share=0.2), hider], make_site())
    core = build_core([MASK, part("top_k", share=0.2)], make_site()).double()
    torch.testing.assert_close(core.map(make_heads()).sum(-1), torch.ones(2, 3, 7, dtype=torch.float64))


@pytest.mark.parametrize(
    "parts",
    [
        CHAIN,
        (part("low_rank", rank=2), MASK, part("scaled", form="alpha"), "softmax"),
        (part("low_rank", rank=2), part("scaled"), part("rpc", asymmetric=True, sparsity=0.5)),
        ("standardised", part("low_rank", rank=2), MASK),
        (part("truncated", mode="mix_head", rank=2, gradient="exact"), "symmetric", part("scaled", form="alpha")),
        (MASK, part("scaled"), part("rpc", sparsity=0.5)),
    ],
    ids=lambda parts: "-".join(p if isinstance(p, str) else p.func.__name__.lower() for p in parts),
)
def test_sensible_chains_train_every_parameter(parts):
    core = randomised(parts)
    out, found = gradients(core, make_heads())
    assert out.isfinite().all()
    for (name, _), gradient in zip(core.named_parameters(), found[3:], strict=True):
        assert gradient.isfinite().all(), name
        shift = name in ("low_rank.k.0.bias", "low_rank.k.1.bias") and "softmax" in core.parts
        assert gradient.any() or shift, name  # a shift of all keys moves no softmax


def test_neutral_parts_in_one_chain_are_softmax():
    parts = [
        part("low_rank", rank=3),
        part("mask", keep="all"),
        part("scaled"),
        part("rpc", iterations=1, sparsity=float("inf"), asymmetric=True),
    ]
    heads = make_heads()
    torch.testing.assert_close(build_core(parts, make_site()).double()(heads), attend(heads))


@pytest.mark.parametrize("reader", ["symmetric", "rpc"])
def test_a_part_whose_parameters_would_get_no_gradient_is_refused_with_the_reason(reader):
    with pytest.raises(SurgeryError, match=f"'{reader}' throws away the q"):
        build_core([part("low_rank", tensors="qk"), reader], make_site())
    with pytest.raises(SurgeryError, match="throws away the q"):
        build_core([part("low_rank", tensors="q"), MASK, reader], make_site())
    build_core([reader, part("low_rank", tensors="qk")] if reader == "symmetric" else [LOW, reader], make_site())


def test_a_checkpoint_survives_inserting_a_mask_and_changing_the_kernel():
    trained = randomised([LOW])
    longer = build_core([LOW, MASK, "rpc"], make_site()).double()
    missing, unexpected = longer.load_state_dict(trained.state_dict(), strict=False)
    assert missing == ["mask.keep"]
    assert unexpected == []


@pytest.mark.parametrize(("parts", "backend"), [(CHAIN, "eager"), (CHAIN, "aot_eager"), (OTHERS, "aot_eager")])
def test_chains_compile_as_one_graph_with_their_backward_pass(parts, backend):
    torch.compiler.reset()
    heads, core = make_heads(), randomised(parts)
    out, found = gradients(core, heads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(core, fullgraph=True, backend=backend)
        again, found_again = gradients(compiled, heads)
    torch.testing.assert_close(again, out, rtol=1e-12, atol=1e-12)
    for a, b in zip(found_again, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
