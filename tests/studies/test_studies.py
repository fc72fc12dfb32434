"""Studies make tables and figures, and go on after a kill."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import vitruvius
from shift_layouts import write_pictures
from small_run import all_images, small_run
from vitruvius import _progress
from vitruvius._errors import ConfigError, DataError, RunError, UnknownName
from vitruvius.attacks.pgd import PGD
from vitruvius.cli import main
from vitruvius.models import PixelModel
from vitruvius.studies import _base, studies, study
from vitruvius.studies._base import open_subject
from vitruvius.studies.strength import attack_convergence

MODEL = "vitruvius/vit_digits"
FEW = {"images": 24, "batch_size": 16, "data.dataset": "digits"}


def table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has kept the weights of epochs 1 and 2."""
    return small_run(tmp_path_factory.mktemp("studied") / "run", "train.keep={every: 1}")


def test_effectiveness_goes_over_the_kept_epochs_of_a_run(run: Path, tmp_path: Path) -> None:
    settings = {"images": 24, "steps": [1, 4], "seeds": [0, 1], "eps": 0.1}
    rows = table(study("attack-effectiveness", [str(run)], settings, tmp_path))
    places = [(row["epoch"], row["steps"], row["seed"]) for row in rows]
    assert places == [(epoch, steps, seed) for epoch in "12" for steps in "14" for seed in "01"]
    subject = open_subject(str(run), [], 24, 128)
    model = subject.model_at(1)
    x, y, ids = all_images(subject)
    moved = PGD(eps=0.1, steps=4, step_size=1.5 * 0.1 / 4, seed=1)(model, x, y, ids=ids)
    loss = float(torch.nn.functional.cross_entropy(model(moved), y).detach())
    longest = {(row["epoch"], row["seed"]): float(row["adv_loss"]) for row in rows if row["steps"] == "4"}
    assert longest["1", "1"] == pytest.approx(loss, rel=1e-5)
    assert longest["1", "1"] != longest["2", "1"]
    for row in rows:
        end = longest[row["epoch"], row["seed"]]
        assert float(row["loss_gap"]) == pytest.approx(abs(float(row["adv_loss"]) - end) / end)
    assert (tmp_path / "figure.png").stat().st_size > 1000


COLUMNS = (  # of the paper's summary.csv
    "top1", "top1_err", "top5", "top5_err", "robust_top1", "robust_top1_err", "robust_top5", "robust_top5_err",
    "loss", "adv_loss", "param_count", "img_size", "cropt_pct", "interpolation", "attack", "attack_steps", "model",
    "epoch", "seed",
)  # fmt: skip


def test_effectiveness_of_a_folder_of_published_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training's checkpoint-EPOCH.pth.tar, judged as its attack_effectiveness.py does, but for the random start."""
    monkeypatch.setattr(PGD, "start", lambda self, x, dice, restart=0: x)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for epoch in (0, 9):
        torch.manual_seed(epoch)
        model = vitruvius.create_model(MODEL).model
        content = {"state_dict": model.state_dict(), "arch": "vit_digits", "args": {"normalize_model": False}}
        torch.save({**content, "epoch": epoch}, folder / f"checkpoint-{epoch}.pth.tar")
    assert main(["convert", str(folder), "--from", "light", "--out", str(tmp_path / "run")]) == 0
    settings = {**FEW, "steps": [1, 4], "seeds": [0], "eps": 0.1}
    study("attack-effectiveness", [str(tmp_path / "run")], settings, tmp_path / "study")
    (summary,) = (tmp_path / "study").rglob("summary.csv")
    rows = table(summary)
    assert tuple(rows[0]) == COLUMNS
    assert [(row["epoch"], row["attack_steps"]) for row in rows] == [("0", "1"), ("0", "4"), ("9", "1"), ("9", "4")]
    x, y, _ = all_images(open_subject(str(tmp_path / "run"), ["data.dataset=digits"], 24))
    moved = x
    for _ in range(4):  # their attack.pgd
        moved = moved.detach().requires_grad_()
        loss = torch.nn.functional.nll_loss(model.eval()(moved).log_softmax(1), y, reduction="sum")
        moved = moved + 1.5 * 0.1 / 4 * torch.autograd.grad(loss, moved)[0].sign()
        moved = (x + (moved - x).clamp(-0.1, 0.1)).clamp(0, 1)
    right = (model(moved).argmax(1) == y).double().mean()
    assert float(rows[-1]["robust_top1"]) == pytest.approx(100 * float(right), abs=1e-4)
    expected = float(torch.nn.functional.cross_entropy(model(moved), y).detach())
    assert float(rows[-1]["adv_loss"]) == pytest.approx(expected, rel=1e-4)
    assert float(rows[-1]["param_count"]) == round(sum(p.numel() for p in model.parameters()) / 1e6, 2)


