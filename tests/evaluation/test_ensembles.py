"""An ensemble in an evaluation: pools of batches, rows as its stages end, kills that lose one stage at most."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import Stop, assert_same_rows, rows
from rich.console import Console
from torch import Tensor, nn

import vitruvius
from vitruvius import _progress
from vitruvius._errors import DataError
from vitruvius._progress import Bar
from vitruvius.attacks import APGD, PGD, APGDTargeted, Attack, AutoAttack, FABTargeted, Square
from vitruvius.attacks.base import LINF, Ensemble, Outcome, StageResult
from vitruvius.cli import main
from vitruvius.data import DataConfig, eval_loader
from vitruvius.evaluation import evaluate
from vitruvius.evaluation.ledger import POINTS, STAGES

EPS = 4 / 255
BATCH = 4
ATTACKS = (
    APGD(eps=EPS, steps=5, batch_size=BATCH),
    APGDTargeted(eps=EPS, steps=5, targets=3, batch_size=BATCH),
    FABTargeted(eps=EPS, steps=4, targets=2, batch_size=BATCH),
    PGD(eps=EPS, steps=2),
    Square(eps=EPS, queries=20, batch_size=BATCH),
)
ENSEMBLE = AutoAttack(eps=EPS, version="custom", attacks=ATTACKS)
FAST = replace(ENSEMBLE, precision="fast")
SMALL_POOLS = replace(ENSEMBLE, pool_batches=1)
L1 = AutoAttack(
    eps=1.0,
    norm="l1",
    version="custom",
    attacks=(
        APGD(eps=1.0, norm="l1", steps=9, restarts=2, batch_size=BATCH),
        APGDTargeted(eps=1.0, norm="l1", steps=9, targets=3, batch_size=BATCH),
        Square(eps=1.0, norm="l1", queries=50, batch_size=BATCH),
    ),
)
by_precision = pytest.mark.parametrize("ensemble", [ENSEMBLE, FAST], ids=lambda ensemble: ensemble.precision)


def model() -> nn.Module:
    """Two layers, quick enough to be asked about images one by one."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 10))
    for weight in net.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * 0.3
    return net.eval()


class Counter:
    """Passes of a model and of its copies, and at which of them it stops."""

    def __init__(self, stop_at: float) -> None:
        self.passes = 0
        self.stop_at = stop_at

    def __deepcopy__(self, memo: object) -> Counter:
        return self

    def count(self) -> None:
        self.passes += 1
        if self.passes > self.stop_at:
            raise Stop


class Counted(nn.Module):
    """A model that counts its passes and stops at one of them.

    It looks at images one by one: an answer then has the same bits in every batch, also after a kill. In bfloat16 it
    has no gradients for dark images, so that a fast search misses what the others find.
    """

    def __init__(self, stop_at: float = float("inf")) -> None:
        super().__init__()
        self.inside = model()
        self.counter = Counter(stop_at)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.counter.count()
        return torch.cat([self._answer(image[None]) for image in x])

    def _answer(self, image: Tensor) -> Tensor:
        *_, last = self.inside.parameters()
        if last.dtype == torch.bfloat16 and image.mean() < 0.3:
            image = image.detach() + 0 * image
        answer: Tensor = self.inside(image)
        return answer


