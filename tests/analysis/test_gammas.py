import pytest
import torch
from looking import golden, make_heads, slow_gram

from vitruvius.analysis._kernel import key_gram
from vitruvius.analysis.gammas import disturbed, gammas, pairwise
from vitruvius.heads import Heads


def slow_pairs(x):
    pairs = [(float(x[i]), float(x[j])) for i in range(len(x)) for j in range(i + 1, len(x))]
    gaps = [abs(a - b) for a, b in pairs]
    relative = [gap / (max(abs(a), abs(b)) + 1e-10) for gap, (a, b) in zip(gaps, pairs, strict=True)]
    gaps, relative = torch.tensor(gaps, dtype=torch.float64), torch.tensor(relative, dtype=torch.float64)
    return {
        "absolute": gaps.mean(),
        "absolute_std": gaps.std(),
        "relative": relative.mean(),
        "relative_std": relative.std(),
    }


def test_statistics_over_pairs_match_the_golden_vectors():
    tensors = golden("gammas")
    found = pairwise(tensors["vectors"])
    for name in ("abs", "rel"):
        full = {"abs": "absolute", "rel": "relative"}[name]
        pair = torch.stack([found[full], found[f"{full}_std"]], -1)
        torch.testing.assert_close(pair, tensors[f"vectors.{name}"], rtol=1e-10, atol=0)


@pytest.mark.parametrize("kind", ["normal", "heavy", "shifted", "positive", "zeros"])
def test_sums_over_the_order_equal_the_double_loop(kind):
    x = torch.randn(31, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = {"normal": x, "heavy": 1 / x**3, "shifted": x + 1e4, "positive": x.abs(), "zeros": x * (x > 0)}[kind]
    found = pairwise(x)
    for name, value in slow_pairs(x).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("standard", [True, False])
def test_exact_eigenvectors_have_constant_gammas(standard):
    tensors = golden("gammas")
    heads = Heads(tensors["q"], tensors["k"], tensors["k"], scale=9**-0.5)
    found = gammas(heads, variant="reproduction", standardise=standard)
    assert (found["absolute_by_column"] < 1e-15).all()
    assert (found["relative_by_column"] < 1e-12).all()
    torch.testing.assert_close(found["alignment"], torch.ones_like(found["alignment"]))
    case = "std" if standard else "raw"
    columns = torch.linalg.eigh(key_gram(heads, standardise=standard, released=True).centred)
    for head in range(2):
        average = columns.eigenvalues[0, head].flip(-1)[:9] / 14
        torch.testing.assert_close(average, tensors[f"{case}.exact.h{head}.average"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", ["std", "raw"])
@pytest.mark.parametrize("head", [0, 1])
def test_gammas_of_disturbed_eigenvectors_match_the_golden_ones(case, head):
    tensors = golden("gammas")
    heads = Heads(tensors["q"], tensors["k"], tensors["k"], scale=9**-0.5)
    gram = key_gram(heads, standardise=case == "std", released=True).centred[0, head]
    key = f"{case}.random.h{head}"
    columns = disturbed(tensors[f"{key}.A"], tensors[f"{key}.noise"], 0.1)
    found = pairwise(((gram @ columns) / (14 * columns)).mT)
    for short, name in (("abs", "absolute"), ("rel", "relative")):
        torch.testing.assert_close(found[name], tensors[f"{key}.{short}_mean"], rtol=1e-9, atol=0)
        torch.testing.assert_close(found[f"{name}_std"], tensors[f"{key}.{short}_std"], rtol=1e-9, atol=0)


def test_the_released_variant_disturbs_by_a_seed_alone():
    heads = make_heads(tokens=12)
    first, again = (gammas(heads, variant="released", seed=3)["relative"] for _ in range(2))
    other = gammas(heads, variant="released", seed=4)["relative"]
    alone = gammas(Heads(*(x[1:] for x in heads[:3]), scale=heads.scale), variant="released", seed=3)["relative"]
    torch.testing.assert_close(first, again)
    torch.testing.assert_close(first[1:], alone)  # an image's result does not depend on its batch
    assert not torch.allclose(first, other)
    assert (first > gammas(heads, variant="reproduction")["relative"] + 0.01).all()


def test_the_paper_s_gammas_go_through_the_values():
    heads = make_heads(tokens=8)
    found = gammas(heads, standardise=False)
    image, head, column = 1, 2, 3
    keys = heads.k[image, head]
    mass = (keys @ keys.T * heads.scale).exp().sum(-1)
    centring = torch.eye(8, dtype=torch.float64) - 1 / 8
    a = torch.linalg.pinv(centring) @ (mass * heads.v[image, head, :, column])
    gamma = (slow_gram(keys, heads.scale) @ a) / (8 * a)
    for name, value in slow_pairs(gamma).items():
        torch.testing.assert_close(found[f"{name}_by_column"][image, head, column], value, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(found["relative"], found["relative_by_column"].mean(-1))


def test_values_made_from_eigenvectors_have_constant_gammas_by_the_paper_s_definition():
    """V = diag(1/g) (I − 1/N) A is what the theory claims; then gammas do not depend on the token."""
    heads = make_heads(tokens=10)
    gram = key_gram(heads, standardise=True)
    a = torch.linalg.eigh(gram.centred).eigenvectors.flip(-1)[..., :4]
    v = (a - a.mean(-2, keepdim=True)) / gram.log_mass.exp()[..., None]
    found = gammas(heads._replace(v=v))
    assert (found["relative"] < 1e-9).all()
    torch.testing.assert_close(found["alignment"], torch.ones_like(found["alignment"]))
    assert (gammas(heads)["relative"] > 0.1).all()


def test_masses_beyond_float64_do_no_harm():
    heads = make_heads()
    found = gammas(heads._replace(k=heads.k * 1e3), standardise=False)
    assert found["alignment"].isfinite().any()
    assert all(values.shape[:2] == (2, 3) for values in found.values())