def test_a_study_holds_no_more_than_a_few_images_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    forward = PixelModel.forward
    monkeypatch.setattr(PixelModel, "forward", lambda self, x: (seen.append(len(x)), forward(self, x))[1])
    settings = {"images": 24, "data.dataset": "digits", "eps": [0.1], "steps": 1}
    study("eps-sweep", [MODEL], settings, tmp_path / "wide")
    assert max(seen) == 24
    seen.clear()
    monkeypatch.setattr(_base, "MEMORY", 1 << 20)
    study("eps-sweep", [MODEL], settings, tmp_path / "narrow")
    assert 1 <= max(seen) < 8
    assert (tmp_path / "wide" / "table.csv").read_text() == (tmp_path / "narrow" / "table.csv").read_text()


def test_single_epochs_can_be_chosen_and_others_are_named(run: Path, tmp_path: Path) -> None:
    settings = {"images": 8, "steps": [1], "seeds": [0], "epochs": [2]}
    rows = table(study("attack-effectiveness", [str(run)], settings, tmp_path / "one"))
    assert [row["epoch"] for row in rows] == ["2"]
    with pytest.raises(ConfigError, match="has not kept epoch 7; kept: 1, 2"):
        study("attack-effectiveness", [str(run)], {**settings, "epochs": [7]}, tmp_path / "none")


def test_convergence_follows_every_correct_point_for_every_seed_and_number_of_steps(run: Path, tmp_path: Path) -> None:
    settings = {"images": 24, "batch_size": 3, "steps": [0, 2, 4], "seeds": [0, 5], "eps": 0.1, "points": 4}
    rows = table(study("attack-convergence", [str(run)], settings, tmp_path))
    subject = open_subject(str(run), [], 24, 16)
    x, y, ids = all_images(subject)
    right = (subject.model(x).argmax(1) == y).nonzero().flatten()[:4]
    places = [(int(row["seed"]), int(row["steps"]), int(row["point"])) for row in rows]
    assert places == [(seed, steps, int(point)) for seed in (0, 5) for steps in (0, 2, 4) for point in right]
    x, y, ids = x[right], y[right], ids[right]
    for steps in (2, 4):  # attacks of their own, with the same steps of 0.15 ε
        moved = PGD(eps=0.1, steps=steps, step_size=0.15 * 0.1, seed=5)(subject.model, x, y, ids=ids)
        losses = torch.nn.functional.cross_entropy(subject.model(moved), y, reduction="none").tolist()
        found = [float(row["loss"]) for row in rows if row["seed"] == "5" and row["steps"] == str(steps)]
        assert found == pytest.approx(losses, rel=1e-4)


def test_one_number_of_steps_means_every_step_up_to_it(run: Path, tmp_path: Path) -> None:
    settings = {"images": 24, "steps": 3, "seeds": [0], "points": 1}
    rows = table(study("attack-convergence", [str(run)], settings, tmp_path))
    assert [row["steps"] for row in rows] == ["0", "1", "2", "3"]


def test_every_step_of_a_run_is_drawn_on_an_even_axis_and_a_list_of_steps_on_a_logarithmic_one() -> None:
    for steps, scale in ((range(11), "linear"), ((0, 1, 5, 50), "symlog")):
        rows = [{"model": "a", "seed": 0, "point": 0, "steps": step, "loss": float(step)} for step in steps]
        assert attack_convergence.draw(rows).axes[0].get_xscale() == scale


