"""Sweeps: the runs of a grid, going on after a stop, failing runs, and the table."""

from __future__ import annotations

import csv
import json
import re
import sys
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
from vitruvius.training import sweep as room
from vitruvius.training._sweep import side_by_side
from vitruvius.training._sweep.side_by_side import SideBySide
from vitruvius.training.sweep import Sweep, name_of

COMMON = [*SMALL, "train.epochs=1"]
GRID = {"train.lr": [1e-3, 1e-2], "seed": [0, 1]}


def write(folder: Path, **settings: object) -> Path:
    file = folder / "sweep.yaml"
    file.write_text(dump_yaml({"recipe": str(RECIPE), "out": str(folder / "out"), **settings}))
    return file


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "out" / "summary.csv").open() as file:
        return list(csv.DictReader(file))


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
    assert sweep.runs[-1].config.train.opt == "sgd"
    assert {run.config.train.epochs for run in sweep.runs} == {1}
    assert sweep.runs[0].config.out == str(tmp_path / "out" / "train.lr=0.001,seed=0")


def test_a_sweep_trains_and_sorts_and_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, grid={"train.lr": [1e-5, 1e-2]})
    text = Sweep(file, COMMON).train()
    rows = table(tmp_path)
    scores = [float(row["accuracy"]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert {row["train.lr"] for row in rows} == {"1e-05", "0.01"}
    assert {row["status"] for row in rows} == {"finished"}
    for row in rows:
        metrics = tmp_path / "out" / f"train.lr={row['train.lr']}" / "metrics.jsonl"
        (epoch,) = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert float(row["accuracy"]) == pytest.approx(epoch["val_accuracy"], abs=1e-4)
        assert float(row["train_loss"]) == pytest.approx(epoch["train_loss"], abs=1e-4)
    assert (tmp_path / "out" / "summary.md").read_text() == text + "\n"
    monkeypatch.setattr(room, "train", lambda *_, **__: pytest.fail("trained again"))
    assert Sweep(file, COMMON).train() == text


def test_a_sweep_that_was_stopped_goes_on_with_the_run_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, real = write(tmp_path, grid={"seed": [0, 1]}), room.train
    overrides = [*SMALL, "train.epochs=2"]

    class Once:
        def epoch_end(self, epoch: int, model: object) -> None:
            raise Preempted("stopped")

    def stopped(config, **settings):
        return real(config, callbacks=[Once()] if config.seed == 1 else [], **settings)

    monkeypatch.setattr(room, "train", stopped)
    with pytest.raises(Preempted):
        Sweep(file, overrides).train()
    assert [line.split()[-1] for line in Sweep(file, overrides).listing().splitlines()[1:]] == [
        "finished",
        "unfinished",
    ]
    seen = []
    monkeypatch.setattr(room, "train", lambda config, **settings: seen.append(config.seed) or real(config, **settings))
    Sweep(file, overrides).train()
    assert seen == [1]
    expected = small_run(tmp_path / "unbroken", "seed=1", "train.epochs=2")
    assert_same_run(tmp_path / "out" / "seed=1", expected)


def test_a_run_that_fails_is_reported_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, grid={"train.opt": ["addam", "adamw"]})
    assert main(["sweep", str(file), *COMMON]) == 1
    said, mistake = capsys.readouterr()
    assert "[1/2] train.opt=addam" in said
    assert mistake.endswith("vitruvius: 1 of 2 runs failed: train.opt=addam.\n")
    assert "failed: train.opt = 'addam' cannot be made" in said
    good, bad = table(tmp_path)
    assert (good["train.opt"], good["status"]) == ("adamw", "finished")
    assert bad["status"].startswith("failed: train.opt = 'addam'")
    assert bad["accuracy"] == ""


def test_a_dry_run_finds_what_would_fail_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = [
        {"train.opt": "addam"},
        {"model.name": "vitruvius/nothing"},
        {"data.dataset": "folder", "data.root": str(tmp_path / "missing")},
        {"attention": [{"parts": ["rcp"]}]},
        {"tracking": ["cvs"]},
    ]
    file = write(tmp_path, list=[{"seed": 1}, *faults])
    assert main(["sweep", str(file), "--dry-run", *COMMON]) == 1
    said, mistake = capsys.readouterr()
    assert mistake.endswith("vitruvius: 5 of 6 runs would fail.\n")
    assert said.count("would fail: ") == 5
    assert "did you mean 'rpc'?" in said
    assert said.splitlines()[1].split() == ["seed=1", "waiting"]
    assert not (tmp_path / "out").exists()


def test_a_dry_run_does_not_wait_for_an_init_that_is_optimised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def optimise(
        inputs: Any, targets: Any, q: Any, k: Any, *, steps: int, **settings: Any
    ) -> tuple[Any, Any, list[float]]:
        asked.append(steps)
        return q, k, [0.0]

    monkeypatch.setattr("vitruvius.init.impulse_optimised.optimise", optimise)
    file = write(tmp_path, grid={"init": ["impulse_optimised:kernel=3"]})
    assert main(["sweep", str(file), "--dry-run", *COMMON]) == 0
    assert asked
    assert set(asked) == {1}
    wrong = write(tmp_path, grid={"init": ["impulse_optimised:steps=0"]})
    assert main(["sweep", str(wrong), "--dry-run", *COMMON]) == 1
    assert "steps=0" in capsys.readouterr().out


def test_a_dry_run_opens_only_the_runs_that_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, list=[{"name": "good", "seed": 1}, {"name": "bad", "train.opt": "addam"}])
    assert main(["sweep", str(file), "--dry-run", "--only", "good", *COMMON]) == 0
    assert main(["sweep", str(file), "--dry-run", "--only", "bad", *COMMON]) == 1
    assert "1 of 1 runs would fail" in capsys.readouterr().err


