"""The page of results says what the files of experiments/results say."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments import collected, figures, packs, tables

ROOT = Path(__file__).parents[2]


def threat(bits: list[int]) -> dict[str, object]:
    return {"n": len(bits), "correct": base64.b64encode(np.packbits(np.array(bits, np.uint8)).tobytes()).decode()}


def test_every_table_is_made_from_the_results() -> None:
    page = (ROOT / "docs" / "RESULTS.md").read_text()
    assert tables.with_tables(page) == page


def test_every_figure_of_the_page_is_drawn_from_the_results(tmp_path: Path) -> None:
    """`python -m experiments tables` writes them."""
    drawn = {file.name for file in figures.write_figures(figures=tmp_path)}
    shown = set(re.findall(r"figures/(results_\w+\.png)", (ROOT / "docs" / "RESULTS.md").read_text()))
    assert drawn == shown
    assert all((ROOT / "docs" / "figures" / name).is_file() for name in shown)


def test_a_study_is_kept_without_the_folders_of_its_machine(tmp_path: Path) -> None:
    study = tmp_path / "study"
    study.mkdir()
    settings = {"data.root": "/somewhere/images", "images": 2}
    versions = {"model.safetensors": {"versions": {"torch": "2.15"}}}
    for name, content in (("study.json", {"study": "kpca", "settings": settings}), ("subjects.json", versions)):
        (study / name).write_text(json.dumps(content))
    (study / "rows.jsonl").write_text(json.dumps({"model": "/somewhere/runs/a", "key": "k"}) + "\n")
    (study / "table.csv").touch()
    kept = collected.read_study(study)
    assert kept["settings"] == {"data.root": "images", "images": 2}
    assert kept["rows"] == [{"model": "a", "key": "k"}]
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
    (run / "config.yaml").write_text("seed: 0\ndata: {root: /somewhere/else/cifar10.npz}\n")
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
