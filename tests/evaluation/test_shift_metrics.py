"""Metrics of shift against golden values, slow loops and limit cases."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from vitruvius._errors import ConfigError, DataError
from vitruvius.evaluation.metrics import bootstrap, calibration, corruption, detection, temperature
from vitruvius.evaluation.metrics.bootstrap import multiplicities, percentiles
from vitruvius.evaluation.metrics.detection import weighted

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(GOLDEN / f"ood_{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


def cases(name: str) -> list[dict[str, Any]]:
    return json.loads(golden(name)[1]["cases"])


def sure(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Confidences and answers of a model that is a little too sure."""
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(n, generator=generator, dtype=torch.float64) ** 0.5
    return confidence, torch.rand(n, generator=generator, dtype=torch.float64) < 0.9 * confidence


@pytest.mark.parametrize("case", cases("calibration"), ids=lambda case: case["id"])
def test_calibration_is_golden_as_released_and_with_all_bins(case: dict[str, Any]) -> None:
    tensors, _ = golden("calibration")
    expected = {key.split(".")[1]: tensor for key, tensor in tensors.items() if key.startswith(f"{case['id']}.")}
    columns = expected["confidence"], expected["correct"]
    bins = calibration.EqualMass(size=case["beta"])(*columns)
    for kind, made in (("all_bins", bins), ("shipped", calibration.as_released(bins))):
        assert calibration.rms_error(made) == pytest.approx(float(expected[f"rms_{kind}"]), abs=1e-12)
        assert calibration.expected_error(made) == pytest.approx(float(expected[f"l1_{kind}"]), abs=1e-12)
        assert calibration.largest_error(made) == pytest.approx(float(expected[f"max_{kind}"]), abs=1e-12)
    assert calibration.aurra(*columns) == pytest.approx(float(expected["aurra"]), abs=1e-12)
    assert calibration.soft_f1(*columns) == pytest.approx(float(expected["soft_f1"]), abs=1e-12)


@pytest.mark.parametrize("case", cases("detection"), ids=lambda case: case["id"])
def test_detection_is_golden(case: dict[str, Any]) -> None:
    tensors, _ = golden("detection")
    get = lambda name: tensors[f"{case['id']}.{name}"]  # noqa: E731
    found = detection.detect(get("out_score"), get("in_score"))
    assert found.auroc == pytest.approx(float(get("auroc")), abs=1e-12)
    assert found.aupr_out == pytest.approx(float(get("aupr")), abs=1e-12)
    for level in (95, 80):
        released = detection.fpr_as_released(get("out_score"), get("in_score"), recall=level / 100)
        assert released == pytest.approx(float(get(f"fpr{level}")), abs=1e-12)


@pytest.mark.parametrize("case", cases("detection"), ids=lambda case: case["id"])
def test_detection_the_other_way_round_and_fpr_are_those_of_slow_loops(case: dict[str, Any]) -> None:
    tensors, _ = golden("detection")
    out, known = (tensors[f"{case['id']}.{name}"] for name in ("out_score", "in_score"))
    found = detection.detect(out, known)
    shares = [
        float((known >= t).double().mean())
        for t in torch.cat([out, known])
        if float((out >= t).double().mean()) >= 0.95
    ]
    assert found.fpr95 == pytest.approx(min(shares))
    area, recall = 0.0, 0.0
    for t in torch.unique(torch.cat([out, known])):  # known images found by a low score, thresholds rising
        hits, false = int((known <= t).sum()), int((out <= t).sum())
        area += (hits / len(known) - recall) * hits / (hits + false)
        recall = hits / len(known)
    assert found.aupr_in == pytest.approx(area)


@pytest.mark.parametrize("case", cases("temperature"), ids=lambda case: case["id"])
def test_the_temperature_is_golden_and_a_minimum(case: dict[str, Any]) -> None:
    tensors, _ = golden("temperature")
    logits, labels = tensors[f"{case['id']}.logits"], tensors[f"{case['id']}.labels"]
    found = temperature.fit_temperature(logits, labels)
    assert found == pytest.approx(float(tensors[f"{case['id']}.temperature"]), abs=1e-3)
    loss = lambda t: float(torch.nn.functional.cross_entropy(logits.double() / t, labels))  # noqa: E731
    assert loss(found) < min(loss(found * 0.99), loss(found * 1.01))