def test_a_dry_run_does_not_calibrate_low_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitruvius.training._build.calibrate_low_rank", lambda *_, **__: 1 / 0)
    parts = [{"parts": [{"use": "low_rank", "rank": 2, "start": "calibrated"}]}]
    file = write(tmp_path, list=[{"name": "low_rank", "attention": parts}])
    assert main(["sweep", str(file), "--dry-run", *COMMON]) == 0
    assert main(["train", str(RECIPE), "--dry-run", f"attention={json.dumps(parts)}", *COMMON]) == 0


def test_a_dry_run_finds_a_misspelt_threat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, grid={"seed": [0]}, evaluate=[{"threats": ["pdg:eps=0.1"]}])
    assert main(["sweep", str(file), "--dry-run", *COMMON]) == 1
    assert "would fail: evaluate.threats" in capsys.readouterr().out


def test_an_unexpected_error_is_a_failed_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config, **_):
        raise ZeroDivisionError("by chance")

    monkeypatch.setattr(room, "train", broken)
    assert "failed: ZeroDivisionError: by chance" in Sweep(write(tmp_path, grid={"seed": [0]}), COMMON).train()


def test_a_changed_recipe_is_not_taken_for_finished(tmp_path: Path) -> None:
    file = write(tmp_path, grid={"seed": [0]})
    Sweep(file, COMMON).train()
    (row,) = Sweep(file, [*COMMON, "train.weight_decay=0.3"]).listing().splitlines()[1:]
    assert row.split()[-1] == "unfinished"


def test_listing_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(write(tmp_path, grid=GRID)), "--dry-run", *COMMON]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith(f"4 runs in {tmp_path / 'out'}")
    assert said[1].split() == ["train.lr=0.001,seed=0", "waiting"]
    assert not (tmp_path / "out").exists()


def test_out_moves_the_sweep(tmp_path: Path) -> None:
    sweep = Sweep(write(tmp_path, grid=GRID), [*COMMON, "out=elsewhere"])
    assert sweep.runs[0].config.out == str(Path("elsewhere") / "train.lr=0.001,seed=0")


def test_what_the_sweep_file_says_can_be_overridden_too(tmp_path: Path) -> None:
    file = write(tmp_path, grid=GRID, evaluate=[{"threats": ["pgd:eps=8/255"], "images": 500}])
    sweep = Sweep(file, [*COMMON, "evaluate.0.images=8", "evaluate.0.threats=[]", "metric=train_loss", "order=min"])
    assert [(plan.images, plan.threats) for plan in sweep.settings.evaluate] == [(8, ())]
    assert (sweep.settings.metric, sweep.settings.order) == ("train_loss", "min")
    with pytest.raises(ConfigError, match=r"unknown key 'evaluate\.0\.image'"):
        Sweep(file, [*COMMON, "evaluate.0.image=8"])


def test_only_the_runs_that_are_asked_for_are_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write(tmp_path, list=[{"name": name, "seed": seed} for seed, name in enumerate(("a", "b", "b_again"))]))
    assert main(["sweep", file, *COMMON, "--only", "b*"]) == 0
    assert {row["name"]: row["status"] for row in table(tmp_path)} == {
        "a": "waiting",
        "b": "finished",
        "b_again": "finished",
    }
    assert "[2/2] b_again" in capsys.readouterr().out
    assert main(["sweep", file, *COMMON, "--only", "c"]) == 1
    assert "--only c: no run has such a name; there are a, b, b_again." in capsys.readouterr().err


