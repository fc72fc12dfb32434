"""An ensemble speaks and keeps what its stages decide: events, and kills that lose no more than a batch of a stage."""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import rows
from rich.console import Console
from torch import Tensor, nn

from vitruvius import _bar
from vitruvius._bar import Bar
from vitruvius.attacks import StageEvent
from vitruvius.attacks._search import watch
from vitruvius.attacks.apgd import APGD
from vitruvius.attacks.apgd_targeted import APGDTargeted
from vitruvius.attacks.autoattack import AutoAttack
from vitruvius.attacks.fab_targeted import FABTargeted
from vitruvius.attacks.pgd import PGD
from vitruvius.attacks.square import Square
from vitruvius.cli import main
from vitruvius.data import DataConfig, eval_loader
from vitruvius.evaluation import evaluate
from vitruvius.evaluation.ledger import NOTES, POINTS

EPS = 4 / 255
BATCH = 4
STAGES = (
    APGD(eps=EPS, steps=5, batch_size=BATCH),
    APGDTargeted(eps=EPS, steps=5, targets=3, batch_size=BATCH),
    FABTargeted(eps=EPS, steps=4, targets=2, batch_size=BATCH),
    PGD(eps=EPS, steps=2),
    Square(eps=EPS, queries=20, batch_size=BATCH),
)
ENSEMBLE = AutoAttack(eps=EPS, version="custom", attacks=STAGES)
FAST = replace(ENSEMBLE, precision="fast")