def test_a_model_that_is_never_right_cannot_converge() -> None:
    subject = open_subject(MODEL, ["data.dataset=digits"], 3, 16)
    x, _, _ = all_images(subject)
    wrong = (subject.model(x).argmax(1) + 1) % 10
    with pytest.raises(DataError, match="classifies none of 3 images correctly"):
        next(attack_convergence(replace(subject, loader=[(x, wrong)]), set()))


def test_the_strength_of_any_attack_can_be_swept_autoattack_included(run: Path, tmp_path: Path) -> None:
    settings = {"images": 6, "eps": [0.0, 0.3], "threat": "autoattack:version=custom,attacks=[apgd-ce]"}
    rows = table(study("eps-sweep", [str(run)], settings, tmp_path / "ensemble"))
    subject = open_subject(str(run), [], 6, 16)
    x, y, _ = all_images(subject)
    clean = float((subject.model(x).argmax(1) == y).float().mean())
    assert [float(row["eps"]) for row in rows] == [0.0, 0.3]
    assert float(rows[0]["accuracy"]) == pytest.approx(clean)
    assert float(rows[1]["accuracy"]) <= clean
    assert rows[1]["threat"].startswith("autoattack(eps=0.3, version=custom")
    rows = table(study("eps-sweep", [str(run)], {**settings, "threat": "fgsm:norm=l2", "seed": 2}, tmp_path / "l2"))
    assert rows[1]["threat"] == "fgsm(eps=0.3, norm=l2, seed=2)"


def test_a_few_steps_are_long_enough_to_cross_the_ball(tmp_path: Path) -> None:
    few = table(study("eps-sweep", [MODEL], {**FEW, "eps": [0.1], "steps": 5}, tmp_path / "few"))
    assert few[0]["threat"] == "pgd(eps=0.1, steps=5)"
    many = table(study("eps-sweep", [MODEL], {**FEW, "eps": [0.1], "steps": 12}, tmp_path / "many"))
    assert many[0]["threat"] == "pgd(eps=0.1, steps=12, step_size=0.015)"


def test_normalised_epsilons_are_standard_deviations(tmp_path: Path) -> None:
    study("eps-sweep", [MODEL], {**FEW, "eps": [0.0, 0.2], "space": "normalised", "steps": 3}, tmp_path)
    rows = table(tmp_path / "table.csv")
    assert {row["space"] for row in rows} == {"normalised"}
    clean = float(rows[0]["accuracy"])
    subject = open_subject(MODEL, ["data.dataset=digits"], 24, 16)
    x, y, _ = all_images(subject)
    assert clean == pytest.approx(float((subject.model(x).argmax(1) == y).float().mean()))


def test_a_killed_study_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    settings = {**FEW, "eps": [0.0, 0.05, 0.1], "steps": 2}
    whole = study("eps-sweep", [MODEL], settings, tmp_path / "whole").read_text()
    study("eps-sweep", [MODEL], settings, tmp_path / "broken")
    lines = (tmp_path / "broken" / "rows.jsonl").read_text().splitlines()
    (tmp_path / "broken" / "rows.jsonl").write_text(lines[0] + "\n" + lines[1][:10])
    assert study("eps-sweep", [MODEL], settings, tmp_path / "broken").read_text() == whole