def test_another_metric_sorts_the_other_way(tmp_path: Path) -> None:
    text = Sweep(write(tmp_path, grid={"train.lr": [1e-2, 1e-5]}, metric="train_loss", order="min"), COMMON).train()
    losses = [float(row["train_loss"]) for row in table(tmp_path)]
    assert losses == sorted(losses)
    assert text.splitlines()[0].split(" | ")[1].strip() == "train_loss"


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
        ({"grid": {"train.lr": 0.1}}, [], r"grid\.train\.lr = 0\.1, expected a list of values"),
        ({"grid": {"seed": [0, 0]}}, [], "twice the same run: seed=0"),
        ({"grid": {"seed": [0]}}, ["seed=3"], "seed is what the sweep varies"),
        ({"grid": {"out": ["a"]}}, [], "out is what the sweep varies"),
        ({"gird": {}}, [], "unknown key 'gird'; did you mean 'grid'"),
        ({"grid": {"train.lrr": [1]}}, [], "unknown key 'train.lrr'"),
    ],
)
def test_mistakes_are_found_before_the_first_run(tmp_path: Path, settings, overrides, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Sweep(write(tmp_path, **settings), [*COMMON, *overrides])


def _sweep(rank: int, file: str) -> None:
    Sweep(file, COMMON).train()


def test_two_processes_share_every_run(tmp_path: Path) -> None:
    file = write(tmp_path, grid={"seed": [0, 1]}, list=[{"train.opt": "addam"}])
    in_two_processes(_sweep, str(file))
    rows = table(tmp_path)
    assert [row["status"] for row in rows][:2] == ["finished", "finished"]
    assert rows[2]["status"].startswith("failed: ")


def test_runs_are_judged_by_the_threats_of_the_sweep(tmp_path: Path) -> None:
    plan = {"threats": ["pgd:eps=8/255,steps=1"], "images": 8}
    file = write(tmp_path, list=[{"name": "mine", "seed": 3}], evaluate=[plan, {**plan, "out": "again"}])
    Sweep(file, COMMON).train()
    for folder in ("evaluation", "again"):
        report = json.loads((tmp_path / "out" / "mine" / folder / "report.json").read_text())
        assert "pgd" in json.dumps(report)


def test_no_run_is_started_that_would_not_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, grid={"seed": [0, 1]})
    now = iter(range(0, 100_000, 40))
    monkeypatch.setattr(room.time, "monotonic", lambda: float(next(now)))
    said: list[str] = []
    Sweep(file, COMMON).train(tell=said.append, minutes=2.5)  # the first run takes 40 s by this clock, 150 are given
    assert [row["status"] for row in table(tmp_path)] == ["finished", "waiting"]
    assert "seed=1: no time left, not started" in said[-1]
    Sweep(file, COMMON).train(tell=said.append)
    assert [row["status"] for row in table(tmp_path)] == ["finished", "finished"]


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan")])
def test_a_time_limit_that_is_none_is_refused(tmp_path: Path, minutes: float) -> None:
    sweep = Sweep(write(tmp_path, grid={"seed": [0]}), COMMON)
    with pytest.raises(ConfigError, match=r"--minutes .*; expected a number above 0"):
        sweep.train(minutes=minutes)
    assert not (tmp_path / "out").exists()


def test_runs_side_by_side_are_those_of_one_after_the_other(tmp_path: Path) -> None:
    file = write(tmp_path, list=[{"name": "good", "seed": 0}, {"name": "bad", "model.weights": "nowhere.safetensors"}])
    said: list[str] = []
    Sweep(file, COMMON).train(tell=said.append, jobs=2)
    notes = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert notes["good"]["status"] == "finished"
    assert notes["bad"]["status"].startswith("failed: ")
    assert "nowhere.safetensors" in notes["bad"]["status"]
    alone = small_run(tmp_path / "alone", "train.epochs=1", "seed=0")
    (alone / "config.yaml").write_text((tmp_path / "out" / "good" / "config.yaml").read_text())
    assert_same_run(alone, tmp_path / "out" / "good")


def test_a_sweep_says_what_its_runs_are_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with SideBySide("sweep.yaml", [], tmp_path / "logs") as children:
        children.command = [
            sys.executable,
            "-c",
            "import time; print('epoch 3/10  loss 0.4', flush=True); time.sleep(1)",
        ]
        monkeypatch.setattr(side_by_side, "LOOK_EVERY", 0.1)
        children.start("a")
        seen: list[str] = []
        ended = children.wait(lambda: seen.append(children.in_words()))
    assert [(name, outcome) for name, outcome, _ in ended] == [("a", "finished")]
    assert seen[-1] == "a: epoch 3/10  loss 0.4"
    file = write(tmp_path, list=[{"name": "good", "seed": 0}])
    Sweep(file, COMMON).train(quiet=False)
    assert re.search(r"epoch 1/1  loss ", capsys.readouterr().err)


