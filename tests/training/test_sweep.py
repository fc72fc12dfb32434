"""Sweeps: the runs of a grid, resuming after a stop, failing runs, how they are judged, and the table."""

from __future__ import annotations

import csv
import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from small_run import RECIPE, SMALL, assert_same_run, small_run
from two_processes import in_two_processes
from vitruvius._errors import ConfigError, Preempted, VitruviusError
from vitruvius._yaml import dump_yaml
from vitruvius.cli import main
from vitruvius.evaluation import load_ledger
from vitruvius.models import load_model
from vitruvius.training import sweep as sweeping
from vitruvius.training.sweep import Sweep, best_of, in_processes, name_of

COMMON = [*SMALL, "train.epochs=1"]
Messages = Callable[[], list[str]]
GRID = {"train.lr": [1e-3, 1e-2], "seed": [0, 1]}
SCORES = [(0.4, 0.3), (0.5, 0.8), (0.1, 0.2)]
MASKED = [{"parts": [{"use": "mask", "file": "FILE"}]}]


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Messages:
    """What sweeps have said so far."""
    caplog.set_level(logging.INFO, logger="vitruvius.training")
    modules = ("vitruvius.training.sweep", "vitruvius.training.judging")
    return lambda: [record.getMessage() for record in caplog.records if record.name in modules]


def write(folder: Path, **settings: object) -> Path:
    file = folder / "sweep.yaml"
    file.write_text(dump_yaml({"recipe": str(RECIPE), "out": str(folder / "out"), **settings}))
    return file


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "out" / "summary.csv").open() as file:
        return list(csv.DictReader(file))


def notes(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "sweep.json").read_text())
    return found


# planning


def test_every_combination_and_every_set_of_the_list_is_a_run(tmp_path: Path) -> None:
    sweep = Sweep(write(tmp_path, grid=GRID, list=[{"train.opt": "sgd", "train.lr": 0.1}]), COMMON)
    assert [run.name for run in sweep.runs] == [
        "train.lr=0.001,seed=0",
        "train.lr=0.001,seed=1",
        "train.lr=0.01,seed=0",
        "train.lr=0.01,seed=1",
        "train.opt=sgd,train.lr=0.1",
    ]
    assert [run.config.train.lr for run in sweep.runs] == [1e-3, 1e-3, 1e-2, 1e-2, 0.1]
    assert [run.config.seed for run in sweep.runs] == [0, 1, 0, 1, 0]
    assert {run.config.train.epochs for run in sweep.runs} == {1}
    assert sweep.runs[0].config.out == str(tmp_path / "out" / "train.lr=0.001,seed=0")


