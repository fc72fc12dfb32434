"""Reading run folders: what cannot be a run is an error, what is damaged is remarked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vitruvius._errors import RunError
from vitruvius._files import save_tensors
from vitruvius.analysis.recording import Examples, SiteMaps, save_examples
from vitruvius.evaluation import Report
from vitruvius.evaluation.result import Score
from vitruvius.report import write_page
from vitruvius.report.run import Run, read_runs


def read(folder: Path) -> Run:
    return read_runs([folder])[0]


def test_what_is_no_run_folder_is_an_error(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="at least one"):
        write_page([], tmp_path / "report.html")
    with pytest.raises(RunError, match="does not exist"):
        write_page([tmp_path / "nowhere"], tmp_path / "report.html")
    with pytest.raises(RunError, match="is a file"):
        read(run / "config.yaml")
    (run / "config.yaml").unlink()
    with pytest.raises(RunError, match=r"no config.yaml. It holds: .*metrics.jsonl"):
        read(run)
    assert list(tmp_path.glob("*.html")) == []


@pytest.mark.parametrize("text", ["a: [1", "just words", "- 1\n- 2", ""])
def test_a_recipe_that_is_no_table_is_an_error(run: Path, text: str) -> None:
    (run / "config.yaml").write_text(text)
    with pytest.raises(RunError, match="resolved recipe"):
        read(run)


def test_lines_that_are_cut_off_or_strange_are_ignored_with_a_remark(run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "[1]", "", *lines[1:]])[:-20])
    found = read(run)
    assert [row["epoch"] for row in found.epochs] == [0, 1, 2]
    assert "metrics.jsonl: line 2 is not a row with an epoch; it is ignored." in found.remarks
    assert "metrics.jsonl: line 6 is cut off; it is ignored." in found.remarks


def test_of_an_epoch_written_twice_the_later_row_counts(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"epoch": 2, "train_loss": 0.25}) + "\n")
    assert [row["train_loss"] for row in read(run).epochs if row["epoch"] == 2] == [0.25]


def test_values_that_are_not_finite_are_remarked_and_leave_a_gap(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[1]["train_loss"], rows[2]["train_loss"] = float("nan"), float("inf")
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert any("train_loss is not a finite number in 2 of 4 epochs (first: 2)" in r for r in read(run).remarks)
    assert write_page([run], run / "report.html").stat().st_size > 10_000


def test_a_threat_without_a_finite_accuracy_is_left_out_with_a_remark(run: Path) -> None:
    path = run / "evaluation" / "report.json"
    report = json.loads(path.read_text())
    report["threats"][0]["accuracy"] = float("nan")
    report["threats"].append("words")
    path.write_text(json.dumps(report))
    found = read(run)
    assert found.clean is None
    assert len(found.threats) == 6
    assert sum("has no finite accuracy" in remark for remark in found.remarks) == 2


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


def test_maps_of_another_shape_or_with_nan_are_left_out_and_bfloat16_is_read(run: Path) -> None:
    maps = {"blocks.10.attn": torch.rand(2, 5, 5), "blocks.2.attn": torch.rand(2, 5, 5).bfloat16()}
    broken = {"nan": torch.full((1, 2, 2), torch.nan), "flat": torch.rand(5, 5)}
    save_tensors(run / "maps.safetensors", maps | broken)
    found = read(run)
    assert list(found.maps) == ["blocks.2.attn", "blocks.10.attn"]
    torch.testing.assert_close(torch.from_numpy(found.maps["blocks.2.attn"]), maps["blocks.2.attn"].float())
    assert len([remark for remark in found.remarks if "is not a finite map" in remark]) == 2


def test_examples_come_back_as_they_were_saved_and_maps_that_do_not_fit_are_left_out(run: Path) -> None:
    random = np.random.default_rng(0)
    early, late, odd = (random.random((2, 3, n, n)).astype(np.float16) for n in (7, 5, 9))
    sites = [("early", early, (3, 2)), ("late", late, (2, 2)), ("odd", odd, (3, 2))]
    examples = Examples(
        images=random.integers(0, 255, (2, 3, 6, 4), dtype=np.uint8),
        labels=["cat", "7"],
        predictions=["", ""],
        sites=[SiteMaps(name=name, maps=maps, grid=grid, num_prefix_tokens=1) for name, maps, grid in sites],
        pictures=["p", "p"],
        threats=["", "pgd"],
    )
    save_examples(run, examples)
    found = read(run)
    assert found.examples is not None
    for name in ("labels", "predictions", "pictures", "threats"):
        assert getattr(found.examples, name) == getattr(examples, name)
    np.testing.assert_array_equal(found.examples.images, examples.images)
    assert [(site.name, site.grid) for site in found.examples.sites] == [("early", (3, 2)), ("late", (2, 2))]
    np.testing.assert_array_equal(found.examples.sites[0].maps, early)
    assert any("odd has shape (2, 3, 9, 9)" in remark for remark in found.remarks)


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
    report = Report(data="digits", num_images=10, threats=scores, worst_case=scores[1], remarks=["3 were broken"])
    report.save(run / "evaluation" / "report.json")
    found = read(run)
    assert [(t.name, t.spec, t.eps, t.accuracy, t.low, t.high, t.n) for t in found.threats] == [
        (s.name, s.spec, s.eps, s.accuracy, s.low, s.high, s.n) for s in scores
    ]
    assert "evaluation: 3 were broken" in found.remarks