def test_a_run_of_a_sweep_may_have_a_recipe_of_its_own(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(RECIPE.read_text().replace("seed: 0", "seed: 7"))
    sweep = Sweep(write(tmp_path, list=[{"name": "a", "train.lr": 0.1}, {"name": "b", "recipe": str(other)}]), COMMON)
    assert [run.name for run in sweep.runs] == ["a", "b"]
    assert sweep.runs[0].config.train.lr == 0.1
    assert sweep.runs[1].config.train.lr != 0.1


def test_a_plan_may_be_for_some_runs_and_may_look_for_masked_gradients_and_speed(tmp_path: Path) -> None:
    plans = [
        {"threats": [], "images": 6, "sanity": "4/255", "runs": ["a*"], "out": "checked"},
        {"threats": [], "images": 6, "speed": 2},
    ]
    file = write(tmp_path, list=[{"name": "apple", "seed": 3}, {"name": "berry", "seed": 4}], evaluate=plans)
    Sweep(file, COMMON).train()
    apple, berry = tmp_path / "out" / "apple", tmp_path / "out" / "berry"
    findings = json.loads((apple / "checked" / "sanity.json").read_text())
    assert "worst case" in [finding["name"] for finding in findings]
    assert not (berry / "checked").exists()
    for run in (apple, berry):
        speeds = json.loads((run / "evaluation" / "speed.json").read_text())
        assert [speed["precision"] for speed in speeds] == ["float32", "bfloat16"]
        for speed in speeds:
            assert speed["images_per_second"] == pytest.approx(2 / (speed["milliseconds"] / 1000))


def test_a_check_for_masked_gradients_is_not_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"threats": ["fgsm:eps=4/255"], "images": 6, "sanity": "4/255"}
    file = write(tmp_path, list=[{"name": "a", "seed": 3}], evaluate=[plan])
    Sweep(file, COMMON).train()
    sweep = tmp_path / "out" / "sweep.json"
    sweep.unlink()  # as after a kill between the checks and the note
    monkeypatch.setattr("vitruvius.training._sweep.judging.examine", lambda *_, **__: pytest.fail("made again"))
    Sweep(file, COMMON).train()
    assert json.loads(sweep.read_text())["a"]["status"] == "finished"


def test_seconds_of_training_and_judging_are_kept_apart_and_add_up_over_calls(tmp_path: Path) -> None:
    file = write(tmp_path, list=[{"name": "a", "seed": 3}], evaluate=[{"threats": [], "images": 6}])
    Sweep(file, COMMON).train()
    kept = tmp_path / "out" / "seconds" / "a.json"
    first = json.loads(kept.read_text())
    assert set(first) == {"train", "judge"}
    assert 0 < first["train"] < 60
    (tmp_path / "out" / "sweep.json").unlink()
    Sweep(file, COMMON).train()
    assert json.loads(kept.read_text())["train"] >= first["train"]
    notes = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert notes["a"]["status"] == "finished"


def test_masks_are_made_of_another_run_and_judged_before_and_after_training(tmp_path: Path) -> None:
    dense = small_run(tmp_path / "dense", "train.epochs=1")
    masks = {name: str(tmp_path / "masks" / f"{name}.safetensors") for name in ("information", "random")}
    runs = [
        {"name": name, "model.weights": str(dense), "attention": [{"parts": [{"use": "mask", "file": file}]}]}
        for name, file in masks.items()
    ]
    file = write(
        tmp_path,
        list=runs,
        maps={"of": str(dense), "file": str(tmp_path / "masks" / "maps.safetensors"), "images": 8},
        masks=[{"file": made, "rule": rule, "sparsity": 0.5} for rule, made in masks.items()],
        evaluate=[
            {"threats": [], "images": 12, "start": True},
            {"threats": [], "images": 12, "cycles": True},
        ],
    )
    overrides = [*COMMON, "train.lr=0.1"]
    said: list[str] = []
    Sweep(file, overrides).train(tell=said.append)
    assert [line for line in said if line.startswith("ma")] == [
        f"maps of {dense}",
        *(f"masks {made}" for made in masks.values()),
    ]
    weights = {}
    for name in masks:
        run = tmp_path / "out" / name
        assert json.loads((run / "cycles.json").read_text())["rows"]
        for folder in (run, run / "start"):
            rows = load_ledger(folder / "evaluation")["clean"]
            answers = json.loads((folder / "evaluation" / "report.json").read_text())["threats"][0]
            assert int(rows["correct"].sum()) == answers["correct"]
            weights[name, folder.name] = load_model(folder).state_dict()
        begun = weights[name, "start"]["model.blocks.0.attn.qkv.weight"]
        assert torch.equal(begun, load_model(dense).state_dict()["model.blocks.0.attn.qkv.weight"])
        assert not torch.equal(begun, weights[name, name]["model.blocks.0.attn.qkv.weight"])
    keeps = [key for key in weights["random", "start"] if "mask" in key]
    assert keeps
    assert any(not torch.equal(weights["random", "start"][k], weights["information", "start"][k]) for k in keeps)
    said.clear()
    Sweep(file, overrides).train(tell=said.append)
    assert not said