def model() -> nn.Module:
    """Two layers, quick enough to be asked about images one by one."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 10))
    for weight in net.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * 0.3
    return net.eval()


class Stop(Exception):
    """The plug is pulled."""


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

    @property
    def passes(self) -> int:
        return self.counter.passes

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
    """32 digits in batches of four, one pool; labelled as the model sees them, so that all are right at first."""

    name = "digits"
    num_images = 32

    def with_ids(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        data = DataConfig(val_num_samples=self.num_images, batch_size=BATCH)
        for x, _, ids in eval_loader(data, input_size=(3, 8, 8)).with_ids():
            with torch.no_grad():
                yield x, model()(x).argmax(1), ids


def digits() -> Any:
    return Digits()


def assert_same(one: Path, other: Path) -> None:
    """Bit for bit, all but the seconds."""
    ours, theirs = rows(one), rows(other)
    assert ours.keys() == theirs.keys()
    for threat in ours:
        assert list(ours[threat]) == list(theirs[threat])
        for name, column in ours[threat].items():
            assert torch.equal(column, theirs[threat][name]), name


Whole = dict[str, tuple[Path, int]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """By precision: an undisturbed evaluation, and how many passes of the model it took."""
    found = {}
    for ensemble in (ENSEMBLE, FAST):
        folder = tmp_path_factory.mktemp(ensemble.precision)
        counted = Counted()
        evaluate(counted, digits(), [ensemble], folder=folder)
        found[ensemble.precision] = (folder, counted.passes)
    return found


@pytest.mark.parametrize("ensemble", [ENSEMBLE, FAST], ids=lambda ensemble: ensemble.precision)
def test_killed_ten_times_within_one_pool_it_ends_with_the_same_rows(
    ensemble: AutoAttack, whole: Whole, tmp_path: Path
) -> None:
    undisturbed, passes = whole[ensemble.precision]
    kills = 0
    while kills < 30:  # each run is killed after a tenth of the work, some of which is the way back to where it was
        try:
            evaluate(Counted(stop_at=passes // 10), digits(), [ensemble], folder=tmp_path)
            break
        except Stop:
            kills += 1
    assert 10 <= kills < 30
    assert_same(tmp_path, undisturbed)
    assert not list((tmp_path / NOTES).glob("*"))
    assert not list((tmp_path / POINTS).glob("*"))


def test_a_fast_search_has_something_to_go_on_with(whole: Whole) -> None:
    """The fast and the short search break images and leave others, so that the kills above meet every decision."""
    columns = rows(whole["fast"][0])
    (threat,) = [name for name in columns if name != "clean"]
    robust = [int(column.sum()) for name, column in columns[threat].items() if name.startswith("standing after")]
    assert len(robust) == 1 + 3 * len(STAGES)
    assert robust == sorted(robust, reverse=True)
    assert 0 < robust[-1] < robust[len(STAGES)] < robust[1] < robust[0]


@pytest.mark.parametrize("share", [0.15, 0.55, 0.95])
@pytest.mark.parametrize("ensemble", [ENSEMBLE, FAST], ids=lambda ensemble: ensemble.precision)
def test_a_kill_loses_no_more_than_a_batch_of_a_stage(
    ensemble: AutoAttack, share: float, whole: Whole, tmp_path: Path
) -> None:
    undisturbed, passes = whole[ensemble.precision]
    stopped = Counted(stop_at=share * passes)
    with pytest.raises(Stop):
        evaluate(stopped, digits(), [ensemble], folder=tmp_path)
    again = Counted()
    evaluate(again, digits(), [ensemble], folder=tmp_path)
    assert_same(tmp_path, undisturbed)
    # the start of the longest search and its three blocks of 20 queries, and a look at every batch on the way back
    one_batch = 61 + BATCH * 2
    assert stopped.passes + again.passes - passes <= one_batch


def test_what_an_interrupted_ensemble_has_broken_is_in_the_ledger_already(whole: Whole, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        evaluate(Counted(stop_at=0.6 * whole["exact"][1]), digits(), [ENSEMBLE], folder=tmp_path)
    assert list((tmp_path / "parts").glob("autoattack*"))
    assert list((tmp_path / NOTES).glob("autoattack*"))


def test_events_name_stage_attempt_and_what_is_still_robust() -> None:
    x, y, _ = (torch.cat(column) for column in zip(*digits().with_ids(), strict=True))
    events: list[StageEvent] = []
    outcome = ENSEMBLE.run(model(), x, y, batch_size=BATCH, on_event=events.append)
    ended = [event for event in events if event.finished]
    assert [event.stage for event in ended] == ["apgd", "apgdtargeted", "fabtargeted", "pgd", "square"]
    assert [(event.number, event.stages) for event in ended] == [(number, 5) for number in range(1, 6)]
    robust = [event.robust for event in ended]
    assert robust == sorted(robust, reverse=True)
    assert robust[-1] == int(outcome.robust.sum())
    inside = [event for event in events if event.stage == "apgdtargeted" and event.searched and not event.finished]
    assert {event.attempts for event in inside} == {3}
    assert {event.attempt for event in inside} >= {1, 2}
    assert all(event.images == len(x) for event in events)


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


@pytest.mark.parametrize("batch_size", [3, BATCH, 64])
@pytest.mark.parametrize("ensemble", [ENSEMBLE, FAST, L1], ids=["exact", "fast", "l1"])
def test_no_more_is_left_than_was_said_at_any_step(
    ensemble: AutoAttack, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PAUSE", 0.0)
    stages = tuple(
        replace(stage, batch_size=batch_size) if stage.batches_itself else stage for stage in ensemble.attacks
    )
    x, y, _ = (torch.cat(column) for column in zip(*digits().with_ids(), strict=True))
    events: list[StageEvent] = []
    replace(ensemble, attacks=stages).run(model(), x, y, batch_size=batch_size, on_event=events.append)
    spent = [event.spent for event in events]
    assert spent == sorted(spent)
    assert len(set(spent)) > 15
    assert events[-1].left == 0 or ensemble is FAST  # whose last stage may have nothing to do
    for event in events:
        assert event.left is not None
        assert spent[-1] - event.spent <= event.left
        assert event.number <= event.stages


def test_every_step_of_a_stage_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PAUSE", 0.0)
    x, y, _ = (torch.cat(column) for column in zip(*digits().with_ids(), strict=True))
    events: list[StageEvent] = []
    ENSEMBLE.run(model(), x, y, batch_size=len(x), on_event=events.append)
    for stage in ("apgdtargeted", "pgd", "square"):
        steps = [event.step for event in events if event.stage == stage and event.attempt == 1]
        assert {1} < set(steps) or stage == "square", stage
        assert all(event.step <= event.steps for event in events)


def test_news_come_while_the_evaluation_runs(tmp_path: Path) -> None:
    news: list[tuple[str, bool]] = []
    threats = [ENSEMBLE, "fgsm:eps=2/255"]
    evaluate(
        model(),
        digits(),
        threats,
        folder=tmp_path,
        on_news=lambda text: news.append((text, (tmp_path / "report.json").exists())),
    )
    assert not any(finished for _, finished in news)
    texts = [text for text, _ in news]
    assert texts[0].startswith("clean ")
    assert texts[1].startswith("fgsm(eps=2/255) ")  # the cheaper threat, though named last
    assert "autoattack: apgd done (1 of 5), " in texts[2]
    assert texts[2].endswith("of 32 still robust")
    assert texts[-1].startswith("autoattack(")


def test_a_corruption_is_one_line_of_news_for_all_its_severities() -> None:
    news: list[str] = []
    evaluate(model(), digits(), ["contrast:severity=1", "contrast:severity=4", "fog:severity=2"], on_news=news.append)
    assert re.fullmatch(r"contrast at severities 1, 4: [\d.]+, [\d.]+ %", news[1])
    assert re.fullmatch(r"fog\(severity=2\) [\d.]+ % \(\d+ of 32 images\)", news[2])


class Terminal:
    """A console on a pseudo-terminal, and all that it has shown."""

    def __init__(self) -> None:
        self.reading, writing = os.openpty()
        self.file = open(writing, "w", encoding="utf-8")  # noqa: PTH123, SIM115 (a descriptor)
        self.console = Console(file=self.file, width=160)
        self.shown = b""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def close(self) -> str:
        self.file.close()
        self.reader.join(5)
        os.close(self.reading)
        return self.shown.decode()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # Linux says so where the other end has closed
            while more := os.read(self.reading, 65536):
                self.shown += more


def test_a_terminal_shows_the_stage_live() -> None:
    terminal = Terminal()
    assert terminal.console.is_terminal
    with Bar("evaluating", console=terminal.console) as bar:

        def progress(done: int, total: int | None, /, words: str = "") -> None:
            bar(done, total, words)
            if "apgdtargeted" in words:
                bar.bars.refresh()

        evaluate(model(), digits(), [ENSEMBLE], progress=progress, on_news=bar.line)
    shown = terminal.close()
    assert "evaluating" in shown
    assert "autoattack: apgdtargeted (2 of 5), run 1 of 3, " in shown
    assert "still robust" in shown
    assert "\x1b[" in shown  # drawn again and again in place


def test_without_a_terminal_plain_lines_say_the_same() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=160)
    with Bar("evaluating", console=console) as bar:
        evaluate(model(), digits(), [ENSEMBLE], progress=bar, on_news=bar.line)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].startswith("clean ")
    assert [line.partition(" done")[0] for line in lines[1:6]] == [
        f"autoattack: {stage}" for stage in ("apgd", "apgdtargeted", "fabtargeted", "pgd", "square")
    ]
    assert not any("\x1b" in line for line in lines)


class Slow(nn.Module):
    """A model that takes its time, so that lines are written while a stage runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = model()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.004)
        answer: Tensor = self.inside(x)
        return answer


