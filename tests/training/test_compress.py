"""One command compresses a run: every artefact is there, the masks hold, and an interrupted command goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from small_run import SMALL
from vitruvius.cli import main, masks
from vitruvius.compression import steps
from vitruvius.compression.files import load_masks
from vitruvius.models import load_model
from vitruvius.training import train

WORDS = ["--sparsity", "0.7", "--rank", "2", "--epochs", "1", "--threat", "uniform_noise:eps=32/255"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    train("digits/softmax", [*SMALL, f"out={home / 'run'}"], quiet=True)
    assert main(["compress", str(home / "run"), *WORDS]) == 0
    return home


def test_every_artefact_is_in_the_folder(home: Path) -> None:
    names = {path.name for path in (home / "run_compressed").iterdir()}
    assert {
        "maps.safetensors", "masks.safetensors", "recipe.yaml", "tuned", "evaluation_before", "evaluation_compressed",
        "export.pt2", "page.html", "compress.json",
    } <= names  # fmt: skip
    assert (home / "run_compressed" / "tuned" / "cycles.json").is_file()


def test_the_page_shows_both_evaluations(home: Path) -> None:
    page = (home / "run_compressed" / "page.html").read_text(encoding="utf-8")
    assert 'id="threats"' in page
    for name in ("before", "compressed"):
        report = json.loads((home / "run_compressed" / f"evaluation_{name}" / "report.json").read_text())
        assert report["threats"][0]["name"] == "clean"
        for threat in report["threats"]:
            assert f"{100 * threat['accuracy']:.1f} %" in page


def test_the_compressed_run_has_mask_and_rank(home: Path) -> None:
    model = load_model(home / "run_compressed" / "tuned")
    keep = load_masks(home / "run_compressed" / "masks.safetensors").keep
    for name, pattern in keep.items():
        core = model.model.get_submodule(name).core
        assert torch.equal(core.mask.keep, pattern)
        assert core.low_rank.q[0].out_features == 2


def test_the_same_command_goes_on_and_another_wish_needs_another_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made_again(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(masks, "maps", made_again)
    monkeypatch.setattr(masks, "masks", made_again)
    assert main(["compress", str(home / "run"), *WORDS]) == 0
    assert main(["compress", str(home / "run"), "--sparsity", "0.5"]) == 1
    assert "holds another compression" in capsys.readouterr().err


def test_new_stages_stand_before_the_kernel_that_a_run_has() -> None:
    mask = {"use": "mask", "file": "masks.safetensors"}
    assert steps._with_stages([{"use": "rpc", "iterations": 2}], [mask]) == [
        mask,
        {"use": "rpc", "iterations": 2},
    ]
    assert steps._with_stages(["symmetric"], [mask]) == ["symmetric", mask]
    assert steps._with_stages(["symmetric", "top_k:share=0.2"], [mask]) == ["symmetric", mask, "top_k:share=0.2"]
    old = [{"use": "low_rank", "rank": 2}, {"use": "mask", "file": "old"}]
    assert steps._with_stages(old, [{"use": "low_rank", "rank": 1}, mask]) == [old[0], mask]


def test_a_model_by_name_is_compressed_without_training_or_with_it(home: Path, tmp_path: Path) -> None:
    words = ["vitruvius/vit_digits", "model.kwargs={depth: 1, embed_dim: 24}", f"model.weights={home / 'run'}"]
    words += ["data.dataset=digits", "data.train_num_samples=48", "--images", "24", "--sparsity", "0.7"]
    assert main(["compress", *words, "--out", str(tmp_path / "pruned")]) == 0
    model, dense = load_model(tmp_path / "pruned" / "tuned"), load_model(home / "run")
    keep = load_masks(tmp_path / "pruned" / "masks.safetensors").keep["blocks.0.attn"]
    assert torch.equal(model.model.blocks[0].attn.core.mask.keep, keep)
    for name, value in dense.model.state_dict().items():
        assert torch.equal(model.model.state_dict()[name], value), name
    assert (tmp_path / "pruned" / "page.html").is_file()
    tune = ["--epochs", "1", "data.batch_size=8", "train.device=cpu", "train.holdout=0.25"]
    assert main(["compress", *words, *tune, "--out", str(tmp_path / "tuned")]) == 0
    tuned = load_model(tmp_path / "tuned" / "tuned")
    assert not torch.equal(tuned.model.head.weight, dense.model.head.weight)
    assert main(["compress", *words, "train.lr=1", "--out", str(tmp_path / "none")]) == 1
    assert not (tmp_path / "none").exists()