def test_temperature_calibrates_a_model_that_is_twice_too_sure(caplog: pytest.LogCaptureFixture) -> None:
    generator = torch.Generator().manual_seed(1)
    honest = 2 * torch.randn(4000, 10, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(honest.softmax(-1), 1, generator=generator)[:, 0]
    assert temperature.fit_temperature(2 * honest, labels) == pytest.approx(2.0, rel=0.05)
    assert caplog.text == ""
    assert temperature.fit_temperature(100 * honest, labels) == pytest.approx(5.0, abs=1e-6)  # the end of the range
    assert "the temperature stops at 5, the end of its range" in caplog.text
    batches = [(2 * honest[i : i + 1000], labels[i : i + 1000]) for i in range(0, 4000, 1000)]
    told: list[tuple[int, int | None]] = []
    logits, collected = temperature.collect_logits(torch.nn.Identity(), batches, progress=lambda *n: told.append(n))
    assert told[-1] == (len(collected), None)
    assert len(told) == len(batches)
    torch.testing.assert_close(logits, (2 * honest).float())
    assert torch.equal(collected, labels)


def test_corruption_errors_are_golden_and_alexnet_is_the_published_one() -> None:
    tensors, metadata = golden("mce")
    names = json.loads(metadata["corruptions"])
    baseline = corruption.alexnet()
    errors = {
        name: dict(enumerate((row / 100).tolist(), start=1))
        for name, row in zip(names, tensors["error_percent"], strict=True)
    }
    found = corruption.corruption_errors(errors, baseline, clean_error=0.3)
    for place, name in enumerate(names):
        assert np.mean(list(baseline.errors[name].values())) == pytest.approx(float(tensors["alexnet_error"][place]))
        assert found.ce[name] == pytest.approx(float(tensors["ce"][place]), abs=1e-12)
        rise = float(tensors["alexnet_error"][place]) - baseline.clean_error
        assert found.relative_ce[name] == pytest.approx((np.mean(list(errors[name].values())) - 0.3) / rise)
    assert 100 * found.mce == pytest.approx(float(tensors["mce_percent"]), abs=1e-10)
    assert 1 - corruption.mean_error(errors) == pytest.approx(float(tensors["mean_accuracy_percent"]) / 100, abs=1e-12)
    assert found.skipped == ()


def test_a_baseline_against_itself_is_one_and_missing_parts_are_named() -> None:
    baseline = corruption.alexnet()
    same = corruption.corruption_errors(baseline.errors, baseline, clean_error=baseline.clean_error)
    assert (same.mce, same.relative_mce) == (pytest.approx(1.0), pytest.approx(1.0))
    part = corruption.corruption_errors({"fog": {2: 0.5, 6: 0.1}, "sparkles": {1: 0.2}}, baseline)
    assert part.ce == {"fog": pytest.approx(0.5 / baseline.errors["fog"][2])}
    assert part.skipped == ("fog 6", "sparkles")
    assert part.relative_mce is None
    with pytest.raises(DataError, match="AlexNet knows none of these corruptions: sparkles"):
        corruption.corruption_errors({"sparkles": {1: 0.2}}, baseline)
    perfect = corruption.Baseline(name="perfect", errors={"fog": {1: 0.0}})
    with pytest.raises(DataError, match="perfect makes no error under fog"):
        corruption.corruption_errors({"fog": {1: 0.2}}, perfect)


@pytest.mark.parametrize("number", [1, 7, 15])
def test_equal_width_bins_are_those_of_a_slow_loop(number: int) -> None:
    confidence, correct = sure(300)
    bins = calibration.EqualWidth(number=number)(confidence, correct)
    ece = 0.0
    for place in range(number):
        inside = (confidence > place / number) & (confidence <= (place + 1) / number)
        if inside.any():
            gap = float(confidence[inside].mean() - correct[inside].double().mean())
            ece += int(inside.sum()) / 300 * abs(gap)
    assert calibration.expected_error(bins) == pytest.approx(ece)
    assert float(bins.count.sum()) == 300
    assert bool((bins.low < bins.high).all())


def test_adaptive_bins_hold_equally_many_and_all_images() -> None:
    confidence, correct = sure(101)
    bins = calibration.EqualMass(number=15)(confidence, correct)
    assert set(bins.count.tolist()) == {6.0, 7.0}
    assert float(bins.count.sum()) == 101
    parts = np.array_split(np.sort(confidence.numpy()), np.cumsum(bins.count.numpy())[:-1].astype(int))
    np.testing.assert_allclose(bins.confidence, [part.mean() for part in parts])


def test_a_calibrated_model_has_almost_no_error_and_one_that_errs_surely_has_all() -> None:
    confidence = torch.full((1000,), 0.75, dtype=torch.float64)
    correct = torch.arange(1000) % 4 > 0
    assert calibration.expected_error(calibration.EqualWidth()(confidence, correct)) == pytest.approx(0, abs=1e-12)
    assert calibration.rms_error(calibration.EqualMass(size=100)(torch.ones(1000), torch.zeros(1000))) == 1.0
    assert calibration.aurra(confidence, torch.ones(1000)) == 1.0


@pytest.mark.parametrize(
    ("bad", "letter"),
    [
        (lambda: calibration.EqualMass(size=100)(*sure(99)), "99 images do not fill one bin of 100"),
        (lambda: calibration.EqualMass()(*sure(9)), "9 images do not fill 15 bins; use fewer bins or more images"),
        (
            lambda: calibration.EqualWidth()(torch.tensor([0.5, torch.nan]), torch.ones(2)),
            "not finite for 1 of 2 images",
        ),
        (lambda: calibration.EqualWidth()(torch.tensor([0.5, 3.0]), torch.ones(2)), r"expected shares in \[0, 1\]"),
        (lambda: calibration.aurra(torch.empty(0), torch.empty(0)), "confidence is empty"),
        (lambda: calibration.aurra(torch.rand(3), torch.ones(2)), r"got confidence \(3,\), correct \(2,\)"),
        (lambda: detection.detect(torch.empty(0), torch.rand(3)), "outside is empty"),
        (lambda: temperature.fit_temperature(torch.rand(3, 2), torch.zeros(2)), r"expected \(n, K\) and \(n\)"),
        (lambda: temperature.fit_temperature(torch.full((2, 2), torch.inf), torch.zeros(2)), "logits are not finite"),
        (lambda: temperature.collect_logits(torch.nn.Identity(), []), "yielded no images"),
        (lambda: calibration.EqualMass(size=2, number=3), "a size or a number"),
        (lambda: calibration.EqualWidth(number=0), "0 bins"),
    ],
)
def test_bad_columns_are_refused_with_reasons(bad: Any, letter: str) -> None:
    with pytest.raises((ConfigError, DataError), match=letter):
        bad()


def test_bootstrap_intervals_are_those_of_the_normal_approximation_and_repeatable() -> None:
    _, correct = sure(2000)
    share = lambda column: float(column.double().mean())  # noqa: E731
    low, high = bootstrap.bootstrap(share, [correct], replications=600)
    p = share(correct)
    half = 1.96 * (p * (1 - p) / 2000) ** 0.5
    assert (low, high) == (pytest.approx(p - half, abs=0.2 * half), pytest.approx(p + half, abs=0.2 * half))
    assert bootstrap.bootstrap(share, [correct], replications=20, seed=3) == bootstrap.bootstrap(
        share, [correct], replications=20, seed=3
    )
    assert bootstrap.bootstrap(share, [correct], replications=20, seed=4) != (low, high)
    with pytest.raises(ConfigError):
        bootstrap.bootstrap(share, [correct], level=1.5)


@pytest.mark.parametrize("case", cases("detection"), ids=lambda case: case["id"])
def test_detection_counted_by_weights_is_that_of_images_repeated(case: dict[str, Any]) -> None:
    tensors, _ = golden("detection")
    out, known = (tensors[f"{case['id']}.{name}"] for name in ("out_score", "in_score"))
    times = multiplicities(len(out), replications=3), multiplicities(len(known), replications=3, seed=1)
    found = weighted(out, known, *times)
    for place in range(3):
        rows = [t[place].long() for t in times]
        expected = asdict(detection.detect(out.repeat_interleave(rows[0]), known.repeat_interleave(rows[1])))
        assert {name: float(values[place]) for name, values in found.items()} == pytest.approx(expected, abs=1e-12)
    point = asdict(detection.detect(out, known))
    for name, (low, high) in detection.detection_intervals(out, known).items():
        assert low <= point[name] + 0.02
        assert high >= point[name] - 0.02


def test_an_interval_leaves_half_of_the_rest_on_either_side() -> None:
    values = torch.arange(1001, dtype=torch.float64)
    assert percentiles(values) == (pytest.approx(25), pytest.approx(975))
    assert percentiles(values, level=0.8) == (pytest.approx(100), pytest.approx(900))


def test_multiplicities_count_draws() -> None:
    times = multiplicities(50, replications=400)
    assert torch.equal(times.sum(1), torch.full((400,), 50.0))
    assert float(times.mean(0).std()) < 0.1  # every image is drawn once on average