class Digits:
    """32 digits in batches of four, labelled as the model sees them, so that all are right at first."""

    name = "digits"
    num_images = 32

    def with_ids(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        data = DataConfig(val_num_samples=self.num_images, batch_size=BATCH)
        for x, _, ids in eval_loader(data, input_size=(3, 8, 8)).with_ids():
            with torch.no_grad():
                yield x, model()(x).argmax(1), ids


def digits() -> Any:
    return Digits()


def images_and_labels() -> tuple[Tensor, Tensor]:
    x, y, _ = (torch.cat(column) for column in zip(*digits().with_ids(), strict=True))
    return x, y


class Whole:
    """An undisturbed evaluation: its folder, how many passes of the model it took, and how many of them each stage."""

    def __init__(self, ensemble: AutoAttack, folder: Path) -> None:
        counted = Counted()
        made: list[int] = []
        handler = logging.Handler()
        handler.emit = lambda record: made.append(counted.counter.passes)  # type: ignore[method-assign]
        logger = logging.getLogger("vitruvius.evaluation._evaluate")
        before = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        evaluate(counted, digits(), [ensemble], folder=folder)
        logger.removeHandler(handler)
        logger.setLevel(before)
        self.folder = folder
        self.passes = counted.counter.passes
        self.longest_stage = max(later - earlier for earlier, later in zip([0, *made], made, strict=False))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[AutoAttack, Whole]:
    return {ensemble: Whole(ensemble, tmp_path_factory.mktemp("whole")) for ensemble in (ENSEMBLE, FAST, SMALL_POOLS)}


@pytest.mark.parametrize("ensemble", [ENSEMBLE, FAST, SMALL_POOLS], ids=["exact", "fast", "small pools"])
def test_killed_again_and_again_it_ends_with_the_same_rows(
    ensemble: AutoAttack, whole: dict[AutoAttack, Whole], tmp_path: Path
) -> None:
    undisturbed = whole[ensemble]
    stop_at = undisturbed.longest_stage + 40  # so that every run ends one stage at least
    kills = 0
    while kills < 30:
        try:
            evaluate(Counted(stop_at), digits(), [ensemble], folder=tmp_path)
            break
        except Stop:
            kills += 1
    assert 2 <= kills < 30
    assert_same_rows(tmp_path, undisturbed.folder)
    for folder in (STAGES, POINTS):
        assert not list((tmp_path / folder).glob("*"))


@by_precision
@pytest.mark.parametrize("share", [0.1, 0.6, 0.95])
def test_a_kill_loses_no_more_than_a_stage(
    ensemble: AutoAttack, share: float, whole: dict[AutoAttack, Whole], tmp_path: Path
) -> None:
    undisturbed = whole[ensemble]
    stopped, again = Counted(stop_at=share * undisturbed.passes), Counted()
    with pytest.raises(Stop):
        evaluate(stopped, digits(), [ensemble], folder=tmp_path)
    evaluate(again, digits(), [ensemble], folder=tmp_path)
    assert_same_rows(tmp_path, undisturbed.folder)
    lost = stopped.counter.passes + again.counter.passes - undisturbed.passes
    assert lost <= undisturbed.longest_stage + 40  # and a look at the model on the way back


def test_small_pools_bound_what_a_kill_loses(whole: dict[AutoAttack, Whole]) -> None:
    assert whole[SMALL_POOLS].longest_stage < 0.6 * whole[ENSEMBLE].longest_stage


@pytest.mark.parametrize("kind", [STAGES, POINTS])
def test_a_damaged_note_costs_time_and_no_row(kind: str, whole: dict[AutoAttack, Whole], tmp_path: Path) -> None:
    with pytest.raises(Stop):
        evaluate(Counted(0.8 * whole[ENSEMBLE].passes), digits(), [ENSEMBLE], folder=tmp_path)
    (note,) = (tmp_path / kind).iterdir()
    note.write_bytes(note.read_bytes()[:-20])
    evaluate(Counted(), digits(), [ENSEMBLE], folder=tmp_path)
    assert_same_rows(tmp_path, whole[ENSEMBLE].folder)


def test_rows_that_are_lost_are_searched_again(whole: dict[AutoAttack, Whole], tmp_path: Path) -> None:
    with pytest.raises(Stop):
        evaluate(Counted(0.8 * whole[ENSEMBLE].passes), digits(), [ENSEMBLE], folder=tmp_path)
    min((tmp_path / "parts").glob("autoattack*")).unlink()
    evaluate(Counted(), digits(), [ENSEMBLE], folder=tmp_path)
    assert_same_rows(tmp_path, whole[ENSEMBLE].folder)


def test_a_fast_search_has_something_to_resume_with(whole: dict[AutoAttack, Whole]) -> None:
    """The fast and the short search break images and leave others, so that the kills above meet every decision."""
    columns = rows(whole[FAST].folder)
    (threat,) = [name for name in columns if name != "clean"]
    robust = [int(column.sum()) for name, column in columns[threat].items() if name.startswith("standing after")]
    assert len(robust) == 1 + 3 * len(ATTACKS)
    assert robust == sorted(robust, reverse=True)
    assert 0 < robust[-1] < robust[len(ATTACKS)] < robust[1] < robust[0]


def test_what_an_interrupted_ensemble_has_broken_is_in_the_ledger_already(
    whole: dict[AutoAttack, Whole], tmp_path: Path
) -> None:
    with pytest.raises(Stop):
        evaluate(Counted(stop_at=0.6 * whole[ENSEMBLE].passes), digits(), [ENSEMBLE], folder=tmp_path)
    assert list((tmp_path / "parts").glob("autoattack*"))
    assert list((tmp_path / STAGES).glob("autoattack*"))


@pytest.mark.parametrize("batch_size", [3, BATCH, 64])
@pytest.mark.parametrize("ensemble", [ENSEMBLE, FAST, L1], ids=["exact", "fast", "l1"])
def test_no_more_is_left_than_was_said_at_any_step(ensemble: AutoAttack, batch_size: int) -> None:
    attacks: Any = [replace(a, batch_size=batch_size) if hasattr(a, "batch_size") else a for a in ensemble.attacks]
    x, y = images_and_labels()
    told: list[tuple[float, float]] = []
    replace(ensemble, attacks=tuple(attacks)).run(
        model(), x, y, batch_size=batch_size, progress=lambda done, total, text="": told.append((done, total or 0))
    )
    done = [made for made, _ in told]
    assert done == sorted(done)
    assert len(set(done)) > 15
    assert told[0] == (0, pytest.approx(len(x)))
    assert all(done[-1] <= total + 1e-6 for _, total in told)


def test_progress_names_stage_run_step_and_what_is_still_robust() -> None:
    x, y = images_and_labels()
    texts: list[str] = []
    outcome = ENSEMBLE.run(model(), x, y, batch_size=BATCH, progress=lambda done, total, text="": texts.append(text))
    assert texts[0] == "apgd (1 of 5), 32 of 32 still robust"
    pattern = r"apgdtargeted \(2 of 5\), \d+ of 32 still robust, run {} of 3, step \d+ of \d+{}"
    for run, broken in ((1, r", \d+ broken"), (2, "")):
        assert any(re.fullmatch(pattern.format(run, broken), text) for text in texts)
    assert any(re.match(r"pgd \(4 of 5\), .*, step 2 of 2", text) for text in texts)
    assert texts[-1].startswith("square (5 of 5), ")
    assert [stage.name for stage in outcome.stages] == ["clean", "apgd", "apgdtargeted", "fabtargeted", "pgd", "square"]


def test_accuracies_and_ends_of_stages_are_logged_while_the_evaluation_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corruptions = ["contrast:severity=1", "contrast:severity=4", "fog:severity=2"]
    with caplog.at_level("INFO", "vitruvius"):
        evaluate(model(), digits(), [ENSEMBLE, "fgsm:eps=2/255", *corruptions], folder=tmp_path)
    texts = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert texts[0].startswith("clean ")
    assert re.fullmatch(r"contrast at severities 1, 4: [\d.]+, [\d.]+ %", texts[1])
    assert re.fullmatch(r"fog\(severity=2\) [\d.]+ % \(\d+ of 32 images\)", texts[2])
    assert texts[3].startswith("fgsm(eps=2/255) ")  # the cheaper threat, though named last
    assert re.fullmatch(r"autoattack: apgd done \(1 of 5\), \d+ of 32 still robust", texts[4])
    assert texts[-1].startswith("autoattack(")


class Slow(nn.Module):
    """A model that takes its time, so that lines are written while a stage runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = model()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        torch.cat([self.inside(image[None]) for image in x.repeat(4, 1, 1, 1)])
        answer: Tensor = self.inside(x)
        return answer


APGD_T = replace(ENSEMBLE, attacks=(APGDTargeted(eps=1 / 255, steps=30, targets=3),))


@pytest.mark.parametrize(
    ("threat", "pattern"),
    [
        (APGD_T, r"autoattack.*, apgdtargeted \(1 of 1\), \d+ of 32 still robust, .*step \d+ of \d+.* at most .+ left"),
        ("pgd:eps=1/255,steps=30,restarts=2", r"pgd\(.+\), run \d of 2, step \d+ of 30, .+ per second, .+ left"),
    ],
    ids=["autoattack", "pgd"],
)
def test_lines_within_a_round_advance_with_rate_and_time_left(
    threat: Any, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_progress, "EVERY", 0.01)
    console = Console(file=io.StringIO(), force_terminal=False, width=160)
    with Bar("evaluating", console=console, at_most=isinstance(threat, Ensemble)) as bar:
        evaluate(Slow(), digits(), [threat], progress=bar)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = re.findall(rf"evaluating: \d+/\d+, round 2 of 2, {pattern}", text)
    assert len(set(lines)) > 3, text


COMMAND = (
    "evaluate vitruvius/vit_digits data.dataset=digits model.kwargs.depth=1 device=cpu "
    "--images 24 --threat autoattack:eps=0.5 --out"
)


def test_the_command_writes_stages_and_robust_images_to_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND.split(), str(tmp_path)]) == 0
    lines = capsys.readouterr().err.splitlines()
    stages = [line for line in lines if re.search(r"done \(\d of 4\), \d+ of \d+ still robust$", line)]
    assert [line.split()[1] for line in stages] == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert lines.index(stages[-1]) < len(lines) - 1, "the last line is the ensemble's accuracy"


TWO_PGD = AutoAttack(eps=16 / 255, version="custom", attacks=(PGD(eps=16 / 255, steps=2), PGD(eps=16 / 255, steps=4)))


def vit() -> nn.Module:
    return vitruvius.create_model("vitruvius/vit_digits", depth=1, init="skip")


def loader(batch_size: int) -> Any:
    return eval_loader(DataConfig(val_num_samples=30, batch_size=batch_size), input_size=(3, 8, 8))


def test_the_report_says_what_each_stage_left_robust() -> None:
    report = evaluate(vit(), loader(8), [TWO_PGD])
    score = report.threats[-1]
    shares = list(score.stages.values())
    assert list(score.stages) == ["clean", "pgd", "pgd 2"]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(score.accuracy)
    assert "after clean" in str(report)
    assert report.to_dict()["threats"][-1]["stages"] == score.stages


def test_the_batch_size_changes_nothing() -> None:
    one, other = (evaluate(vit(), loader(size), [TWO_PGD]) for size in (4, 30))
    mine, theirs = (report.ledger.rows(report.threats[-1].spec) for report in (one, other))
    for column in ("id", "correct", "prediction"):
        assert torch.equal(mine[column], theirs[column]), column


def test_stages_read_from_a_ledger_are_in_the_order_in_which_they_ran(tmp_path: Path) -> None:
    ensemble = AutoAttack(eps=1 / 255, version="custom", attacks=("square", "apgd-ce"))
    few = eval_loader(DataConfig(val_num_samples=3), input_size=(3, 8, 8))
    first, again = (evaluate(vit(), few, [ensemble], folder=tmp_path).threats[-1] for _ in range(2))
    assert list(first.stages) == list(again.stages) == ["clean", "square", "apgd-ce"]
    assert first.stages == again.stages


def test_small_batches_of_the_loader_do_not_slow_an_attack_that_has_no_batch_size() -> None:
    attacks = ({"use": "square", "queries": 60}, {"use": "apgd", "steps": 5})
    attack = AutoAttack(eps=1 / 255, version="custom", attacks=attacks)
    direct, through = Counted(), Counted()
    outcome = attack.run(direct, *images_and_labels())
    report = evaluate(through, digits(), [attack])
    assert report.threats[-1].correct == int(outcome.robust.sum())
    assert through.counter.passes <= direct.counter.passes + 90  # clean images and checks, in batches of four


class Brighter:
    """An ensemble of one's own, without any base class: it brightens what is dark enough."""

    batch_size = None
    pool_batches = 2
    sizes: list[tuple[int, int]] = []  # noqa: RUF012

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.run(model, x, y).x

    def run(self, model, x, y, *, ids=None, batch_size=None):  # type: ignore[no-untyped-def]
        Brighter.sizes.append((len(x), batch_size))
        moved = (x + 0.5).clamp(0, 1)
        broken = model(moved).argmax(1) != y
        stages = (StageResult("clean", "exact", len(x), 0, 0.0), StageResult("bright", "exact", len(x), 0, 0.0))
        return Outcome(moved, torch.where(broken, 1, -1), stages)


def test_an_ensemble_of_ones_own_is_recognised_and_given_pools_of_batches() -> None:
    Brighter.sizes.clear()
    score = evaluate(vit(), loader(8), [Brighter()]).threats[-1]  # type: ignore[list-item]
    assert Brighter.sizes == [(16, 8), (14, 8)]
    assert list(score.stages) == ["clean", "bright"]
    assert score.stages["bright"] == pytest.approx(score.accuracy)


class Leaping(Brighter):
    eps, norm = 0.1, LINF


def test_an_ensemble_of_ones_own_that_leaves_its_ball_is_refused() -> None:
    with pytest.raises(DataError, match=r"moved an image by 0\.5 in linf; eps is 0\.1"):
        evaluate(vit(), loader(8), [Leaping()])  # type: ignore[list-item]


def test_autoattack_is_an_ensemble_and_a_single_attack_is_not() -> None:
    assert isinstance(ENSEMBLE, Ensemble)
    assert not isinstance(ENSEMBLE, Attack)
    assert not isinstance(PGD(eps=0.1), Ensemble)
