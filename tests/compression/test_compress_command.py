"""The verbs maps, masks and export on a run; a run with a mask cannot be evaluated without it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vitruvius import create_model
from vitruvius._files import load_tensors
from vitruvius.cli import main
from vitruvius.compression.files import load_maps, load_masks, save_maps
from vitruvius.compression.masks import make_masks
from vitruvius.listing import find_recipe
from vitruvius.models import load_model
from vitruvius.report.run import read_runs
from vitruvius.report.sections.maps import cycle_lines
from vitruvius.training import read_recipe, train

SHORT = [
    "train.epochs=1", "train.warmup_epochs=0", "data.train_num_samples=192", "data.val_num_samples=64",
    "model.kwargs.depth=1", "model.kwargs.num_classes=10",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense run, its maps and masks, and a run fine-tuned with the masks."""
    home = tmp_path_factory.mktemp("runs")
    dense, maps, masks = home / "dense", home / "maps.safetensors", home / "masks.safetensors"
    train(read_recipe(find_recipe("digits/softmax"), [f"out={dense}", *SHORT]), quiet=True)
    assert main(["maps", str(dense), "--out", str(maps), "--figure", str(home / "maps.png")]) == 0
    wanted = ["--sparsity", "0.8", "--of", str(dense), "--figure", str(home / "masks.png"), "--out", str(masks)]
    assert main(["masks", str(maps), *wanted]) == 0
    pattern = [f"model.weights={dense}", f"attention.0.parts.0.file={masks}", f"out={home / 'masked'}"]
    train(read_recipe(find_recipe("digits/masked"), [*pattern, *SHORT]), quiet=True)
    return home


