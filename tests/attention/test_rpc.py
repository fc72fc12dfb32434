import warnings

import pytest
import torch
from attending import assert_golden, assert_golden_gradients, make_heads, make_site, of_case, run_layer

from golden_files import read_golden
from vitruvius.attention.rpc import RPC
from vitruvius.attention.softmax import attend, by_products
from vitruvius.heads import Heads

FILES = {name: read_golden(name) for name in ("rpc_a", "rpc_b", "rpc_edge")}
CASES = [(name, case) for name, (_, metadata) in FILES.items() for case in metadata["cases"]]


def rpc(site=None, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparsity 0 warns, which has its own test
        return RPC(site or make_site(), **settings)


def pursued_by_hand(heads, iterations, tau, sign=-1, asymmetric=False):
    """The paper's loop with S, L and Y/mu written out, one sample and head at a time."""
    out = torch.empty_like(heads.v)
    for b, h in torch.cartesian_prod(torch.arange(heads.k.shape[0]), torch.arange(heads.k.shape[1])):
        k, v = heads.k[b, h], heads.v[b, h]
        low = u = torch.zeros_like(k)
        for _ in range(iterations):
            z = k - low + u
            sparse = z.sign() * (z.abs() - tau[b, h]).clamp(min=0)
            clean = k - sparse + sign * u
            query = heads.q[b, h] if asymmetric else clean
            low = (query @ clean.mT * heads.scale).softmax(-1) @ v
            u = u + k - low - sparse
        out[b, h] = low
    return out


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda value: value if isinstance(value, str) else value["id"])
def test_released_variant_matches_the_golden_outputs_and_gradients(name, case):
    tensors, metadata = FILES[name]
    kernel = rpc(iterations=max(case["n"], 1), sparsity=case["lambd"], variant="released")
    expected = of_case(tensors, case)
    _, out, leaves = run_layer(tensors, metadata["H"], kernel)
    assert_golden(out, expected["out"])
    assert_golden_gradients(out.square().sum(), leaves, expected)


@pytest.mark.parametrize(
    ("sparsity", "iterations", "total", "squares"),
    [
        (0.0, 3, -31.427296393284, 31.403826403518),
        (0.5, 1, -31.403687103098, 31.393992159446),
        (0.5, 2, -30.625375150135, 31.624502250347),
        (0.5, 4, -31.176414523283, 31.003966912032),
        (1.0, 2, -31.968896255877, 32.833847990599),
        (1.0, 4, -30.962115423789, 30.926807071198),
        (4.0, 1, -30.900039464077, 33.294348648548),
        (4.0, 2, -37.616851122732, 34.657631037124),
        (4.0, 4, -34.213870495087, 34.804255552222),
    ],
)
def test_released_variant_matches_sums_of_the_published_layer_on_written_out_inputs(
    sparsity, iterations, total, squares
):
    b, i, c = (torch.arange(n, dtype=torch.float64) for n in (2, 5, 8))
    b, i, c = b[:, None, None], i[:, None] + 1, c + 1
    k, v = 1.5 * (0.37 * i * c + 0.9 * b).sin(), (0.23 * i + 0.5 * c - 0.4 * b).cos()  # (B, N, C)
    k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in (k, v))
    out = rpc(iterations=iterations, sparsity=sparsity)(make_heads()._replace(q=k, k=k, v=v, scale=0.5))
    assert float(out.sum()) == pytest.approx(total, abs=1e-11)
    assert float(out.square().sum()) == pytest.approx(squares, abs=1e-11)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
def test_paper_variant_is_the_papers_loop_with_threshold_lambda_over_mu(iterations, sign):
    heads = make_heads()
    leaves = [heads.k.requires_grad_(), heads.v.requires_grad_()]
    mu = heads.k[0, 0].numel() / 4 / heads.k.abs().sum((-2, -1))
    expected = pursued_by_hand(heads, iterations, 0.3 / mu, sign)
    out = rpc(iterations=iterations, sparsity=0.3, variant="paper", dual_sign=sign)(heads)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    gradients = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, expected))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


def test_second_gradients_pass_through_the_clipping(monkeypatch):
    monkeypatch.setattr("vitruvius.attention.rpc.attend", by_products)
    kernel = rpc(make_site(heads=2, queries=4, key_dim=3), iterations=3, sparsity=0.7)
    leaves = [x.requires_grad_() for x in torch.randn(2, 1, 2, 4, 3, dtype=torch.float64).unbind()]
    answer = lambda k, v: kernel(Heads(k, k, v, None, 0.5))  # noqa: E731
    assert torch.autograd.gradgradcheck(answer, leaves, check_undefined_grad=False)


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_one_iteration_is_symmetric_attention_on_clipped_keys(variant):
    heads = make_heads()
    size = heads.k.abs().mean((-2, -1), keepdim=True)
    tau = 0.4 * 3 / (4 * size) if variant == "released" else 4 * 0.4 * size
    clipped = heads.k.clamp(-tau, tau)
    out = rpc(iterations=1, sparsity=0.4, variant=variant)(heads)
    torch.testing.assert_close(out, attend(heads._replace(q=clipped, k=clipped)))