def test_a_run_may_have_a_name_and_a_recipe_of_its_own(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(RECIPE.read_text().replace("seed: 0", "seed: 7"))
    sweep = Sweep(write(tmp_path, list=[{"name": "a", "train.lr": 0.1}, {"name": "b", "recipe": str(other)}]), COMMON)
    assert [(run.name, run.config.seed) for run in sweep.runs] == [("a", 0), ("b", 7)]


def test_what_the_sweep_file_says_can_be_overridden_too(tmp_path: Path) -> None:
    file = write(tmp_path, grid=GRID, evaluate=[{"threats": ["pgd:eps=8/255"], "images": 500}])
    own = ["evaluate.0.images=8", "evaluate.0.threats=[]", "metric=train_loss", "order=min", "out=elsewhere"]
    sweep = Sweep(file, [*COMMON, *own])
    assert [(plan.images, plan.threats) for plan in sweep.settings.evaluate] == [(8, ())]
    assert (sweep.settings.metric, sweep.settings.order) == ("train_loss", "min")
    assert sweep.runs[0].config.out == str(Path("elsewhere") / "train.lr=0.001,seed=0")


def test_names_are_short_safe_and_different() -> None:
    assert name_of({"data.aa": "rand-m9-mstd0.5-inc1"}) == "data.aa=rand-m9-mstd0.5-inc1"
    odd = [name_of({"task": {"use": "trades", "beta": beta}, "x": "/a b"}) for beta in (6, 12)]
    assert len(set(odd)) == 2
    assert all("/" not in name and " " not in name for name in odd)
    assert len(name_of({"key": "x" * 500})) < 120


@pytest.mark.parametrize(
    ("settings", "overrides", "message"),
    [
        ({}, [], "neither grid nor list"),
        ({"grid": {f"model.kwargs.k{n}": list(range(100)) for n in range(4)}}, [], "the grid has 100,000,000 runs"),
        ({"grid": {"train.lr": 0.1}}, [], r"grid\.train\.lr"),
        ({"grid": {"seed": [0, 0]}}, [], "twice the same run: seed=0"),
        ({"grid": {"seed": [0]}}, ["seed=3"], "the sweep varies seed"),
        ({"grid": {"out": ["a"]}}, [], "the sweep varies out"),
        ({"gird": {}}, [], "gird"),
        ({"grid": {"train.lrr": [1]}}, [], "train.lrr"),
        ({"grid": GRID, "evaluate": [{"threats": []}]}, ["evaluate.0.image=8"], "image"),
        ({"grid": {"seed": [0]}, "evaluate": [{"threats": [], "runs": ["b*"]}]}, [], r"evaluate\.runs: 'b\*'"),
        ({"grid": {"seed": [0]}, "masks": [{"file": "m.safetensors"}]}, [], "maps and masks belong together"),
        (
            {"grid": {"seed": [0]}, "masks": [{"file": "m", "rule": "informaton"}], "maps": {"of": "a", "file": "b"}},
            [],
            "did you mean 'information'",
        ),
    ],
)
def test_mistakes_are_found_before_the_first_run(
    tmp_path: Path, settings: dict[str, Any], overrides: list[str], message: str
) -> None:
    with pytest.raises(VitruviusError, match=message):
        Sweep(write(tmp_path, **settings), [*COMMON, *overrides])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"threats": ["pdg:eps=0.1"]}, "did you mean 'pgd'"),
        ({"threats": [], "sanity": "hard"}, "sanity|number"),
        ({"threats": [], "speed": -1}, r"evaluate\.0\.speed = -1"),
    ],
)
def test_a_plan_that_would_fail_is_refused_before_a_run_is_trained(tmp_path: Path, plan: Any, message: str) -> None:
    with pytest.raises(VitruviusError, match=message):
        Sweep(write(tmp_path, grid={"seed": [0]}, evaluate=[plan]), COMMON).train()
    assert not (tmp_path / "out").exists()


# dry runs


