"""Reading run folders: what cannot be a run is an error, what is damaged is remarked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vitruvius._errors import RunError
from vitruvius._files import save_tensors
from vitruvius.evaluation import Report
from vitruvius.evaluation.result import Score
from vitruvius.report import save_examples, write_page
from vitruvius.report._runs import Run, read_runs


def read(folder: Path) -> Run:
    return read_runs([folder])[0]


def test_no_run_is_an_error() -> None:
    with pytest.raises(RunError, match="at least one run folder"):
        write_page([], "report.html")


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nowhere does not exist; a report needs run folders"):
        write_page([tmp_path / "nowhere"], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_a_run(run: Path) -> None:
    with pytest.raises(RunError, match="is a file; a report needs run folders"):
        read(run / "config.yaml")


def test_a_folder_without_a_recipe_is_not_a_run(run: Path) -> None:
    (run / "config.yaml").unlink()
    with pytest.raises(RunError, match=r"is not a run folder: it has no config.yaml. It holds: .*metrics.jsonl"):
        read(run)


@pytest.mark.parametrize("text", ["a: [1", "just words", "- 1\n- 2", ""])
def test_a_recipe_that_is_no_table_is_an_error(run: Path, text: str) -> None:
    (run / "config.yaml").write_text(text)
    with pytest.raises(RunError, match=r"config.yaml .*A run folder needs its resolved recipe"):
        read(run)


def test_a_line_cut_off_at_the_end_is_ignored_with_a_remark(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    found = read(run)
    assert [row["epoch"] for row in found.epochs] == [0, 1, 2]
    assert "metrics.jsonl: line 4 is cut off; it is ignored." in found.remarks


def test_a_strange_line_is_ignored_with_a_remark(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], "[1]", "", *lines[1:]]) + "\n")
    found = read(run)
    assert len(found.epochs) == 4
    assert "metrics.jsonl: line 2 is not a row with an epoch; it is ignored." in found.remarks


def test_of_an_epoch_written_twice_the_later_row_counts(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"epoch": 2, "train_loss": 0.25}) + "\n")
    assert [row["train_loss"] for row in read(run).epochs if row["epoch"] == 2] == [0.25]


def test_values_that_are_not_finite_are_remarked_and_leave_a_gap(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[1]["train_loss"], rows[2]["train_loss"] = float("nan"), float("inf")
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read(run)
    expected = "metrics.jsonl: train_loss is not a finite number in 2 of 4 epochs (first: 2); the curve has gaps there."
    assert expected in found.remarks
    assert write_page([run], run / "report.html").stat().st_size > 10_000


def test_a_threat_without_a_finite_accuracy_is_left_out_with_a_remark(run: Path) -> None:
    path = run / "evaluation" / "report.json"
    report = json.loads(path.read_text())
    report["threats"][0]["accuracy"] = float("nan")
    report["threats"].append("words")
    path.write_text(json.dumps(report))
    found = read(run)
    assert found.threat("clean") is None
    assert len(found.threats) == 6
    assert next(remark for remark in found.remarks if "has no finite accuracy" in remark).count("clean") == 1


@pytest.mark.parametrize("text", ["{", "[1, 2]"])
def test_a_damaged_evaluation_is_remarked(run: Path, text: str) -> None:
    (run / "evaluation" / "report.json").write_text(text)
    found = read(run)
    assert found.threats == []
    assert any(r.startswith("evaluation/report.json") and r.endswith("is left out.") for r in found.remarks)


@pytest.mark.parametrize("name", ["maps.safetensors", "attention.safetensors", "best.safetensors"])
def test_a_truncated_tensor_file_is_remarked(run: Path, name: str) -> None:
    (run / name).write_bytes((run / name).read_bytes()[:100])
    found = read(run)
    assert sum(remark.startswith(name) for remark in found.remarks) == 1
    assert str(run) not in " ".join(found.remarks)


def test_maps_of_another_shape_or_with_nan_are_left_out(run: Path) -> None:
    maps = {"blocks.10.attn": torch.rand(2, 5, 5), "blocks.2.attn": torch.rand(2, 5, 5), "flat": torch.rand(5, 5)}
    save_tensors(run / "maps.safetensors", maps | {"nan": torch.full((1, 2, 2), torch.nan)})
    found = read(run)
    assert list(found.maps) == ["blocks.2.attn", "blocks.10.attn"]
    assert len([remark for remark in found.remarks if "is not a finite map" in remark]) == 2


def test_bfloat16_maps_are_read(run: Path) -> None:
    maps = torch.rand(2, 5, 5).bfloat16()
    save_tensors(run / "maps.safetensors", {"blocks.0.attn": maps})
    torch.testing.assert_close(torch.from_numpy(read(run).maps["blocks.0.attn"]), maps.float())


def test_examples_come_back_as_they_were_saved(run: Path) -> None:
    images, maps = torch.rand(2, 1, 6, 4), torch.rand(2, 3, 7, 7).softmax(-1)
    other = torch.rand(2, 1, 5, 5).softmax(-1)
    place = {"late": {"grid": (2, 2), "num_prefix_tokens": 1}}
    tensors = {"early": maps, "late": other, "odd": torch.rand(2, 1, 9, 9)}
    save_examples(run, images=images, maps=tensors, grid=(3, 2), num_prefix_tokens=1, labels=["cat", 7], sites=place)
    found = read(run)
    assert found.examples is not None
    assert found.examples.labels == ["cat", "7"]
    assert found.examples.predictions == ["", ""]
    expected = (images * 255).round().byte().expand(-1, 3, -1, -1)
    assert torch.equal(torch.from_numpy(found.examples.images), expected)
    assert [(site.name, site.grid) for site in found.examples.sites] == [("early", (3, 2)), ("late", (2, 2))]
    torch.testing.assert_close(torch.from_numpy(found.examples.sites[0].maps), maps.half())
    assert any("odd has shape (2, 1, 9, 9)" in remark for remark in found.remarks)


def test_images_of_examples_have_one_or_three_channels(run: Path) -> None:
    with pytest.raises(RunError, match=r"got \(2, 4, 8, 8\)"):
        save_examples(run, images=torch.rand(2, 4, 8, 8), maps={}, grid=(1, 1), num_prefix_tokens=0)


def test_numbers_stored_in_cores_are_counted_apart(run: Path) -> None:
    weights = {"blocks.0.attn.qkv.weight": torch.zeros(6, 2), "blocks.0.attn.core.low_rank.q.0.weight": torch.zeros(5)}
    weights["blocks.0.attn.core.mask.keep"] = torch.ones(2, 3, 3, dtype=torch.bool)  # a pattern, not parameters
    save_tensors(run / "best.safetensors", weights)
    assert read(run).weights == {"model": 12, "core.low_rank": 5, "core.mask": 0}


def test_the_report_of_an_evaluation_is_read_as_it_is_saved(run: Path) -> None:
    scores = [
        Score(name=name, spec=spec, correct=9, n=10, accuracy=0.9, low=0.6, high=0.98, eps=eps)
        for name, spec, eps in (("clean", "clean", None), ("pgd", "pgd(eps=4/255)", 4 / 255))
    ]
    report = Report(
        data="digits", num_images=10, threats=scores, worst_case=scores[1], remarks=["3 images were broken"]
    )
    report.save(run / "evaluation" / "report.json")
    found = read(run)
    assert [(t.name, t.spec, t.eps, t.accuracy, t.low, t.high, t.n) for t in found.threats] == [
        (s.name, s.spec, s.eps, s.accuracy, s.low, s.high, s.n) for s in scores
    ]
    assert "evaluation: 3 images were broken" in found.remarks
