"""The pages of results say what the files of experiments/results say."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments import collected, figures, milliseconds, packs, tables

from small_run import small_run

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))


def threat(bits: list[int]) -> dict[str, object]:
    return {"n": len(bits), "correct": base64.b64encode(np.packbits(np.array(bits, np.uint8)).tobytes()).decode()}


def test_every_table_is_made_from_the_results() -> None:
    pages = [page.read_text() for page in PAGES]
    assert [tables.with_tables(page) for page in pages] == pages
    assert sum(page.count("<!-- table") for page in pages) >= 13


def test_every_figure_of_the_page_is_drawn_from_the_results(tmp_path: Path) -> None:
    """`python -m experiments tables` writes them."""
    drawn = {file.name for file in figures.write_figures(figures=tmp_path)}
    shown = {name for page in PAGES for name in re.findall(r"figures/(results_\w+\.png)", page.read_text())}
    assert drawn == shown
    assert all((ROOT / "docs" / "figures" / name).is_file() for name in shown)


ROW = {"key": "k", "analysis": "e", "statistic": "max"}


def test_a_study_is_kept_without_the_folders_of_its_machine(tmp_path: Path) -> None:
    study = tmp_path / "study"
    study.mkdir()
    settings = {"data.root": "/somewhere/images", "images": 2}
    versions = {"model.safetensors": {"versions": {"torch": "2.15"}}}
    for name, content in (("study.json", {"study": "kpca", "settings": settings}), ("subjects.json", versions)):
        (study / name).write_text(json.dumps(content))
    (study / "rows.jsonl").write_text(json.dumps({"model": "/somewhere/runs/a", **ROW}) + "\n")
    (study / "table.csv").touch()
    (study / "a").mkdir()
    claims = ("above chance by 2", "below chance by 1", "indistinguishable from chance")
    lines = [
        f"site,{head},e,max,{null},{claim}" for head, claim in enumerate(claims) for null in ("gaussian", "spectrum")
    ]
    (study / "a" / "table.csv").write_text("\n".join(["site,head,analysis,statistic,null,claim", *lines]))
    kept = collected.read_study(study)
    signs = kept["rows"][0].pop("signs")
    assert signs == {"gaussian": "+-0", "spectrum": "+-0"}
    assert tables.sides({"signs": signs}) == " (1 above, 1 below)"
    assert kept["settings"] == {"data.root": "images", "images": 2}
    assert kept["rows"] == [{"model": "a", **ROW}]
    assert "somewhere" not in json.dumps(kept)


def test_runs_are_compared_image_by_image() -> None:
    one, other = threat([1, 1, 1, 1, 0, 0, 1, 1, 1]), threat([0, 0, 0, 1, 0, 0, 0, 0, 1])
    difference, p = tables.paired(one, other)
    assert difference == 5 / 9
    assert p == 2 / 2**5  # five discordant images, all on one side
    assert tables.paired(one, one) == (0.0, 1.0)


def test_runs_without_single_answers_are_compared_by_their_accuracies() -> None:
    one, other = {"accuracy": 0.8, "n": 100}, {"accuracy": 0.6, "n": 100}
    difference, p = tables.unpaired(one, other)
    assert round(difference, 12) == 0.2
    assert abs(p - 0.00203) < 5e-5  # z = 0.2 / sqrt(0.7 · 0.3 · 2 / 100) = 3.086
    assert tables.unpaired(one, one)[1] == 1.0


def test_holm_multiplies_each_p_value_by_the_number_of_those_not_smaller() -> None:
    found = tables.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.5})
    assert found == pytest.approx({"a": 0.04, "c": 0.09, "b": 0.09, "d": 0.5})


def test_a_collapse_is_a_fall_by_half_within_two_epochs_and_alarms_before_it_are_false() -> None:
    values = [0.30, 0.31, 0.20, 0.14, 0.15, 0.05, 0.04]
    alarms = [0, 1, 1, 2, 3, 3, 4]  # so far: it rang after epochs 2, 4, 5 and 7
    epochs = [{"multi_step_accuracy": value, "alarms": rung} for value, rung in zip(values, alarms, strict=True)]
    assert tables.collapses(epochs) == [3, 5, 6]
    assert tables.rings(epochs) == [1, 3, 4, 6]
    assert tables.false_alarms(epochs) == [1]
    assert tables.false_alarms(epochs[:3]) == [1]
    assert tables.numbers([1, 3, 4, 5]) == "2, 4–6"
    chosen = [{**row, "val_robust_accuracy": 0.3} for row in epochs]
    assert tables.collapses(chosen) == [], "the images that choose the weights count, where there are some"


def write_results(folder: Path, runs: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    for run in runs:
        (folder / f"{run['name']}.json").write_text(json.dumps(run))


def test_the_campaigns_that_wait_have_their_tables(tmp_path: Path) -> None:
    judged = threat([1, 0, 1, 1]) | {"accuracy": 0.75, "low": 0.4, "high": 0.9, "severity": None}
    epochs = [{"epoch": 0, "multi_step_accuracy": 0.2, "single_step_accuracy": 0.3, "alarms": 0}]
    threats = dict.fromkeys(("evaluation/clean", "evaluation/fgsm(eps=8/255)", "evaluation/pgd(eps=8/255)"), judged)
    runs = [kept_run(name, seed=0, threats=threats, epochs=epochs) for name in ("one_step", "pgd3")]
    write_results(tmp_path / "light_compact", runs)
    text = tables.print_table("light_compact", tmp_path)
    assert "| `one_step` | 0 | 75.0 | 75.0 | **75.0** [40.0, 90.0] | +0.0 (1) | 20.0, 20.0 | – | – | 0 |" in text
    milliseconds = {"dense": 20.0, "sparse": 15.0, "sparse_share": 0.75}
    masked = [kept_run(name, seed=0, threats=threats) for name in ("dense", "random")]
    masked.append(kept_run("information", seed=0, threats=threats, milliseconds=milliseconds))
    write_results(tmp_path / "vitcod_pretrained_90", masked)
    text = tables.print_table("vitcod_pretrained_90", tmp_path)
    assert "| `information` | 0 | **75.0** [40.0, 90.0] | +0.0 (1) | +0.0 (1) | 15.0 | 0.75 |" in text
    assert "| `dense` | 0 | **75.0** [40.0, 90.0] |  |  |  |  |" in text
    assert tables.print_table("light", tmp_path) == "Not run yet."


def test_milliseconds_are_those_of_each_run_beside_dense_attention(tmp_path: Path) -> None:
    small_run(tmp_path / "campaign" / "dense")
    (said,) = milliseconds.measure(tmp_path / "campaign", repeats=2)
    kept = json.loads((tmp_path / "campaign" / "dense" / "milliseconds.json").read_text())
    assert kept["dense"] > 0
    assert kept["sparse_share"] == kept["sparse"] / kept["dense"]
    assert said.startswith("dense: ")
    assert collected.read_findings(tmp_path / "campaign" / "dense")["milliseconds"] == kept


def test_the_interval_of_a_difference_comes_from_the_images_answered_otherwise() -> None:
    one, other = threat([1, 1, 0, 0] * 25), threat([0, 1, 0, 0] * 25)
    assert tables.half_width(one, other) == pytest.approx(1.96 * (0.25 * 0.75 / 99) ** 0.5)
    assert tables.half_width(one, one) == 0


def test_the_calibration_error_can_be_computed_again_from_the_confidences_kept() -> None:
    run = json.loads((tables.RESULTS / "attention_cifar_compact" / "softmax.json").read_text())
    clean = run["threats"]["all_images/clean"]
    confidence = np.frombuffer(base64.b64decode(clean["confidence"]), np.float16).astype(float)
    correct = tables.answers(clean)
    bins = np.minimum((confidence * 15).astype(int), 14)
    error = sum(abs(confidence[bins == b].mean() - correct[bins == b].mean()) * (bins == b).mean() for b in set(bins))
    assert error == pytest.approx(clean["ece"], abs=2e-3)


def test_runs_on_other_images_are_not_paired() -> None:
    with pytest.raises(SystemExit, match="9 images cannot be paired with 8"):
        tables.paired(threat([1] * 9), threat([1] * 8))


@pytest.mark.parametrize("file", sorted(collected.expected_heads()), ids=lambda file: file.stem)
def test_heads_quote_what_was_measured(file: Path) -> None:
    """`python -m experiments heads` writes them."""
    head = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert collected.expected_heads()[file] in head
    assert not any("Not run here" in line for line in head)


def test_a_head_is_written_once_and_no_longer_says_that_nobody_ran_it() -> None:
    text = "# A recipe.\n# Expected: 90 %. Not run here.\nseed: 0  # zero\n"
    once = collected.with_head(text, "# Measured: clean 89.0 %.")
    assert once == "# A recipe.\n# Expected: 90 %.\n# Measured: clean 89.0 %.\nseed: 0  # zero\n"
    assert collected.with_head(once, "# Measured: clean 89.0 %.") == once
    assert "Measured: 2" in collected.with_head(once, "# Measured: 2")
    assert "89.0" not in collected.with_head(once, "# Measured: 2")


def kept_run(name: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, "threats": {}, "status": "finished", **settings}


def write_run(folder: Path, name: str) -> Path:
    """A run folder without an evaluation."""
    run = folder / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 0\ndata: {root: /somewhere/else/cifar10.npz}\ntrain: {epochs: 2}\n")
    (run / "metrics.jsonl").write_text('{"epoch": 0, "seconds": 2.0}\n{"epoch": 1, "seconds": 1.0}\n')
    return run


def test_a_judged_run_is_not_replaced_by_one_that_is_not(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "light", "pgd3")
    known = tmp_path / "results" / "light" / "pgd3.json"
    known.parent.mkdir(parents=True)
    known.write_text(json.dumps(kept_run("pgd3", threats={"evaluation/clean": {"accuracy": 0.5}})))
    (said,) = collected.collect(tmp_path / "runs" / "light", tmp_path / "results")
    assert "stays: it is judged" in said
    assert json.loads(known.read_text())["threats"]
    known.write_text(json.dumps(kept_run("pgd3")))
    collected.collect(tmp_path / "runs" / "light", tmp_path / "results")
    kept = json.loads(known.read_text())
    assert kept["seconds"]["train"] == 3.0
    assert kept["config"]["data"]["root"] == "cifar10.npz", "no path of a machine"


def test_a_pack_leaves_weights_out_unless_they_are_asked_for(tmp_path: Path) -> None:
    sweep = tmp_path / "light"
    for name in ("a", "b"):
        run = write_run(sweep, name)
        for heavy in ("best.safetensors", "last.safetensors", "last_ema.safetensors", "state.pt", "state.previous.pt"):
            (run / heavy).write_bytes(b"heavy")
        (run / "evaluation").mkdir()
        (run / "evaluation" / "ledger.safetensors").write_bytes(b"rows")
    (sweep / "sweep.json").write_text("{}")
    packs.pack(sweep, tmp_path / "out", weights=["b"])
    home = packs.unpack(tmp_path / "out" / "light.tar.gz.00", tmp_path / "home")
    files = {file.relative_to(home).as_posix() for file in home.rglob("*") if file.is_file()}
    assert "b/best.safetensors" in files
    assert [file for file in files if "best" in file or "last" in file or "state" in file] == ["b/best.safetensors"]
    assert {"sweep.json", "a/evaluation/ledger.safetensors", "a/metrics.jsonl", "a/config.yaml"} <= files
    with pytest.raises(SystemExit, match="has no weights of c"):
        packs.pack(sweep, tmp_path / "out", weights=["c"])
    with pytest.raises(SystemExit, match="is not a folder"):
        packs.pack(tmp_path / "nowhere", tmp_path / "out", weights=[])


def test_a_pack_in_pieces_is_whole_again_and_a_lost_piece_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "light", "a")
    noise = np.random.default_rng(0).bytes(5 * 2**19)
    (run / "noise.bin").write_bytes(noise)
    said = packs.pack(tmp_path / "light", tmp_path / "out", weights=[], piece=1)
    assert [line.split()[0][-3:] for line in said] == [".00", ".01", ".02"]
    assert (
        packs.unpack(tmp_path / "out" / "light.tar.gz.00", tmp_path / "home") / "a" / "noise.bin"
    ).read_bytes() == noise
    (tmp_path / "out" / "light.tar.gz.01").unlink()
    with pytest.raises(SystemExit, match=r"lacks a piece of light.tar.gz: it has \[0, 2\]"):
        packs.unpack(tmp_path / "out" / "light.tar.gz.00", tmp_path / "home")


def test_seconds_of_a_speedrun_count_the_first_epoch_like_the_others() -> None:
    run = kept_run("vit", epochs=[{"seconds": seconds} for seconds in (30.0, 1.0, 3.0, 2.0)])
    assert tables.without_compiling(run) == 6.0 + 2.0


def test_masks_are_compared_with_chance_at_the_same_sparsity() -> None:
    judged = {
        name: {"evaluation/clean": threat(bits) | {"accuracy": 0.0}}
        for name, bits in (("random_80", [0, 0]), ("information_80", [1, 1]))
    }
    runs = [kept_run(name, threats=threats) for name, threats in judged.items()]
    assert tables.against_random(runs, runs[1]) == "+100.0 (0.5)"
    assert tables.against_random(runs, runs[0]) == ""
    assert tables.against_random(runs, kept_run("dense")) == ""