def dry_run(file: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit code and what was said."""
    code = main(["sweep", str(file), "--dry-run", *COMMON, *words])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_dry_run_finds_what_would_fail_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = [
        {"train.opt": "addam"},
        {"model.name": "vitruvius/nothing"},
        {"data.dataset": "folder", "data.root": str(tmp_path / "missing")},
        {"attention": [{"parts": ["rcp"]}]},
        {"tracking": ["cvs"]},
        {"init": "impulse_optimised:steps=0"},
    ]
    file = write(tmp_path, list=[{"seed": 1}, *faults])
    code, said = dry_run(file, capsys)
    assert code == 1
    assert said.endswith("vitruvius: 6 of 7 runs would fail.\n")
    assert said.count("would fail: ") == 6
    assert "did you mean 'rpc'?" in said
    assert said.splitlines()[0].endswith(f"7 runs in {tmp_path / 'out'}")
    assert said.splitlines()[1].split() == ["seed=1", "waiting"]
    assert dry_run(file, capsys, "--only", "seed=1")[0] == 0
    assert "1 of 1 runs would fail" in dry_run(file, capsys, "--only", "train.opt*")[1]
    assert not (tmp_path / "out").exists()


def test_a_dry_run_waits_neither_for_an_init_that_is_optimised_nor_for_a_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_made: list[int] = []

    def optimise(inputs: Any, targets: Any, q: Any, k: Any, *, steps: int, **settings: Any) -> Any:
        steps_made.append(steps)
        return q, k, [0.0]

    monkeypatch.setattr(sys.modules["vitruvius.init.impulse_optimised"], "optimise", optimise)
    monkeypatch.setattr("vitruvius.training.session.calibrate_low_rank", lambda *_, **__: 1 / 0)
    parts = [{"parts": [{"use": "low_rank", "rank": 2, "start": "calibrated"}]}]
    runs = [{"name": "a", "init": "impulse_optimised:kernel=3"}, {"name": "b", "attention": parts}]
    assert dry_run(write(tmp_path, list=runs), capsys)[0] == 0
    assert set(steps_made) == {1}


def test_masks_of_a_run_that_is_not_there_are_found_by_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = str(tmp_path / "masks.safetensors")
    settings: dict[str, Any] = {
        "list": [{"name": "masked", "attention": json.loads(json.dumps(MASKED).replace("FILE", made))}],
        "maps": {"of": "runs/nowhere", "file": "maps.safetensors"},
        "masks": [{"file": made, "sparsity": 0.5}],
    }
    code, said = dry_run(write(tmp_path, **settings), capsys)
    assert code == 1
    assert "would fail: the masks of this sweep are made of the run runs/nowhere, which is not there" in said
    settings["maps"]["of"] = str(small_run(tmp_path / "dense", "train.epochs=1"))
    assert dry_run(write(tmp_path, **settings), capsys)[0] == 0
    assert not Path(made).exists()


# training


def test_a_sweep_trains_and_sorts_and_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, grid={"train.lr": [1e-5, 1e-2]})
    text = Sweep(file, COMMON).train()
    rows = table(tmp_path)
    scores = [float(row["accuracy"]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert {(row["train.lr"], row["status"]) for row in rows} == {("1e-05", "finished"), ("0.01", "finished")}
    for row in rows:
        metrics = tmp_path / "out" / f"train.lr={row['train.lr']}" / "metrics.jsonl"
        (epoch,) = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert float(row["accuracy"]) == pytest.approx(epoch["val_accuracy"], abs=1e-4)
        assert float(row["train_loss"]) == pytest.approx(epoch["train_loss"], abs=1e-4)
    assert (tmp_path / "out" / "summary.md").read_text() == text + "\n"
    monkeypatch.setattr(sweeping, "train", lambda *_, **__: pytest.fail("trained again"))
    assert Sweep(file, COMMON).train() == text
    by_loss = Sweep(file, [*COMMON, "metric=train_loss", "order=min"])
    assert by_loss.train().splitlines()[0].split(" | ")[1].strip() == "train_loss"
    losses = [float(row["train_loss"]) for row in table(tmp_path)]
    assert losses == sorted(losses)
    changed = Sweep(file, [*COMMON, "train.weight_decay=0.3"])  # another recipe is not taken for finished
    assert [line.split()[-1] for line in changed.listing().splitlines()[1:]] == ["unfinished"] * 2


def test_a_sweep_that_was_stopped_resumes_the_run_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, real = write(tmp_path, grid={"seed": [0, 1]}), sweeping.train
    overrides = [*SMALL, "train.epochs=2"]

    class Once:
        def epoch_end(self, epoch: int, model: object) -> None:
            raise Preempted("stopped")

    def stopped(config: Any, **settings: Any) -> Path:
        return real(config, callbacks=[Once()] if config.seed == 1 else [], **settings)

    monkeypatch.setattr(sweeping, "train", stopped)
    with pytest.raises(Preempted):
        Sweep(file, overrides).train()
    statuses = [line.split()[-1] for line in Sweep(file, overrides).listing().splitlines()[1:]]
    assert statuses == ["finished", "unfinished"]
    monkeypatch.setattr(sweeping, "train", real)
    Sweep(file, overrides).train()
    assert_same_run(tmp_path / "out" / "seed=1", small_run(tmp_path / "unbroken", "seed=1", "train.epochs=2"))


def test_a_run_that_fails_is_reported_and_the_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = sweeping.train

    def broken(config: Any, **settings: Any) -> Path:
        return real(config, **settings) if config.seed == 0 else 1 / 0  # type: ignore[return-value]

    monkeypatch.setattr(sweeping, "train", broken)
    runs = [{"name": "a", "train.opt": "addam"}, {"name": "b"}, {"name": "b_again", "seed": 1}]
    file = write(tmp_path, list=runs)
    assert main(["sweep", str(file), *COMMON, "--only", "b*"]) == 1
    assert {row["name"]: row["status"] for row in table(tmp_path)} == {
        "a": "waiting",
        "b": "finished",
        "b_again": "failed: ZeroDivisionError: division by zero",
    }
    assert main(["sweep", str(file), *COMMON]) == 1
    said = capsys.readouterr().err
    assert "[1/3] a" in said
    assert said.endswith("vitruvius: 2 of 3 runs failed: a, b_again.\n")
    assert "failed: train.opt = 'addam' cannot be made" in said
    assert main(["sweep", str(file), *COMMON, "--only", "c"]) == 1
    assert "--only 'c'" in capsys.readouterr().err


def _sweep(rank: int, file: str) -> None:
    Sweep(file, COMMON).train()


def test_two_processes_share_every_run(tmp_path: Path) -> None:
    file = write(tmp_path, grid={"seed": [0, 1]}, list=[{"train.opt": "addam"}])
    in_two_processes(_sweep, str(file))
    assert [row["status"].split(":")[0] for row in table(tmp_path)] == ["finished", "finished", "failed"]


def test_no_run_is_started_that_would_not_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    file = write(tmp_path, grid={"seed": [0, 1]})
    with pytest.raises(ConfigError, match="--minutes"):
        Sweep(file, COMMON).train(minutes=0.0)
    assert not (tmp_path / "out").exists()
    now = iter(range(0, 100_000, 40))
    monkeypatch.setattr(sweeping.time, "monotonic", lambda: float(next(now)))
    Sweep(file, COMMON).train(minutes=2.5)  # the first run takes 40 s by this clock, 150 are given
    assert [row["status"] for row in table(tmp_path)] == ["finished", "waiting"]
    assert "seed=1: no time left, not started" in messages()[-1]
    (seconds,) = (note["seconds"] for note in notes(tmp_path).values())
    monkeypatch.setattr(sweeping.time, "monotonic", lambda: 0.0)
    assert [Sweep(file, COMMON)._has_time(seconds + more) for more in (-1, 1)] == [False, True]


def test_the_best_epoch_is_the_one_with_the_most_or_the_least() -> None:
    rows = [{"epoch": n, "val_accuracy": score, "ema_accuracy": ema} for n, (score, ema) in enumerate(SCORES)]
    assert best_of(rows, "accuracy", "max") == (0.8, 1)
    assert best_of(rows, "accuracy", "min") == (0.1, 2)
    assert best_of(rows, "ema_accuracy", "max") == (0.8, 1)
    assert best_of(rows, "val_loss", "min") is None


def test_runs_side_by_side_are_those_of_one_after_the_other(tmp_path: Path) -> None:
    file = write(tmp_path, list=[{"name": "good", "seed": 0}, {"name": "bad", "model.weights": "nowhere.safetensors"}])
    Sweep(file, COMMON).train(jobs=2)
    assert notes(tmp_path)["good"]["status"] == "finished"
    assert notes(tmp_path)["bad"]["status"].startswith("failed: ")
    assert "nowhere.safetensors" in notes(tmp_path)["bad"]["status"]
    alone = small_run(tmp_path / "alone", "train.epochs=1", "seed=0")
    (alone / "config.yaml").write_text((tmp_path / "out" / "good" / "config.yaml").read_text())
    assert_same_run(alone, tmp_path / "out" / "good")


def test_a_sweep_shows_what_its_runs_are_doing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "LOOK_EVERY", 0.1)
    program = "import sys, time; print(sys.argv[1], '3/10', flush=True); time.sleep(1); sys.exit(sys.argv[1] == 'b')"
    seen: list[str] = []
    ended = in_processes([sys.executable, "-c", program], iter("ab"), 2, tmp_path / "logs", seen.append)
    assert sorted((name, outcome) for name, outcome, _ in ended) == [("a", "finished"), ("b", "failed: b 3/10")]
    assert any("a: a 3/10" in text for text in seen)


def test_a_run_in_another_process_says_why_it_failed_whatever_is_printed_behind(tmp_path: Path) -> None:
    program = "import sys; print('vitruvius: failed: no weights'); print('leaked 4 instances'); sys.exit(1)"
    (ended,) = in_processes([sys.executable, "-c", program], iter("a"), 1, tmp_path / "logs", print)
    assert ended[1] == "failed: no weights"


# judging


def test_a_plan_may_be_for_some_runs_and_may_look_for_masked_gradients_and_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [
        {"threats": ["pgd:eps=8/255,steps=1"], "images": 6, "sanity": "4/255", "runs": ["a*"], "out": "checked"},
        {"threats": [], "images": 6, "speed": 2},
    ]
    file = write(tmp_path, list=[{"name": "apple", "seed": 3}, {"name": "berry", "seed": 4}], evaluate=plans)
    Sweep(file, COMMON).train()
    apple, berry = tmp_path / "out" / "apple", tmp_path / "out" / "berry"
    findings = json.loads((apple / "checked" / "sanity.json").read_text())
    assert "worst case" in [finding["name"] for finding in findings]
    assert "pgd" in (apple / "checked" / "report.json").read_text()
    assert not (berry / "checked").exists()
    rows = {row["name"]: row for row in table(tmp_path)}
    report = json.loads((berry / "evaluation" / "report.json").read_text())["threats"]
    assert float(rows["berry"]["evaluation clean"]) == pytest.approx(report[0]["accuracy"], abs=1e-4)
    assert rows["apple"]["checked pgd"] != ""
    assert rows["berry"]["checked pgd"] == ""
    for run in (apple, berry):
        speeds = json.loads((run / "evaluation" / "speed.json").read_text())
        assert [speed["precision"] for speed in speeds] == ["float32", "bfloat16"]
        for speed in speeds:
            assert speed["images_per_second"] == pytest.approx(2 / (speed["milliseconds"] / 1000))
    seconds = json.loads((tmp_path / "out" / "seconds" / "apple.json").read_text())
    assert set(seconds) == {"train", "judge"}
    shutil.rmtree(tmp_path / "out" / "notes")
    (tmp_path / "out" / "sweep.json").unlink()  # as after a kill between the checks and the note: none is made twice
    monkeypatch.setattr("vitruvius.training.judging.examine", lambda *_, **__: pytest.fail("made again"))
    Sweep(file, COMMON).train()
    assert notes(tmp_path)["apple"]["status"] == "finished"
    again = json.loads((tmp_path / "out" / "seconds" / "apple.json").read_text())
    assert again["train"] >= seconds["train"]


def test_the_printed_table_has_the_mean_over_corruptions_and_the_csv_each_of_them(tmp_path: Path) -> None:
    plan = {"threats": ["fgsm:eps=8/255", "corruptions"], "images": 24}
    text = Sweep(write(tmp_path, list=[{"name": "a", "seed": 3}], evaluate=[plan]), COMMON).train()
    heads, _, line = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines())
    assert heads[-5:-2] == ["clean", "fgsm", "corruptions"]
    assert (tmp_path / "out" / "summary.md").read_text() == text + "\n"
    (row,) = table(tmp_path)
    report = json.loads((tmp_path / "out" / "a" / "evaluation" / "report.json").read_text())["threats"]
    assert [name for name in row if name in {score["name"] for score in report}] == [s["name"] for s in report]
    corrupted = [float(row[score["name"]]) for score in report if score["severity"] is not None]
    assert len(corrupted) == 75
    assert min(corrupted) < max(corrupted)
    assert float(line[heads.index("corruptions")]) == pytest.approx(sum(corrupted) / 75, abs=1e-4)
    assert line[-5:-3] == [row["clean"], row["fgsm"]]


def test_masks_are_made_of_another_run_and_judged_before_and_after_training(tmp_path: Path, messages: Messages) -> None:
    dense = small_run(tmp_path / "dense", "train.epochs=1")
    masks = {name: str(tmp_path / "masks" / f"{name}.safetensors") for name in ("information", "random")}
    runs = [
        {"name": name, "model.weights": str(dense), "attention": json.loads(json.dumps(MASKED).replace("FILE", file))}
        for name, file in masks.items()
    ]
    file = write(
        tmp_path,
        list=runs,
        maps={"of": str(dense), "file": str(tmp_path / "masks" / "maps.safetensors"), "images": 8},
        masks=[{"file": made, "rule": rule, "sparsity": 0.5} for rule, made in masks.items()],
        evaluate=[{"threats": [], "images": 12, "start": True}, {"threats": [], "images": 12, "cycles": True}],
    )
    overrides = [*COMMON, "train.lr=0.1"]
    Sweep(file, overrides).train()
    made = [line for line in messages() if line.startswith(("maps", "masks"))]
    assert made == [f"maps of {dense}", *(f"masks {file}" for file in masks.values())]
    weights = {}
    for name in masks:
        run = tmp_path / "out" / name
        assert json.loads((run / "cycles.json").read_text())["rows"]
        for folder in (run, run / "start"):
            rows = load_ledger(folder / "evaluation")["clean"]
            answers = json.loads((folder / "evaluation" / "report.json").read_text())["threats"][0]
            assert int(rows["correct"].sum()) == answers["correct"]
            weights[name, folder.name] = load_model(folder).state_dict()
        key = "model.blocks.0.attn.qkv.weight"
        assert torch.equal(weights[name, "start"][key], load_model(dense).state_dict()[key])
        assert not torch.equal(weights[name, "start"][key], weights[name, name][key])
    keeps = [key for key in weights["random", "start"] if "mask" in key]
    assert any(not torch.equal(weights["random", "start"][k], weights["information", "start"][k]) for k in keeps)
    before = len(messages())
    Sweep(file, overrides).train()
    assert len(messages()) == before


def test_masks_that_cannot_be_made_fail_only_the_runs_that_need_them(tmp_path: Path, messages: Messages) -> None:
    dense = small_run(tmp_path / "dense", "train.epochs=1")
    made = str(tmp_path / "masks" / "tiles.safetensors")
    rules = json.loads(json.dumps(MASKED).replace("FILE", made))
    file = write(
        tmp_path,
        list=[{"name": "masked", "attention": rules}, {"name": "dense"}],
        maps={"of": str(dense), "file": str(tmp_path / "masks" / "maps.safetensors"), "images": 8},
        masks=[{"file": made, "sparsity": 0.95, "budget": "head", "tiles": 8}],
    )
    Sweep(file, COMMON).train()
    assert any("failed: sparsity 0.95 cannot be reached" in line for line in messages())
    statuses = {row["name"]: row["status"] for row in table(tmp_path)}
    assert statuses["dense"] == "finished"
    assert statuses["masked"].startswith("failed: ")


def test_a_start_is_that_of_the_very_training(tmp_path: Path) -> None:
    plan = {"threats": [], "images": 6, "start": True}
    Sweep(write(tmp_path, list=[{"name": "a", "seed": 3}], evaluate=[plan]), COMMON).train()
    expected = small_run(tmp_path / "alone", "train.epochs=1", "seed=3")
    alone, judged = load_model(expected).state_dict(), load_model(tmp_path / "out" / "a").state_dict()
    assert all(torch.equal(alone[key], judged[key]) for key in alone)
