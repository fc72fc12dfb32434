import pytest
import torch
from attending import (
    assert_golden,
    assert_golden_gradients,
    make_heads,
    make_site,
    mean_maps,
    of_case,
    run_layer,
)
from torch import nn

from golden_files import read_golden
from vitruvius._errors import DataError, SurgeryError
from vitruvius.attention import part
from vitruvius.attention.base import attention_map, build_core
from vitruvius.attention.low_rank import LowRank, fit_low_rank, fold_into
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads, HeadWeights
from vitruvius.surgery import rewire

FILES = {name: read_golden(name) for name in ("vitcod_attn_ae_a", "vitcod_attn_ae_b", "vitcod_attn_fcq")}
CASES = [(name, case) for name, (_, metadata) in FILES.items() for case in metadata["cases"]]


def golden_core(tensors, metadata, expected, masked):
    chosen = {"mix_head_fc_qk": "qk", "mix_head_fc_q": "q"}[metadata["svd_type"]]
    site = make_site(heads=metadata["H"], queries=metadata["N"], key_dim=metadata["D"])
    low_rank = part("low_rank", rank=metadata["hidden"], tensors=chosen, reconstruction="released")
    parts = [low_rank, part("mask", keep=~expected["mask"][0])] if masked else [low_rank]
    core = build_core(parts, site).double()
    stage = core.get_submodule("low_rank")
    names = {
        f"{half}_{t}.{kind}": f"{t}.{i}.{kind}"
        for t in chosen
        for i, half in enumerate(("encoder", "decoder"))
        for kind in ("weight", "bias")
    }
    stage.load_state_dict({ours: tensors[theirs] for theirs, ours in names.items()})
    return core, stage, {theirs: stage.get_parameter(ours) for theirs, ours in names.items()}


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda value: value if isinstance(value, str) else value["id"])
def test_the_auto_encoder_matches_the_golden_outputs_penalty_and_gradients(name, case):
    tensors, metadata = FILES[name]
    expected = of_case(tensors, case)
    core, stage, parameters = golden_core(tensors, metadata, expected, case["masked"])
    heads, out, leaves = run_layer(tensors, metadata["H"], core)
    mixed = stage(heads)
    assert_golden(mixed.q, expected["q"])
    assert_golden(mixed.k, expected["k"])
    assert_golden(out, expected["out"])
    masked = core.get_submodule("mask")(mixed) if case["masked"] else mixed
    assert_golden(attention_map(masked), expected["attn"])
    assert_golden(mean_maps(tensors, metadata["H"], list(core.children())[:-1]), expected["attn_avg2"])
    assert_golden_gradients(out.square().sum(), leaves | parameters, expected)
    penalty = stage.penalty(heads, mixed)
    assert_golden(penalty, expected["recon_loss"])
    assert_golden_gradients(penalty, leaves | parameters, expected, prefix="grad_recon")


def test_full_rank_begins_as_softmax_exactly():
    heads = make_heads()
    core = build_core([part("low_rank", rank=3)], make_site()).double()
    assert torch.equal(core(heads), attend(heads))
    assert core.get_submodule("low_rank").penalty(heads, heads) == 0


def test_the_default_rank_is_half_of_the_heads_rounded_up_and_one_head_is_possible():
    for heads, rank in ((1, 1), (2, 1), (3, 2), (6, 3), (12, 6)):
        stage = LowRank(make_site(heads=heads))
        assert stage.get_parameter("q.0.weight").shape == (rank, heads)
    assert sum(p.numel() for p in LowRank(make_site(heads=3)).parameters()) == 34  # as published for DeiT-Tiny


def test_the_released_start_is_near_zero_so_that_maps_are_uniform_and_differs_between_sites():
    first, again = (LowRank(make_site(), start="released") for _ in range(2))
    other = LowRank(make_site(name="blocks.1.attn"), start="released")
    assert first.mixing("q")[0].abs().max() < 0.01
    assert torch.equal(first.mixing("q")[0], again.mixing("q")[0])
    assert not torch.equal(first.mixing("q")[0], other.mixing("q")[0])
    assert not torch.equal(first.mixing("q")[0], LowRank(make_site(), start="released", seed=1).mixing("q")[0])


