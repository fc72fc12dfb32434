"""The ledger on disk: resumed after any kill, shared by processes, grown by later threats, never mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import DATA, THREATS, Stop, assert_same_rows, loader, model, rows, stopped_after

from two_processes import in_two_processes
from vitruvius._errors import CheckpointError, RunError
from vitruvius._processes import process_group
from vitruvius.attacks.fgsm import FGSM
from vitruvius.attacks.pgd import PGD
from vitruvius.attention import part
from vitruvius.evaluation import _evaluate, describe, evaluate, load_ledger
from vitruvius.evaluation.base import data_settings, fingerprint, settings_fingerprint
from vitruvius.evaluation.ledger import Ledger

SPECS = ["clean", *map(describe, THREATS)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "evaluation"
    evaluate(model(), loader(), THREATS, folder=folder)
    return folder


def answers_until(monkeypatch: pytest.MonkeyPatch, calls: int) -> list[int]:
    return stopped_after(monkeypatch, _evaluate, "answer", calls, 1)


def test_a_finished_folder_holds_ledger_and_report_and_no_parts(undisturbed: Path) -> None:
    assert {path.name for path in undisturbed.iterdir()} == {
        "ledger.json",
        "ledger.safetensors",
        "report.json",
        "parts",
    }
    assert not list((undisturbed / "parts").iterdir())
    assert set(rows(undisturbed)) == set(SPECS)
    known = json.loads((undisturbed / "ledger.json").read_text())
    assert known["subject"] == {
        "data": "digits/validation",
        "images": 22,
        "model": "VisionTransformer",
        "weights": fingerprint(model()),
        "settings": settings_fingerprint(model()),
    }
    assert [threat["spec"] for threat in known["threats"]] == SPECS


@pytest.mark.parametrize("calls", [0, 3, 5, 8, 11])
def test_an_evaluation_killed_at_any_batch_goes_on_where_it_stopped(
    calls: int, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        answers_until(patch, calls)
        with pytest.raises(Stop):
            evaluate(model(), loader(), THREATS, folder=tmp_path)
    with monkeypatch.context() as patch:
        asked = answers_until(patch, 99)
        report = evaluate(model(), loader(), THREATS, folder=tmp_path)
    assert len(asked) == 12 - calls  # nothing is judged twice
    assert_same_rows(tmp_path, undisturbed)
    saved = json.loads((undisturbed / "report.json").read_text())
    assert report.worst_case.correct == saved["worst_case"]["correct"]


def test_a_kill_between_ledger_and_report_is_mended(undisturbed: Path, tmp_path: Path) -> None:
    evaluate(model(), loader(), THREATS, folder=tmp_path)
    (tmp_path / "report.json").unlink()
    (tmp_path / "parts" / ".x.safetensors.1.tmp").write_bytes(b"half")
    evaluate(model(), loader(), THREATS, folder=tmp_path)
    assert (tmp_path / "report.json").exists()
    assert not list((tmp_path / "parts").iterdir())
    assert_same_rows(tmp_path, undisturbed)


def test_a_damaged_part_is_judged_again_and_a_damaged_ledger_refused(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        answers_until(patch, 5)
        with pytest.raises(Stop):
            evaluate(model(), loader(), THREATS, folder=tmp_path)
    part_file = min((tmp_path / "parts").iterdir())
    part_file.write_bytes(part_file.read_bytes()[:50])
    evaluate(model(), loader(), THREATS, folder=tmp_path)
    assert "Its images are judged again" in caplog.text
    assert_same_rows(tmp_path, undisturbed)
    (tmp_path / "ledger.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"ledger.safetensors is not a whole safetensors file"):
        evaluate(model(), loader(), THREATS, folder=tmp_path)


def test_later_threats_join_those_that_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate(model(), loader(), THREATS[:1], folder=tmp_path)
    with monkeypatch.context() as patch:
        asked = answers_until(patch, 99)
        report = evaluate(model(), loader(), [FGSM(eps=4 / 255), PGD(eps=2 / 255, steps=1)], folder=tmp_path)
    assert len(asked) == 8  # two new threats, four batches: clean and the first are not run again
    assert [score.spec for score in report.threats] == [*SPECS, "pgd(eps=2/255, steps=1)"]
    assert [score.name for score in report.threats] == ["clean", "pgd", "fgsm", "pgd(eps=2/255, steps=1)"]
    assert report["pgd"].eps == 8 / 255  # remembered, though not given this time
    again = evaluate(model(), loader(), folder=tmp_path)
    assert again.to_dict() == report.to_dict()
    assert json.loads((tmp_path / "report.json").read_text()) == report.to_dict()
    alone = evaluate(model(), loader(), [*THREATS, PGD(eps=2 / 255, steps=1)])
    assert report.worst_case.correct == alone.worst_case.correct


def test_a_threat_that_was_not_finished_is_told_and_left_out_of_the_worst_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        answers_until(patch, 5)  # four batches clean, then one of fgsm, the cheaper threat
        with pytest.raises(Stop):
            evaluate(model(), loader(), THREATS, folder=tmp_path)
    report = evaluate(model(), loader(), THREATS[:1], folder=tmp_path)
    assert report["fgsm"].n == 6
    assert report.remarks == [
        "fgsm(eps=4/255) has seen 6 of 22 images and is left out of the worst case; run it again."
    ]
    assert "note: fgsm(eps=4/255) has seen 6 of 22" in str(report)
    assert report.worst_case.n == 22
    assert not evaluate(model(), loader(), THREATS, folder=tmp_path).remarks


@pytest.mark.parametrize(
    ("other", "data", "signature", "letter"),
    [
        (model(seed=1), loader(), {}, "weights was .*, now "),
        (model(mean=(0.4, 0.4, 0.4)), loader(), {}, "weights was .*, now "),
        (model(attention=["rpc"]), loader(), {}, "model was VisionTransformer, now VisionTransformer, rpc at 1 sites"),
        (model(), loader(only=torch.arange(5)), {}, "images was 22, now 5"),
        (model(), loader(split="train"), {}, "data was digits/validation, now digits/train"),
        (model(), loader(), {"data.crop_pct": 0.9}, "data.crop_pct was not noted, now 0.9"),
    ],
    ids=["weights", "normalisation", "attention", "images", "data", "signature"],
)
def test_the_ledger_of_something_else_is_refused(
    other: Any, data: Any, signature: dict[str, object], letter: str, undisturbed: Path
) -> None:
    before = {path: path.read_bytes() for path in undisturbed.iterdir() if path.is_file()}
    with pytest.raises(RunError, match=f"holds the ledger of another evaluation: .*{letter}") as caught:
        evaluate(other, data, THREATS, folder=undisturbed, signature=signature)
    assert "Choose another folder (--out), or start again (--fresh" in str(caught.value)
    assert {path: path.read_bytes() for path in undisturbed.iterdir() if path.is_file()} == before


def test_rows_without_a_subject_are_refused(tmp_path: Path) -> None:
    evaluate(model(), loader(), folder=tmp_path)
    (tmp_path / "ledger.json").unlink()
    with pytest.raises(RunError, match=r"holds rows, but no ledger.json says of what"):
        evaluate(model(), loader(), folder=tmp_path)


def test_a_fingerprint_sees_weights_buffers_and_settings_of_attention() -> None:
    prints = {
        fingerprint(model()),
        fingerprint(model(seed=1)),
        fingerprint(model(std=(1, 1, 1))),
        fingerprint(model(attention=[part("rpc", iterations=2)])),
        fingerprint(model(attention=[part("rpc", iterations=3)])),
    }
    assert len(prints) == 5
    assert fingerprint(model()) == fingerprint(model())
    assert fingerprint(torch.nn.Sequential(model())) != ""


def test_a_fingerprint_is_of_the_numbers_and_not_of_how_they_lie_in_memory() -> None:
    net = model()
    expected = []
    for number in (torch.tensor([3]), torch.arange(12).view(1, 12)[:, 3]):
        net.register_buffer("number", number)
        expected.append(fingerprint(net))
    assert expected[0] == expected[1]


def test_a_batch_costs_the_same_after_many_images(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, compared = Ledger(), []
    search = torch.searchsorted
    monkeypatch.setattr(torch, "searchsorted", lambda run, ids: (compared.append(len(run)), search(run, ids))[1])
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(0))
    for ids in order.split(8):
        assert ledger.lacks("pgd", ids).all()
        ledger.add("pgd", {"id": ids, "correct": ids % 2 == 0})
        assert not ledger.lacks("pgd", ids).any()
    assert len(compared) <= 3 * 512 * 10  # sorted runs, each twice as long as the next one
    assert (ledger.number("pgd"), ledger.correct("pgd")) == (4096, 2048)
    assert torch.equal(ledger.rows("pgd")["id"], torch.arange(4096))
    ledger.add("pgd", {"id": torch.tensor([7, 5000]), "correct": torch.tensor([False, True])})
    assert (ledger.number("pgd"), ledger.correct("pgd")) == (4097, 2049)  # the first row of an image counts


def test_a_ledger_that_is_cleared_leaves_no_findings(tmp_path: Path) -> None:
    for name in ("ledger.json", "report.json", "findings.json", "sanity.json"):
        (tmp_path / name).write_text("{}")
    Ledger(tmp_path).clear()
    assert not list(tmp_path.iterdir())


def test_settings_of_data_that_matter_are_named() -> None:
    assert data_settings(DATA) == {"data.val_num_samples": 22}  # batches of another size judge the same images


def _evaluate_share(rank: int, folder: str, stop: bool) -> None:
    with process_group("cpu") as process:
        mine = loader(rank=process.rank, world_size=2)
        if not stop:
            report = evaluate(model(), mine, THREATS, folder=folder, process=process)
            assert report["clean"].n == 22  # both know everything
            return
        with pytest.MonkeyPatch.context() as patch:
            answers_until(patch, 2 + rank)
            with pytest.raises(Stop):
                evaluate(model(), mine, THREATS, folder=folder, process=process)


def test_two_processes_judge_as_one_also_after_a_kill_and_in_another_number(undisturbed: Path, tmp_path: Path) -> None:
    in_two_processes(_evaluate_share, str(tmp_path / "two"), False)
    assert_same_rows(tmp_path / "two", undisturbed, atol=1e-5)
    for name in ("to_one", "to_two"):
        in_two_processes(_evaluate_share, str(tmp_path / name), True)
    evaluate(model(), loader(), THREATS, folder=tmp_path / "to_one")
    in_two_processes(_evaluate_share, str(tmp_path / "to_two"), False)
    for name in ("to_one", "to_two"):
        assert_same_rows(tmp_path / name, undisturbed, atol=1e-5)


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evaluate(model(), loader(), THREATS)
    assert not list(tmp_path.iterdir())


def test_one_file_reads_back_to_the_same_columns(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.add("a/b(c=1/2)", {"id": torch.tensor([3, 1]), "correct": torch.tensor([True, False])})
    ledger.add("a/b(c=1/2)", {"id": torch.tensor([1, 2]), "correct": torch.tensor([True, True])})
    ledger.save()
    columns = load_ledger(tmp_path / "ledger.safetensors")["a/b(c=1/2)"]
    assert load_ledger(tmp_path).keys() == {"a/b(c=1/2)"}
    assert columns["id"].tolist() == [1, 2, 3]
    assert columns["correct"].tolist() == [False, True, True]  # the first word about an image counts


def test_a_false_start_killed_before_its_first_image_locks_nothing(tmp_path: Path) -> None:
    Ledger(tmp_path).claim({"model": "one"}, [])
    Ledger(tmp_path).claim({"model": "another"}, [])
    Ledger(tmp_path).add("clean", {"id": torch.tensor([1]), "correct": torch.tensor([True])})
    with pytest.raises(RunError, match=r"model was another, now one.*\(--out\).*\(--fresh"):
        Ledger(tmp_path).claim({"model": "one"}, [])
