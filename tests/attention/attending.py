"""Sites and heads made by hand, golden files, and an attention layer written out, for the tests of this package."""

import torch
from torch import nn

from vitruvius.attention import attentions, part
from vitruvius.attention.base import attention_map, build_core
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads, Site

KEEP = torch.rand(3, 7, 7, generator=torch.Generator().manual_seed(3)) < 0.6
KEEP |= torch.eye(7, dtype=torch.bool)
CHAINS = {  # every registered part at least once, for a site of 3 heads and 7 tokens
    "softmax": ["softmax"],
    "symmetric": ["symmetric"],
    "rpc": [part("rpc", iterations=3)],
    "rpc_paper": [part("rpc", iterations=3, sparsity=0.3, variant="paper")],
    "rpc_asymmetric": [part("rpc", iterations=3, sparsity=0.5, asymmetric=True, dual_sign=1)],
    "scaled": [part("scaled")],
    "scaled_alpha": [part("scaled", form="alpha")],
    "standardised": ["standardised"],
    "low_rank": [part("low_rank", rank=2)],
    "truncated": ["truncated"],
    "mask": [part("mask", keep="all")],
    "sparse_softmax": [part("sparse_softmax", keep=KEEP)],
    "differential": ["differential"],
    "sigmoid": ["sigmoid"],
    "softpick": ["softpick"],
    "twicing": ["twicing"],
    "pro": ["pro"],
    "pro_huber": [part("pro", penalty="huber_mcp")],
    "l2": ["l2"],
    "l2_free": [part("l2", tied=False)],
    "linear": ["linear"],
    "linear_favor": [part("linear", features="favor")],
    "sink": ["sink"],
    "top_k": ["top_k"],
    "entmax": ["entmax"],
    "elliptical": ["elliptical"],  # without a layer before it: what hands on is tested with whole models
    "value_residual": ["value_residual"],
    "tome": ["tome"],
    "scaled_then_mask": [part("scaled", form="alpha"), part("mask", keep=KEEP), "rpc"],
}


def registered():
    """The names of the package's own parts; other tests register some of theirs."""
    return {name for name in attentions if attentions[name].__module__.startswith("vitruvius.")}


def make_core(name, tokens=7):
    """A core of `CHAINS` in float64, with numbers for every parameter."""
    core = build_core(CHAINS[name], make_site(queries=tokens)).double()
    for parameter in core.parameters():
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    return core


def make_site(
    attends="tokens",
    *,
    heads=3,
    queries=7,
    keys=None,
    key_dim=4,
    value_dim=None,
    name="blocks.0.attn",
    family="vit",
    **more,
):
    return Site(
        name=name,
        family=family,
        attends=attends,
        num_heads=heads,
        num_queries=queries,
        num_keys=queries if keys is None else keys,
        key_dim=key_dim,
        value_dim=key_dim if value_dim is None else value_dim,
        dim=heads * key_dim,
        **{"knows_input": True, "chained": True, **more},
    )


def make_heads(batch=2, heads=3, tokens=7, width=4, *, seed=0, dtype=torch.float64, bias=None, scale=None):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, batch, heads, tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    return Heads(q, k, v, bias, width**-0.5 if scale is None else scale)


def of_case(tensors, case):
    """The tensors of one case, without its prefix."""
    prefix = f"{case['id']}."
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def run_layer(tensors, num_heads, core):
    """x → qkv → core → proj, differentiable; (heads before the core, out, leaves)."""
    names = ("x", "qkv.weight", "qkv.bias", "proj.weight", "proj.bias")
    leaves = {name: tensors[name].clone().requires_grad_() for name in names}
    x = leaves["x"]
    rows = torch.nn.functional.linear(x, leaves["qkv.weight"], leaves["qkv.bias"])  # (B, N, 2C or 3C)
    split = rows.unflatten(-1, (-1, num_heads, x.shape[-1] // num_heads)).permute(2, 0, 3, 1, 4)
    *query, k, v = split
    q = query[0] if query else torch.full_like(k, torch.nan)  # KPCA's layers make no queries
    heads = Heads(q, k, v, None, k.shape[-1] ** -0.5)
    merged = core(heads).transpose(1, 2).flatten(2)
    return heads, torch.nn.functional.linear(merged, leaves["proj.weight"], leaves["proj.bias"]), leaves


def mean_maps(tensors, num_heads, stages):
    """The mean map over two batches, x and half of x with its tokens turned round, after the stages: (H, N, N)."""
    maps = []
    for x in (tensors["x"], tensors["x"].flip(1) * 0.5):
        heads, *_ = run_layer(tensors | {"x": x}, num_heads, attend)
        for stage in stages:
            heads = stage(heads)
        maps.append(attention_map(heads))
    return torch.cat(maps).mean(0)


def assert_golden(actual, expected, tolerance=1e-10):
    """Equal up to `tolerance` of the largest entry."""
    error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-300)
    assert error <= tolerance, f"relative error {error:.1e}"


def assert_golden_gradients(loss, leaves, expected, *, prefix="grad", tolerance=1e-10):
    """d loss / d leaf against `<prefix>_x` and `<prefix>.<parameter>`, every one that the file has.

    Each is measured by its largest entry; one that vanishes (keys shifted together move no softmax) by the largest.
    """
    names = {name: f"{prefix}.{name}" for name in leaves} | {
        "x": {"grad": "grad_x", "grad_recon": "grad_x_recon"}[prefix]
    }
    wanted = {name: expected[key] for name, key in names.items() if key in expected}
    assert len(wanted) >= 2
    found = torch.autograd.grad(
        loss, [leaves[name] for name in wanted], retain_graph=True, allow_unused=True, materialize_grads=True
    )
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for (name, gradient), actual in zip(wanted.items(), found, strict=True):
        size = float(gradient.abs().max())
        error = float((actual - gradient).abs().max()) / (size if size > 1e-9 * largest else largest)
        assert error <= tolerance, f"{name}: relative error {error:.1e}"