def test_making_one_leaves_the_global_random_state_alone():
    before = torch.random.get_rng_state()
    LowRank(make_site(), start="released")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_only_the_named_tensors_change_and_have_parameters():
    heads = make_heads()
    for tensors, untouched in (("q", "k"), ("k", "q")):
        stage = LowRank(make_site(), tensors=tensors, start="released").double()
        after = stage(heads)
        assert getattr(after, untouched) is getattr(heads, untouched)
        assert after.v is heads.v
        assert {name.split(".")[0] for name, _ in stage.named_parameters()} == {tensors}
        assert stage.writes == {tensors}


def test_the_normalised_penalty_does_not_depend_on_the_batch_or_on_the_scale():
    stage = LowRank(make_site(), rank=1).double()
    heads = make_heads()
    twice = Heads(*(torch.cat([x, x]) * 5 for x in heads[:3]))
    torch.testing.assert_close(stage.penalty(heads, stage(heads)), stage.penalty(twice, stage(twice)))
    released = LowRank(make_site(), rank=1, reconstruction="released").double()
    doubled = Heads(*(torch.cat([x, x]) for x in heads[:3]))
    ratio = released.penalty(doubled, released(doubled)) / released.penalty(heads, released(heads))
    assert float(ratio.detach()) == pytest.approx(2**0.5)  # as published: grows with the root of the batch


@pytest.mark.parametrize("detach", [False, True])
def test_a_detached_target_trains_the_auto_encoder_alone(detach):
    stage = LowRank(make_site(), detach_target=detach, start="released", reconstruction="released").double()
    heads = make_heads()
    target = heads._replace(q=heads.q.clone().requires_grad_())
    penalty = stage.penalty(target, stage(heads))  # q reaches the penalty as its target only
    gradients = torch.autograd.grad(
        penalty, (target.q, stage.get_parameter("q.0.weight")), materialize_grads=True, allow_unused=True
    )
    assert bool(gradients[0].any()) is not detach
    assert gradients[1].any()


def test_the_penalty_of_half_precision_heads_is_computed_in_float32():
    stage = LowRank(make_site(), rank=1, reconstruction="released").half()
    heads = Heads(*(x * 200 for x in make_heads(dtype=torch.float16, tokens=64, width=64)[:3]))
    loss = stage.penalty(heads, stage(heads))
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    zero = Heads(*(torch.zeros_like(x) for x in heads[:3]))
    assert LowRank(make_site(), rank=1).half().penalty(zero, zero) == 0


def weights_and_input(bias=True, heads=3, width=4, dim=12):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    biases = [draw(heads, width) for _ in range(3)] if bias else [None] * 3
    return HeadWeights(*(draw(heads, width, dim) for _ in range(3)), draw(dim, heads, width), *biases), draw(2, 5, dim)


def project(weights, x):
    def one(weight, bias):
        out = torch.einsum("hdc,bnc->bhnd", weight, x)
        return out if bias is None else out + bias[:, None]

    q, k, v = (one(getattr(weights, n), getattr(weights, f"{n}_bias")) for n in "qkv")
    return Heads(q, k, v, None, 0.5)


@pytest.mark.parametrize("tensors", ["qk", "q", "k"])
def test_folding_is_exact(tensors):
    weights, x = weights_and_input()
    stage = LowRank(make_site(), tensors=tensors, start="released").double()
    for parameter in stage.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    expected = stage(project(weights, x))
    fold_into(weights, stage)
    for name in "qkv":
        torch.testing.assert_close(getattr(project(weights, x), name), getattr(expected, name), rtol=1e-12, atol=1e-12)


def test_folding_without_a_bias_works_when_none_is_needed_and_is_refused_untouched_otherwise():
    weights, x = weights_and_input(bias=False)
    stage = LowRank(make_site(), rank=2).double()
    expected = stage(project(weights, x))
    fold_into(weights, stage)
    torch.testing.assert_close(project(weights, x).q, expected.q)
    with torch.no_grad():
        stage.get_parameter("k.1.bias").fill_(1)
    before = weights.q.clone()
    with pytest.raises(SurgeryError, match="needs a bias for k"):
        fold_into(weights, stage)
    assert torch.equal(weights.q, before)


