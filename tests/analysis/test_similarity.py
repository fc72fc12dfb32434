import itertools
import math

import pytest
import torch

from vitruvius.analysis.value_vectors import (
    cosines,
    kernel_cka,
    linear_cka,
    matched_cosines,
    pearson,
    principal_cosines,
    procrustes,
    rbf_gram,
)


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_matching_is_the_best_of_all_orders():
    x, y = draw(2, 1, 5, 3), draw(2, 1, 5, 3, seed=1)
    found = matched_cosines(x, y)
    for image in range(2):
        best = max(
            sum(float(cosines(x[image, 0, i], y[image, 0, order[i]])) for i in range(5))
            for order in itertools.permutations(range(5))
        )
        assert float(found[image, 0].sum()) == pytest.approx(best)
    shuffled = x[:, :, torch.randperm(5, generator=torch.Generator().manual_seed(0))]
    torch.testing.assert_close(matched_cosines(x, shuffled), torch.ones(2, 1, 5, dtype=torch.float64))


def test_pearson_is_numpy_s_correlation():
    x, y = draw(4, 7), draw(4, 7, seed=1)
    expected = torch.stack([torch.corrcoef(torch.stack([a, b]))[0, 1] for a, b in zip(x, y, strict=True)])
    torch.testing.assert_close(pearson(x, y), expected)


def test_biased_cka_is_the_definition_with_centring_matrices():
    x, y = draw(9, 4), draw(9, 4, seed=1)
    h = torch.eye(9, dtype=torch.float64) - 1 / 9
    for gram, cka in ((lambda each: each @ each.T, linear_cka), (rbf_gram, kernel_cka)):
        k, l = h @ gram(x) @ h, h @ gram(y) @ h  # noqa: E741
        torch.testing.assert_close(cka(x, y)[0], (k * l).sum() / ((k * k).sum() * (l * l).sum()).sqrt())


def test_debiased_cka_is_song_s_estimator_written_out():
    x, y = draw(8, 3), draw(8, 3, seed=1)

    def hsic(k, l):  # noqa: E741
        n = len(k)
        k, l = k - k.diag().diag(), l - l.diag().diag()  # noqa: E741
        one = torch.ones(n, dtype=torch.float64)
        middle = (one @ k @ one) * (one @ l @ one) / ((n - 1) * (n - 2))
        return ((k @ l).trace() + middle - 2 / (n - 2) * (one @ k @ l @ one)) / (n * (n - 3))

    for gram, cka in ((lambda each: each @ each.T, linear_cka), (rbf_gram, kernel_cka)):
        k, l = gram(x), gram(y)  # noqa: E741
        torch.testing.assert_close(cka(x, y)[1], hsic(k, l) / (hsic(k, k) * hsic(l, l)).sqrt())


def test_debiased_cka_is_zero_on_average_where_the_biased_one_has_a_floor():
    x, y = draw(200, 20, 16), draw(200, 20, 16, seed=1)
    biased, debiased = linear_cka(x, y)
    assert float(debiased.mean()) == pytest.approx(0, abs=0.02)
    assert float(biased.mean()) > 0.4


def test_three_tokens_are_too_few_for_the_debiased_estimator_and_it_says_nan():
    for cka in (linear_cka, kernel_cka):
        biased, debiased = cka(draw(3, 2), draw(3, 2, seed=1))
        assert debiased.isnan()
        assert biased.isfinite()


@pytest.mark.parametrize("measure", ["linear", "kernel", "procrustes", "angles"])
def test_rotations_scales_and_shifts_change_nothing_they_should_not(measure):
    x, y = draw(15, 4), draw(15, 4, seed=1)
    turned = 3 * y @ torch.linalg.qr(draw(4, 4, seed=2)).Q
    moved = turned + (0 if measure == "angles" else 5)
    ckas = {"linear": linear_cka, "kernel": kernel_cka}
    one_number = {"procrustes": procrustes, "angles": principal_cosines}
    take = one_number.get(measure) or (lambda a, b: torch.stack(ckas[measure](a, b)))
    torch.testing.assert_close(take(x, moved), take(x, y))


def test_principal_angles_of_planes_that_share_a_line():
    """The planes xy and x(cos 30° y + sin 30° z) share the x axis and open by 30°."""
    x = torch.eye(3, dtype=torch.float64)[:, :2]
    y = torch.tensor([[1, 0], [0, math.cos(math.pi / 6)], [0, 0.5]], dtype=torch.float64)
    found = principal_cosines(x, y)
    torch.testing.assert_close(found, torch.tensor([1, math.cos(math.pi / 6)], dtype=torch.float64))


def test_procrustes_finds_the_best_rotation_of_all():
    x, y = draw(10, 2), draw(10, 2, seed=1)
    x, y = x - x.mean(0), y - y.mean(0)
    angles = torch.linspace(0, 2 * math.pi, 3601, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    turns = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    flips = turns @ torch.tensor([[1, 0], [0, -1]], dtype=torch.float64)
    best = max(float((x * (y @ each)).sum()) for each in torch.cat([turns, flips]))
    assert float(procrustes(x, y)) == pytest.approx(best / float(x.norm() * y.norm()), abs=1e-6)


def test_the_width_of_the_rbf_kernel_is_the_lower_median_of_distances_that_are_not_zero():
    x = torch.tensor([[0.0], [0.0], [1.0], [3.0]], dtype=torch.float64)  # d² 0, 1, 1, 9, 9, 4 → 1, 1, 4, 9, 9
    found = rbf_gram(x)
    assert float(found[0, 2]) == pytest.approx(math.exp(-1 / 8))
    assert float(found[0, 1]) == 1
