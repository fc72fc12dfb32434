"""evaluate: every image once under every threat, nothing judged that cannot be, intervals and tables that are right."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from judging import THREATS, loader, model
from torch import Tensor, nn

from vitruvius._errors import ConfigError, UnknownName
from vitruvius._format import format_number
from vitruvius.attacks.autoattack import AutoAttack
from vitruvius.attacks.ddn import DDN
from vitruvius.attacks.fab import FAB
from vitruvius.attacks.fgsm import FGSM
from vitruvius.attacks.hopskipjump import HopSkipJump
from vitruvius.attacks.pgd import PGD
from vitruvius.attacks.transfer import Transfer
from vitruvius.evaluation import describe, evaluate
from vitruvius.evaluation.metrics.corruption import Baseline
from vitruvius.evaluation.result import shorten_labels, wilson
from vitruvius.evaluation.shift_report import corruption_report, load_shift_report


def test_the_numbers_are_those_of_a_slow_loop() -> None:
    net, data = model(), loader()
    report = evaluate(net, data, THREATS)
    x, y, ids = (torch.cat(column) for column in zip(*data.with_ids(), strict=True))
    logits = net(x)
    ranks = (logits > logits.gather(1, y[:, None])).sum(1)  # how many classes come before the label
    score = report["clean"]
    assert (score.n, score.correct) == (22, int((ranks == 0).sum()))
    assert score.accuracy == score.correct / 22
    assert (score.low, score.high) == wilson(score.correct, 22)
    assert score.top5 == pytest.approx(float((ranks < 5).float().mean()))
    assert score.loss == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-5)
    standing = ranks == 0
    for threat in THREATS:
        right = net(threat(net, x, y, ids=ids)).argmax(1) == y
        assert report[describe(threat)].correct == int(right.sum())
        assert report[describe(threat)].eps == threat.eps
        standing &= right
    assert report.worst_case.correct == int(standing.sum())
    assert report.num_images == 22


def test_a_ledger_row_says_everything_about_an_image() -> None:
    net, data = model(), loader()
    rows = evaluate(net, data).ledger.rows("clean")
    x, y, ids = (torch.cat(column) for column in zip(*data.with_ids(), strict=True))
    probabilities = net(x).softmax(-1)
    assert torch.equal(rows["id"], ids)
    assert torch.equal(rows["label"], y)
    assert torch.equal(rows["prediction"].long(), probabilities.argmax(-1))
    torch.testing.assert_close(rows["confidence"], probabilities.amax(-1))
    assert torch.equal(rows["correct"], probabilities.argmax(-1) == y)
    torch.testing.assert_close(rows["max_logit"], net(x).amax(-1))
    torch.testing.assert_close(rows["energy"], net(x).exp().sum(-1).log())
    torch.testing.assert_close(rows["entropy"], -(probabilities * probabilities.log()).sum(-1))


class Scaled(nn.Module):
    """Class k for an image whose first pixel is k / 10, with logits as close to each other as `spread` says."""

    def __init__(self, spread: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.spread = spread
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        classes = (10 * x[:, 0, 0, 0]).round().long()
        return self.spread * F.one_hot(classes, 10).to(self.dtype)


@pytest.mark.parametrize(("spread", "dtype"), [(1e-9, torch.float32), (1e-50, torch.float64)])
def test_the_answer_is_the_largest_logit_however_small_the_difference(spread: float, dtype: torch.dtype) -> None:
    y = torch.arange(10)
    x = (y / 10).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
    report = evaluate(Scaled(spread, dtype).eval(), [(x, y)])
    assert report["clean"].accuracy == 1


def test_a_right_answer_is_among_the_five_best_also_where_logits_are_equal() -> None:
    y = torch.arange(10)
    report = evaluate(Scaled(0.0, torch.float32).eval(), [(torch.zeros(10, 1, 4, 4), y)])
    rows = report.ledger.rows("clean")
    assert rows["correct"].tolist() == [True] + 9 * [False]
    assert rows["top5"].tolist() == 5 * [True] + 5 * [False]


def test_the_worst_case_is_over_attacks_and_not_over_corruptions() -> None:
    net = model()
    batches = [(x, net(x).argmax(1)) for x, _ in loader()]
    report = evaluate(net, batches, ["contrast:severity=5", "fgsm:eps=2/255"])
    assert report["contrast"].correct < report["fgsm"].correct <= report["clean"].correct == 22
    assert report.worst_case.correct == report["fgsm"].correct
    assert report["contrast"].severity == 5


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.2775327998628892),  # z² / (n + z²)
        (10, 10, 0.7224672001371107, 1.0),
        (5, 10, 0.2365930905125640, 0.7634069094874360),
        (81, 263, 0.2552701, 0.3662064),  # Newcombe 1998, table I: 0.2553 to 0.3662
        (15, 148, 0.0623861, 0.1605187),  # the same: 0.0624 to 0.1605
        (1, 29, 0.0061129, 0.1717602),  # the same: 0.0061 to 0.1718
        (0, 0, 0.0, 1.0),
    ],
)
def test_the_interval_is_wilsons(correct: int, n: int, low: float, high: float) -> None:
    assert wilson(correct, n) == pytest.approx((low, high), abs=5e-5)


def test_the_interval_solves_wilsons_equation() -> None:
    z = 1.959963984540054
    for correct, n in ((3, 40), (77, 100), (9999, 10000)):
        for bound in wilson(correct, n):
            assert abs(correct / n - bound) == pytest.approx(z * (bound * (1 - bound) / n) ** 0.5, rel=1e-9)


def test_a_report_prints_as_a_table_and_saves_as_json(tmp_path: Path) -> None:
    report = evaluate(model(), loader(), THREATS)
    lines = str(report).splitlines()
    assert lines[0].split() == ["threat", "accuracy", "95", "%", "interval", "n", "top-5", "loss"]
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "clean",
        "pgd(eps=8/255, steps=2)",
        "fgsm(eps=4/255)",
        "worst case of all",
    ]
    assert f"{100 * report['clean'].accuracy:.2f} %" in lines[2]
    report.save(tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved == report.to_dict()
    assert [threat["name"] for threat in saved["threats"]] == ["clean", "pgd", "fgsm"]
    assert saved["worst_case"]["n"] == 22
    assert saved["threats"][1]["seconds"] > 0
    assert len(str(evaluate(model(), loader())).splitlines()) == 3  # clean alone has no worst case


def test_wide_descriptions_are_shortened_in_the_table_and_whole_in_the_file() -> None:
    stages = tuple({"use": "apgd", "steps": steps} for steps in (1, 2, 3, 4, 5))
    wide = AutoAttack(eps=8 / 255, version="custom", attacks=stages)
    report = evaluate(model(), loader(), [wide])
    assert len(report.threats[-1].spec) > 100
    line = str(report).splitlines()[3]
    assert line.startswith("autoattack(eps=8/255, version=custom, att…")
    assert max(map(len, str(report).splitlines()[:4])) < 120
    assert report.to_dict()["threats"][-1]["spec"] == report.threats[-1].spec


def test_descriptions_that_differ_in_the_middle_alone_stay_whole() -> None:
    alike = [f"{'a' * 60}{middle}{'b' * 60}" for middle in "12"]
    assert shorten_labels(alike) == alike
    assert shorten_labels(["short", alike[0]])[0] == "short"
    assert len(shorten_labels(["short", alike[0]])[1]) == 56


def test_errors_against_a_baseline_are_kept_until_corruptions_are_others(tmp_path: Path) -> None:
    file = tmp_path / "shifts" / "corruptions" / "report.json"
    report = evaluate(model(), loader(), ["fog:severity=1"], folder=tmp_path)
    against = corruption_report(report, Baseline(name="other", errors={"fog": {1: 0.5}}))
    assert against is not None
    against.save(file)
    evaluate(model(), loader(), ["fgsm:eps=4/255"], folder=tmp_path)
    assert load_shift_report(file).corruption["mce"] == against.corruption["mce"]
    evaluate(model(), loader(), ["fog:severity=2"], folder=tmp_path)
    assert load_shift_report(file).accuracies["fog"].keys() == {1, 2}
    assert "mce" not in load_shift_report(file).corruption


def test_threats_are_found_by_name_and_by_description() -> None:
    twice = [PGD(eps=4 / 255, steps=1), PGD(eps=8 / 255, steps=1)]
    report = evaluate(model(), loader(), twice)
    assert [score.name for score in report.threats] == ["clean", "pgd", "pgd(eps=8/255, steps=1)"]
    assert report["pgd"] is report["pgd(eps=4/255, steps=1)"]
    with pytest.raises(UnknownName, match=r"no threat 'pgt' in this report; did you mean 'pgd'\?"):
        report["pgt"]
    with pytest.raises(ConfigError, match=r"the threat pgd\(eps=4/255, steps=1\) is given twice"):
        evaluate(model(), loader(), [twice[0], PGD(eps=4 / 255, steps=1)])


@pytest.mark.parametrize(
    ("threat", "text"),
    [
        (PGD(eps=4 / 255, steps=20), "pgd(eps=4/255, steps=20)"),
        (PGD(eps=0.5 / 255), "pgd(eps=0.5/255)"),
        (PGD(eps=0.5, norm="l2", best=True), "pgd(eps=0.5, norm=l2, best=True)"),
        (FGSM(eps=0.0157), "fgsm(eps=0.0157)"),
        (PGD(eps=8 / 255, step_size=2 / 255, seed=3), "pgd(eps=8/255, seed=3, step_size=2/255)"),
    ],
    ids=str,
)
def test_a_description_shows_what_differs_from_the_defaults(threat: Any, text: str) -> None:
    assert describe(threat) == text


def test_a_description_names_settings_and_nothing_else() -> None:
    for threat in (DDN(eps=1.0), HopSkipJump(eps=0.5, steps=3), FAB(eps=0.1)):
        assert "norms" not in describe(threat)
        assert "finds_nearest" not in describe(threat)
    assert describe(HopSkipJump(eps=0.5, steps=3)) == "hopskipjump(eps=0.5, steps=3)"
    assert "made=" not in describe(Transfer(source=model(), eps=0.1))  # what it makes of its settings is none


def test_descriptions_never_hide_a_difference() -> None:
    assert describe(FGSM(eps=0.0157)) != describe(FGSM(eps=0.01570001))
    assert format_number(4 / 255) == "4/255"
    assert format_number(4 / 255 + 1e-12) != "4/255"

    def shift(model: nn.Module, x: Tensor, y: Tensor, by: float) -> Tensor:
        return (x + by).clamp(0, 1)

    assert describe(functools.partial(shift, by=0.25)) == "shift(by=0.25)"


def test_any_callable_is_a_threat_and_sees_the_true_labels() -> None:
    seen = []

    def blacken(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(y)
        return torch.zeros_like(x)

    report = evaluate(model(), loader(), [blacken])
    assert torch.equal(torch.cat(seen), torch.cat([y for _, y in loader()]))
    assert len(set(report.ledger.rows("blacken")["prediction"].tolist())) == 1


def test_files_hold_no_infinity_of_attacks_without_a_radius(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    report = evaluate(model(), loader(), "deepfool:steps=1", folder=tmp_path)
    assert report["deepfool"].eps is None
    for name in ("report.json", "ledger.json"):
        json.loads((tmp_path / name).read_text(), parse_constant=refuse)


def test_plain_loaders_are_numbered_in_order() -> None:
    batches = [(torch.rand(3, 3, 8, 8), torch.tensor([0, 1, 2])), (torch.rand(2, 3, 8, 8), torch.tensor([3, 4]))]
    report = evaluate(model(), batches)
    assert report.ledger.rows("clean")["id"].tolist() == [0, 1, 2, 3, 4]
    assert report.data == "unnamed"
    named = [(*batch, torch.tensor(ids)) for batch, ids in zip(batches, ([7, 5, 9], [1, 3]), strict=True)]
    assert evaluate(model(), named).ledger.rows("clean")["label"].tolist() == [3, 4, 1, 0, 2]


def test_an_image_that_comes_twice_counts_once() -> None:
    batch = (torch.rand(3, 3, 8, 8), torch.tensor([0, 1, 2]), torch.tensor([4, 5, 6]))
    assert evaluate(model(), [batch, batch])["clean"].n == 3
    assert evaluate(model(), [tuple(column[[0, 0, 1]] for column in batch)])["clean"].n == 2


def test_who_watches_is_told_after_every_batch() -> None:
    seen: list[tuple[int, int | None]] = []
    evaluate(model(), loader(), progress=lambda done, total, words="": seen.append((done, total)))
    assert seen == sorted(seen)
    assert [done for done in (6, 12, 18, 22) if (done, 22) not in seen] == []
    assert {total for _, total in seen} == {22}