def test_lines_within_a_stage_advance_with_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bar, "EVERY", 0.05)
    monkeypatch.setattr(watch, "PAUSE", 0.0)
    console = Console(file=io.StringIO(), force_terminal=False, width=160)
    ensemble = replace(ENSEMBLE, attacks=(APGDTargeted(eps=1 / 255, steps=30, targets=3),))
    with Bar("evaluating", console=console) as bar:
        evaluate(Slow(), digits(), [ensemble], progress=bar, on_news=bar.line)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = re.findall(
        r"evaluating: \d+/32, round 2 of 2, autoattack: apgdtargeted \(1 of 1\), (.+), step (\d+) of 31, "
        r"\d+ of 32 still robust, [\d.,]+ steps/s, at most \d+ s left",
        text,
    )
    assert len(set(lines)) > 3, text


def test_lines_within_one_batch_of_a_plain_attack_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bar, "EVERY", 0.05)
    monkeypatch.setattr(watch, "PAUSE", 0.0)
    console = Console(file=io.StringIO(), force_terminal=False, width=160)
    with Bar("evaluating", console=console) as bar:
        evaluate(Slow(), digits(), ["pgd:eps=1/255,steps=30,restarts=2"], progress=bar)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = re.findall(r"/32, round 2 of 2, pgd\(.+\), run (\d) of 2, step (\d+) of 30, .+ images/s, .+ left", text)
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
    stages = [line for line in lines if "still robust" in line]
    assert [line.split()[1] for line in stages] == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert all(re.search(r"done \(\d of 4\), \d+ of \d+ still robust$", line) for line in stages)
    assert lines.index(stages[-1]) < len(lines) - 1, "the last line is the ensemble's accuracy"


def test_the_command_draws_a_live_display_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal.file)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("vitruvius._progress.CONSOLE.is_interactive", True)
    assert main([*COMMAND.split(), str(tmp_path)]) == 0
    monkeypatch.undo()
    shown = terminal.close()
    assert "\x1b[" in shown
    assert "evaluating" in shown
    assert "autoattack: apgd-ce done (1 of 4)" in shown