def test_files_and_figures_are_written(runs: Path) -> None:
    maps, sites = load_maps(runs / "maps.safetensors")
    assert sites["blocks.0.attn"].grid == (4, 4)
    torch.testing.assert_close(maps["blocks.0.attn"].sum(-1), torch.ones(3, 16))
    _, told = load_tensors(runs / "maps.safetensors")
    assert json.loads(told["images"]) == 192  # those that the run was trained on, each once
    assert load_masks(runs / "masks.safetensors").sparsity.total.kept == 768 - round(0.8 * 768)
    assert (runs / "maps.png").read_bytes()[:4] == (runs / "masks.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(runs.glob("*.partial*"))


def test_the_mask_is_in_the_checkpoint_and_loading_the_run_brings_it_back(runs: Path) -> None:
    keep = load_masks(runs / "masks.safetensors").keep["blocks.0.attn"]
    for file in ("best", "last"):
        state, _ = load_tensors(runs / "masked" / f"{file}.safetensors")
        assert torch.equal(state["blocks.0.attn.core.mask.keep"], keep)
    (runs / "masks.safetensors").rename(runs / "moved.safetensors")
    try:
        model = load_model(runs / "masked")
    finally:
        (runs / "moved.safetensors").rename(runs / "masks.safetensors")
    assert torch.equal(model.model.blocks[0].attn.core.mask.keep, keep)
    assert main(["evaluate", str(runs / "masked"), "attention=[]"]) == 1  # the mask cannot be talked away


def test_maps_of_a_masked_run_are_zero_where_its_mask_removes(runs: Path, tmp_path: Path) -> None:
    assert main(["maps", str(runs / "masked"), "--augment", "--out", str(tmp_path / "maps.npy")]) == 0
    maps = np.load(tmp_path / "maps.npy")
    keep = load_masks(runs / "masks.safetensors").keep["blocks.0.attn"].numpy()
    assert maps.shape == (1, 3, 16, 16)
    assert (maps[0][~keep] == 0).all()
    assert (maps[0][keep] > 0).all()


def test_cycles_of_masks_and_of_a_run_agree_and_reach_the_page(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cycles", str(runs / "masks.safetensors")]) == 0
    of_file = capsys.readouterr().out
    assert main(["cycles", str(runs / "masked")]) == 0
    of_run = capsys.readouterr().out
    assert of_file.splitlines()[:4] == of_run.splitlines()[:4]
    assert "79.95 %" in of_run
    told = json.loads((runs / "masked" / "cycles.json").read_text())
    assert told["rows"][0]["sparsity"] == 0
    assert told["rows"][0]["total"] > told["rows"][1]["total"]
    (line,) = cycle_lines(read_runs([runs / "masked"])[0])
    assert f"{told['rows'][1]['total']:,} cycles" in line


def test_cycles_of_a_run_without_masks_are_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cycles", str(runs / "dense")]) == 1
    assert "has no masks" in capsys.readouterr().err


def test_vitcods_array_becomes_a_file_of_masks_and_a_stage_reads_it(runs: Path, tmp_path: Path) -> None:
    keep = load_masks(runs / "masks.safetensors").keep
    np.save(tmp_path / "info_0.8.npy", np.stack([~pattern.numpy() for pattern in keep.values()]))  # True = pruned
    words = ["convert", str(tmp_path / "info_0.8.npy"), "--from", "vitcod-masks"]
    assert main([*words, "--out", str(tmp_path / "m.safetensors")]) == 0
    for name, pattern in load_masks(tmp_path / "m.safetensors").keep.items():
        assert torch.equal(pattern, keep[name])
    parts = [{"use": "mask", "file": str(tmp_path / "info_0.8.npy")}]
    rule = {"where": "blocks.*.attn", "parts": parts}
    model = create_model("vitruvius/vit_digits", attention=[rule], depth=1, num_heads=3)
    assert torch.equal(model.model.blocks[0].attn.core.mask.keep, keep["blocks.0.attn"])


def test_average_maps_are_not_taken_for_masks(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    maps, _ = load_maps(runs / "maps.safetensors")
    np.save(tmp_path / "attention_score.npy", np.stack([map_.numpy() for map_ in maps.values()]))
    words = ["convert", str(tmp_path / "attention_score.npy"), "--from", "vitcod-masks", "--out", str(tmp_path / "m")]
    assert main(words) == 1
    assert "average maps?" in capsys.readouterr().err


@pytest.fixture(scope="module")
def two_sites(runs: Path) -> Path:
    """Maps of a model of two layers."""
    maps, _ = load_maps(runs / "maps.safetensors")
    (one,) = maps.values()
    save_maps(runs / "two.safetensors", {"blocks.0.attn": one, "blocks.1.attn": one.clone()})
    return runs / "two.safetensors"


def test_each_pattern_of_sites_has_its_own_rule(two_sites: Path, tmp_path: Path) -> None:
    rules = ["--rule", "blocks.0.*=ratio:ratio=0.5", "--rule", "information:mass=1.0"]
    assert main(["masks", str(two_sites), *rules, "--out", str(tmp_path / "m.safetensors")]) == 0
    masks = load_masks(tmp_path / "m.safetensors")
    alone = make_masks(load_maps(two_sites)[0], "ratio:ratio=0.5")
    assert torch.equal(masks.keep["blocks.0.attn"], alone.keep["blocks.0.attn"])
    assert masks.keep["blocks.1.attn"].all()
    assert masks.rule.startswith("blocks.0.*=Ratio(")


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (["blocks.9.*=ratio"], "fits no site that is left"),
        (["blocks.0.*=ratio"], "no rule for blocks.1.attn"),
        (["ratio", "information"], "there is a rule for '*' already"),
    ],
)
def test_rules_that_do_not_cover_the_sites_are_refused(
    rules: list[str], says: str, two_sites: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for rule in rules for word in ("--rule", rule)]
    assert main(["masks", str(two_sites), *words]) == 1
    assert says in capsys.readouterr().err
    both = ["--rule", "blocks.0.*=ratio", "--rule", "ratio", "--sparsity", "0.5"]
    assert main(["masks", str(two_sites), *both]) == 1
    assert "moves the limit of one rule" in capsys.readouterr().err