@pytest.mark.parametrize("iterations", [1, 3])
def test_sparsity_zero_is_uniform_attention_and_warns(iterations):
    heads = make_heads()
    with pytest.warns(UserWarning, match="uniform"):
        kernel = RPC(make_site(), iterations=iterations, sparsity=0.0)
    torch.testing.assert_close(kernel(heads), heads.v.mean(-2, keepdim=True).expand_as(heads.v))


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_infinite_sparsity_with_one_iteration_is_symmetric_softmax_exactly(variant):
    heads = make_heads()
    heads.k.requires_grad_()
    out = rpc(iterations=1, sparsity=float("inf"), variant=variant)(heads)
    assert torch.equal(out, attend(heads._replace(q=heads.k)))
    (gradient,) = torch.autograd.grad(out.square().sum(), heads.k)
    assert gradient.isfinite().all()


def test_infinite_sparsity_with_two_iterations_takes_the_first_output_as_keys():
    heads = make_heads()
    first = attend(heads._replace(q=heads.k))
    out = rpc(iterations=2, sparsity=1e9)(heads)
    torch.testing.assert_close(out, attend(heads._replace(q=first, k=first)))


def test_the_asymmetric_form_keeps_the_queries():
    heads = make_heads()
    out = rpc(iterations=1, sparsity=float("inf"), asymmetric=True)(heads)
    assert torch.equal(out, attend(heads))  # neutral settings: softmax exactly
    tau = 0.4 * 3 / (4 * heads.k.abs().mean((-2, -1), keepdim=True))
    clipped = heads.k.clamp(-tau, tau)
    out = rpc(iterations=1, sparsity=0.4, asymmetric=True)(heads)
    torch.testing.assert_close(out, attend(heads._replace(k=clipped)))


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_asymmetric_form_is_the_loop_with_cleaned_keys_and_plain_queries(sign):
    heads = make_heads()
    tau = 0.4 * 3 / (4 * heads.k.abs().mean((-2, -1)))
    expected = pursued_by_hand(heads, 3, tau, sign, asymmetric=True)
    out = rpc(iterations=3, sparsity=0.4, asymmetric=True, dual_sign=sign)(heads)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sparsity", [0.5, float("inf")])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_without_a_gradient_the_answer_is_the_same_and_the_heads_stay(asymmetric, sparsity, dtype):
    heads, before = make_heads(dtype=dtype), make_heads(dtype=dtype)
    kernel = rpc(iterations=3, sparsity=sparsity, asymmetric=asymmetric)
    plain = kernel(heads)
    assert all(torch.equal(x, y) for x, y in zip(heads[:3], before[:3], strict=True))
    heads.v.requires_grad_()
    assert torch.equal(kernel(heads), plain)


@pytest.mark.parametrize("asymmetric", [False, True])
def test_the_bias_reaches_every_inner_softmax(asymmetric):
    bias = torch.full((7, 7), -torch.inf, dtype=torch.float64)
    bias.fill_diagonal_(0)  # each token sees itself alone, so every L is v, whatever the keys are
    heads = make_heads(bias=bias)
    torch.testing.assert_close(rpc(iterations=3, sparsity=0.5, asymmetric=asymmetric)(heads), heads.v)
    blocks = torch.block_diag(torch.ones(4, 4), torch.ones(3, 3)).double().log()
    whole = rpc(iterations=1, sparsity=1e9)(make_heads(bias=blocks))
    head, tail = (attend(h._replace(q=h.k)) for h in (cut(make_heads(), 0, 4), cut(make_heads(), 4, 7)))
    torch.testing.assert_close(whole, torch.cat([head, tail], -2))


def cut(heads, start, stop):
    return heads._replace(q=heads.q[..., start:stop, :], k=heads.k[..., start:stop, :], v=heads.v[..., start:stop, :])


def test_dropout_acts_in_the_last_iteration_only(monkeypatch):
    seen = []
    monkeypatch.setattr("vitruvius.attention.rpc.attend", lambda heads: (seen.append(heads.dropout), attend(heads))[1])
    rpc(iterations=3)(make_heads()._replace(dropout=0.25))
    assert seen == [0.0, 0.0, 0.25]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["released", "paper"])
def test_all_zero_keys_give_no_nan_in_any_precision(variant, dtype):
    heads = make_heads(dtype=dtype)
    heads = heads._replace(k=torch.zeros_like(heads.k).requires_grad_(), v=heads.v.requires_grad_())
    out = rpc(iterations=3, variant=variant)(heads)
    gradients = torch.autograd.grad(out.float().square().sum(), (heads.k, heads.v))
    assert out.dtype == dtype
    assert all(x.isfinite().all() for x in (out, *gradients))


def test_tiny_keys_in_half_precision_do_not_overflow_the_threshold():
    heads = make_heads(dtype=torch.float16)
    heads = heads._replace(k=(heads.k * 1e-6).requires_grad_())  # tau is about 1e6, beyond float16
    out = rpc(iterations=2)(heads)
    assert out.isfinite().all()
    assert torch.autograd.grad(out.float().square().sum(), heads.k)[0].isfinite().all()


def test_backward_remembers_one_byte_an_entry_beside_keys_and_outputs():
    heads = make_heads(tokens=16, width=16)
    heads = heads._replace(k=heads.k.requires_grad_(), v=heads.v.requires_grad_())

    def saved_bytes(iterations):
        sizes = {}
        note = lambda x: sizes.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) and x  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            kept = rpc(iterations=iterations)(heads)
        del kept
        return sum(sizes.values())

    entries = heads.k.numel()
    # clean keys and their output, a byte for the side of the clipping, the log-sum-exp of each row
    assert saved_bytes(5) - saved_bytes(4) <= entries * (8 + 8 + 1) + entries // 16 * 8 + 64