def test_classes_that_need_not_mean_the_same_are_refused(tmp_path: Path) -> None:
    write_pictures(tmp_path / "data" / "val", ["cat", "dog"])
    settings = {"data.dataset": "folder", "data.root": str(tmp_path / "data"), "data.val_split": "val", "images": 2}
    with pytest.raises(ConfigError, match="has 2 classes, numbered 0 … 1 by their names, and the model knows 10"):
        study("eps-sweep", [MODEL], settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    words = [f"{key}={settings[key]}" for key in settings if "." in key]
    assert open_subject(MODEL, words, 2, labels=False).num_images == 2


def test_a_model_by_name_takes_the_settings_that_other_verbs_take(run: Path, tmp_path: Path) -> None:
    settings = {**FEW, "data.root": None, "eps": [0.0], "steps": 1}
    settings |= {"model.weights": str(run), "model.kwargs": {"depth": 1, "embed_dim": 24}}
    rows = table(study("eps-sweep", [MODEL], settings, tmp_path / "by_name"))
    of_the_run = table(study("eps-sweep", [str(run)], {"images": 24, "eps": [0.0], "steps": 1}, tmp_path / "run"))
    assert rows[0]["accuracy"] == of_the_run[0]["accuracy"]
    rewired = open_subject(MODEL, ["data.dataset=digits", "attention=[{parts: [twicing]}]"], 2, 2)
    assert "twicing" in rewired.model.model.blocks[0].attn.core.parts


def test_another_study_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    study("eps-sweep", [MODEL], {**FEW, "eps": [0.0], "steps": 1}, tmp_path)
    with pytest.raises(RunError, match="another study"):
        study("eps-sweep", [MODEL], {**FEW, "eps": [0.1], "steps": 1}, tmp_path)


@pytest.mark.parametrize(
    ("name", "targets", "settings", "error", "letter"),
    [
        ("eps-swep", [MODEL], {}, UnknownName, "did you mean 'eps-sweep'"),
        ("eps-sweep", [], {}, ConfigError, "at least one run"),
        ("eps-sweep", [MODEL], {"step": 3}, ConfigError, "did you mean 'steps'"),
        ("eps-sweep", [MODEL], {"space": "pixel"}, ConfigError, "one of pixels, normalised"),
        ("eps-sweep", [MODEL], {**FEW, "threat": "pgd:eps=0.1"}, ConfigError, "is what the study varies"),
        ("eps-sweep", [MODEL], {**FEW, "threat": "pgd", "steps": 3}, ConfigError, "write it into threat='pgd'"),
        ("eps-sweep", [MODEL], {**FEW, "threat": "fgsm", "space": "normalised"}, ConfigError, "leave threat out"),
        ("eps-sweep", [MODEL], {**FEW, "threat": "fgms"}, UnknownName, "did you mean 'fgsm'"),
        ("attack-convergence", [MODEL], {**FEW, "steps": [-1]}, ConfigError, "whole numbers that are 0 or more"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, name: str, targets: list[str], settings: Any, error: Any, letter: str
) -> None:
    with pytest.raises(error, match=letter):
        study(name, targets, settings, tmp_path)


@pytest.mark.parametrize("change", ["images", "labels", "settings", "weights"])
def test_rows_of_other_images_labels_or_settings_are_refused(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**FEW, "eps": [0.01], "steps": 1}
    study("eps-sweep", [MODEL], settings, tmp_path)

    def opened(*arguments: Any, **more: Any) -> Any:
        subject = open_subject(*arguments, **more)
        x, y, ids = all_images(subject)
        if change == "images":
            return replace(subject, loader=[(x.flip(0), y, ids)])  # the same sum
        if change == "labels":
            return replace(subject, loader=[(x, y.flip(0), ids)])
        if change == "weights":
            subject.model.model.head.bias.data += 1
        else:
            subject.model.a_plain_attribute = 2.0
        return subject

    monkeypatch.setattr("vitruvius.studies._base.open_subject", opened)
    with pytest.raises(RunError, match=f"with other {change} "):
        study("eps-sweep", [MODEL], settings, tmp_path)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("attack-convergence", {"steps": [0, 60], "seeds": [0], "points": 4}, r"\d+/60, row 1, step \d+ of 60"),
        (
            "eps-sweep",
            {"eps": [0.1], "threat": "pgd:steps=60"},
            r"\d+/24, row 1, round 2 of 2, pgd\(.+\), step \d+ of 60",
        ),
    ],
)
def test_whoever_waits_hears_how_far_a_study_is(
    name: str, settings: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(_progress, "EVERY", 0.02)
    study(name, [MODEL], {**FEW, **settings}, tmp_path)
    assert re.search(rf"studying {MODEL}: {said}, .+ left", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["eps-sweep", "released-protocol"])
def test_accuracies_are_drawn_in_percent_and_the_axis_says_so(name: str) -> None:
    row = {"model": "a", "space": "pixels", "labels": "true", "threat": "pgd", "accuracy": 0.5, "low": 0.4, "high": 0.6}
    figure = studies[name].draw([{**row, "eps": 0.01}, {**row, "eps": 0.02}])
    (axes,) = figure.axes
    assert axes.get_ylabel() == "accuracy, %"
    assert axes.lines[0].get_ydata().tolist() == [50, 50]