def test_weights_that_are_not_finite_are_refused_by_start_and_fold():
    weights, _ = weights_and_input()
    weights.k[0, 0, 0] = torch.inf
    stage = LowRank(make_site()).double()
    with pytest.raises(SurgeryError, match="not finite"):
        stage.start_from_weights(weights)
    with pytest.raises(SurgeryError, match="not finite"):
        fold_into(weights, stage)


def test_starting_from_weights_is_the_best_projection_and_exact_when_heads_are_dependent():
    weights, x = weights_and_input()
    for name in "qk":  # head 2 repeats the sum of the others
        getattr(weights, name)[2] = getattr(weights, name)[:2].sum(0)
        getattr(weights, f"{name}_bias")[2] = getattr(weights, f"{name}_bias")[:2].sum(0)
    stage = LowRank(make_site(), rank=2).double()
    heads = project(weights, x)
    assert stage.penalty(heads, stage(heads)) > 0.1
    stage.start_from_weights(weights)
    assert stage.penalty(heads, stage(heads)) < 1e-20
    torch.testing.assert_close(attend(stage(heads)), attend(heads))


class Toy(nn.Module):
    """Two layers of attention, the second sees what the first puts out."""

    def __init__(self, rank):
        super().__init__()
        self.first = build_core([part("low_rank", rank=rank)], make_site(name="first"))
        self.second = build_core([part("low_rank", rank=rank)], make_site(name="second"))

    def forward(self, x):
        y = self.first(Heads(x, x * 2 + 1, x, None, 0.5))
        return self.second(Heads(y, y - 3, y, None, 0.5))


def test_fitting_finds_the_best_affine_projection_of_the_activations_and_looks_through_the_stages():
    batches = [make_heads(seed=seed).q for seed in range(3)]
    model = Toy(rank=2).double().train()
    full = Toy(rank=3).double()
    fit_low_rank(model, iter(batches))
    assert model.training
    assert model.first.training
    x = torch.cat(batches)
    y = full.first(Heads(x, x * 2 + 1, x, None, 0.5))  # the pretrained activation, not a compressed one
    stage = model.second.get_submodule("low_rank")
    rows = (y - 3).transpose(0, 1).flatten(1)
    centred = rows - rows.mean(1, keepdim=True)
    best = torch.linalg.svdvals(centred)[2:].square().sum()
    after = stage(Heads(y, y - 3, y)).k.transpose(0, 1).flatten(1)
    torch.testing.assert_close((after - rows).square().sum(), best)


def test_fitting_needs_a_low_rank_part_and_a_batch():
    with pytest.raises(SurgeryError, match="rewire it first"):
        fit_low_rank(nn.Linear(2, 2), [])
    model = Toy(rank=2)
    with pytest.raises(DataError, match=r"no batch reached 'first\.low_rank'"):
        fit_low_rank(model, [])
    assert not model.first.get_submodule("low_rank")._forward_hooks


def quantise_by_torch(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def quantise_by_torchao(model, config="Int8WeightOnlyConfig"):
    ao = pytest.importorskip("torchao.quantization", reason="needs torchao (extra library-tests)")
    ao.quantize_(model, getattr(ao, config)())
    return model


def quantise_activations_too(model):
    return quantise_by_torchao(model, "Int8DynamicActivationInt8WeightConfig")


@pytest.mark.filterwarnings("ignore")  # of torch, which recommends torchao
@pytest.mark.parametrize("quantise", [quantise_by_torch, quantise_by_torchao, quantise_activations_too])
def test_a_quantised_model_with_auto_encoders_runs(quantise, tiny_vit):
    model, x = tiny_vit
    with torch.no_grad():
        expected = rewire(model, part("low_rank", rank=2))(x)
        found = quantise(model)(x)
    assert 0 < (found - expected).norm() < 0.2 * expected.norm()