def test_masks_that_cannot_be_made_fail_only_the_runs_that_need_them(tmp_path: Path) -> None:
    dense = small_run(tmp_path / "dense", "train.epochs=1")
    made = str(tmp_path / "masks" / "tiles.safetensors")
    file = write(
        tmp_path,
        list=[{"name": "masked", "attention": [{"parts": [{"use": "mask", "file": made}]}]}, {"name": "dense"}],
        maps={"of": str(dense), "file": str(tmp_path / "masks" / "maps.safetensors"), "images": 8},
        masks=[{"file": made, "sparsity": 0.95, "tiles": 8}],
    )
    said: list[str] = []
    Sweep(file, COMMON).train(tell=said.append)
    assert any(line.startswith("    failed: sparsity 0.95 cannot be reached") for line in said)
    statuses = {row["name"]: row["status"] for row in table(tmp_path)}
    assert statuses["dense"] == "finished"
    assert statuses["masked"].startswith("failed: ")
    assert "tiles.safetensors" in statuses["masked"]


def test_a_start_is_that_of_the_very_training(tmp_path: Path) -> None:
    plan = {"threats": [], "images": 6, "start": True}
    Sweep(write(tmp_path, list=[{"name": "a", "seed": 3}], evaluate=[plan]), COMMON).train()
    expected = small_run(tmp_path / "alone", "train.epochs=1", "seed=3")
    alone, kept = load_model(expected).state_dict(), load_model(tmp_path / "out" / "a").state_dict()
    assert all(torch.equal(alone[key], kept[key]) for key in alone)


def test_masks_of_a_run_that_is_not_there_are_said_by_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = str(tmp_path / "masks.safetensors")
    settings: dict[str, Any] = {
        "list": [{"name": "masked", "attention": [{"parts": [{"use": "mask", "file": made}]}]}],
        "maps": {"of": "runs/nowhere", "file": "maps.safetensors"},
        "masks": [{"file": made, "sparsity": 0.5}],
    }
    assert main(["sweep", str(write(tmp_path, **settings)), "--dry-run", *COMMON]) == 1
    said = capsys.readouterr().out
    assert "would fail: the masks of this sweep are made of the run runs/nowhere, which is not there" in said
    settings["maps"]["of"] = str(small_run(tmp_path / "dense", "train.epochs=1"))
    assert main(["sweep", str(write(tmp_path, **settings)), "--dry-run", *COMMON]) == 0
    assert not Path(made).exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evaluate": [{"threats": [], "runs": ["b*"]}]}, r"evaluate\.runs: 'b\*' fits no run; there are seed=0"),
        ({"masks": [{"file": "m.safetensors"}]}, "maps and masks belong together"),
        (
            {
                "masks": [{"file": "m.safetensors", "rule": "informaton"}],
                "maps": {"of": "a", "file": "b.safetensors"},
            },
            "did you mean 'information'",
        ),
    ],
)
def test_plans_that_cannot_be_are_refused_at_once(tmp_path: Path, settings: Any, message: str) -> None:
    with pytest.raises(VitruviusError, match=message):
        Sweep(write(tmp_path, grid={"seed": [0]}, **settings), COMMON)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"threats": ["pdg:eps=0.1"]}, "did you mean 'pgd'"),
        ({"threats": [], "sanity": "hard"}, "is not a number"),
        ({"threats": [], "speed": -1}, r"evaluate\.0\.speed = -1"),
    ],
)
def test_a_plan_that_would_fail_is_refused_before_a_run_is_trained(tmp_path: Path, plan: Any, message: str) -> None:
    with pytest.raises(VitruviusError, match=message):
        Sweep(write(tmp_path, grid={"seed": [0]}, evaluate=[plan]), COMMON).train()
    assert not (tmp_path / "out").exists()
