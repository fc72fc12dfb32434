"""The kernels under Triton's interpreter, on the CPU: run by test_interpreted.py, which sets TRITON_INTERPRET=1."""

import pytest
import torch
from heads_and_oracles import attend_slowly, errors, make_heads, make_keep, pursue_slowly

from vitruvius.attention import part
from vitruvius.attention.base import build_core
from vitruvius.attention.fused import masked, rpc, use
from vitruvius.heads import Site

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for what a GPU does silently


def make_site(N, D, heads=2):
    return Site(
        name="blocks.0.attn", family="vit", attends="tokens", num_heads=heads, num_queries=N, num_keys=N, key_dim=D,
        value_dim=D, dim=heads * D,
    )  # fmt: skip


PURSUITS = {
    "whole head": (19, {"iterations": 3}),
    "clipped by the paper's rule, other sign": (19, {"variant": "paper", "sparsity": 0.1, "dual_sign": 1}),
    "a bias and an odd width": (19, {"bias": True, "D": 48}),
    "queries kept, two tiles": (37, {"asymmetric": True, "bias": True}),
    "nothing clipped, one iteration": (37, {"sparsity": float("inf"), "iterations": 1}),
    "half precision": (20, {"dtype": torch.float16, "sparsity": 2.0}),  # a key near tau may be clipped or not
    "heads too long for one program": (37, {"whole": 0, "iterations": 3}),
    "heads too long, queries kept": (21, {"whole": 0, "asymmetric": True, "bias": True}),
    "a few rows over": (66, {"iterations": 2}),
    "a few rows over, queries kept": (66, {"asymmetric": True, "bias": True, "iterations": 2}),
    "one token": (1, {}),
}


@pytest.mark.parametrize("case", PURSUITS)
def test_fused_rpc_is_the_pursuit(case, monkeypatch):
    N, options = PURSUITS[case]
    options = {"iterations": 2, "sparsity": 0.5, **options}
    monkeypatch.setattr(rpc, "WHOLE", options.pop("whole", 999))
    D, dtype, bias = options.pop("D", 32), options.pop("dtype", torch.float32), options.pop("bias", False)
    core = build_core([part("rpc", **options)], make_site(N, D))
    with use("fused"):
        found = errors(core, lambda heads: pursue_slowly(heads, **options), make_heads(N, D, dtype, bias=bias))
    if N == 1:  # one token attends to itself: its key has no gradient
        found = [found[0], found[-1]]
    assert max(found) < (1e-4 if dtype == torch.float32 else 1e-2)


def test_fused_rpc_seeks_greatest_scores_where_keys_are_very_long():
    heads = make_heads(37, 32, torch.float32)
    heads = heads._replace(k=heads.k * torch.tensor([1.0, 40.0])[:, None, None])  # weights of 2¹²⁸ in one head
    core = build_core([part("rpc", iterations=2, sparsity=1e6)], make_site(37, 32))  # no key is cut short
    with torch.no_grad(), use("fused"):
        out = core(heads)
    torch.testing.assert_close(out, pursue_slowly(heads, iterations=2, sparsity=1e6), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("N", "D", "dtype", "short"), [(19, 32, torch.float32, 999), (70, 48, torch.float32, 0), (33, 32, torch.float16, 0)]
)
def test_fused_mask_is_softmax_over_what_is_kept(N, D, dtype, short, monkeypatch):
    monkeypatch.setattr(masked, "SHORT", short)
    keep = make_keep(2, N)
    core = build_core([part("sparse_softmax", keep=keep)], make_site(N, D))
    with use("fused"):
        found = errors(core, lambda heads: attend_slowly(heads, keep), make_heads(N, D, dtype, batch=2))
    assert max(found) < (1e-5 if dtype == torch.float32 else 3e-3)


def test_fused_mask_reads_nothing_of_tiles_that_are_removed_whole():
    keep = torch.zeros(2, 128, 128, dtype=torch.bool)
    keep[:, :64, :48] = keep[:, 64:, 48:96] = True  # 16 × 16 tiles; two groups of queries, and keys that nobody keeps
    heads = make_heads(128, 32, torch.float32)
    poisoned = heads.v.detach().clone()
    poisoned[:, :, 48:] = torch.nan  # a product with them would be NaN, whatever their weight
    with torch.no_grad():
        out = masked.attend_kept(heads._replace(v=poisoned), masked.make_pattern(keep))
        torch.testing.assert_close(out[:, :, :64], attend_slowly(heads, keep)[:, :, :64], rtol=1e-4, atol=1e-5)
    assert out[:, :, 64:].isnan().all()


def test_fused_mask_from_few_queries_to_many_keys():
    keep = make_keep(2, 5, 40)
    heads = make_heads(40, 32, torch.float32)
    heads = heads._replace(q=heads.q[:, :, :5])
    found = errors(
        lambda heads: masked.attend_kept(heads, masked.make_pattern(keep)), lambda h: attend_slowly(h, keep), heads
    )
    assert max(found) < 1e-5


@pytest.mark.parametrize("name", ["rpc", "sparse_softmax"])
def test_compiled_without_graph_breaks_the_operators_agree(name):
    settings = {"iterations": 2} if name == "rpc" else {"keep": make_keep(2, 19)}
    core, heads = build_core([part(name, **settings)], make_site(19, 32)), make_heads(19, 32, torch.float32)
    compiled = torch.compile(core, fullgraph=True, backend="aot_eager")
    with use("fused"):
        assert (
            max(errors(compiled, lambda h: core(h._replace(**{x: getattr(h, x).float() for x in "qkv"})), heads)) < 1e-6
        )


def test_second_derivatives_are_refused_not_wrong():
    core, heads = build_core(["rpc"], make_site(9, 32)), make_heads(9, 32, torch.float32)
    k = heads.k.detach().requires_grad_()
    with use("fused"):
        out = core(heads._replace(k=k))
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(out.sum(), k, create_graph=True)
