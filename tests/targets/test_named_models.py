"""A model by name: whose weights it has, and whose numbers the classes of a folder get."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import save_file

from vitruvius._errors import ConfigError
from vitruvius.cli import main
from vitruvius.cli.evaluate import evaluate
from vitruvius.models import create_model
from vitruvius.targets import open_target

SIZES = ["model.kwargs.img_size=16", "model.kwargs.patch_size=8", "device=cpu"]
CLASSES = ["beaver", "cat", "cow", "dog"]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A model of four classes as a file, and pictures of two of them."""
    weights = tmp_path / "weights.safetensors"
    made = create_model("test_vit", img_size=16, patch_size=8, num_classes=4, seed=3)
    save_file({key: value.half() for key, value in made.model.state_dict().items()}, weights)
    for label in ("cat", "dog"):
        folder = tmp_path / "pictures" / "val" / label
        folder.mkdir(parents=True)
        Image.new("RGB", (16, 16), (200, 90, 10)).save(folder / "one.png")
    data = ["data.dataset=folder", f"data.root={tmp_path / 'pictures'}", "data.workers=0"]
    return [*SIZES, "model.kwargs.num_classes=4", f"model.weights={weights}", *data]


def test_a_file_of_weights_takes_the_place_of_the_pretrained_ones(words: list[str]) -> None:
    target = open_target("test_vit", words)
    assert not target.config.model.pretrained
    made = create_model("test_vit", img_size=16, patch_size=8, num_classes=4, seed=3)
    assert (target.model.model.head.weight == made.model.head.weight.half().float()).all()


def test_a_folder_of_fewer_classes_needs_their_numbers(words: list[str], tmp_path: Path) -> None:
    for verb in (["evaluate"], ["attack", "--threat", "fgsm:eps=1/255"]):
        out = tmp_path / "out"
        assert main([*verb, "test_vit", *words, "--out", str(out)]) == 1
        assert not out.exists()
    with pytest.raises(
        ConfigError,
        match=r"has 2 classes, .* 0 … 1 by their names, and the model knows 4\. Say data\.class_map=imagenet-1k if",
    ):
        evaluate("test_vit", *words, out=tmp_path / "out")
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES))
    mapped = [*words, f"data.class_map={tmp_path / 'classes.txt'}"]
    found = evaluate("test_vit", *mapped, out=tmp_path / "out")
    assert found.report is not None
    assert found.report.ledger.rows("clean")["label"].tolist() == [1, 3]
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "out"), "--out", str(page)]) == 0  # as if it were a run
    assert "fgsm" not in page.read_text()
    assert main(["evaluate", "test_vit", *mapped, "--threat", "fgsm:eps=1/255", "--out", str(tmp_path / "out")]) == 0
    assert main(["report", str(tmp_path / "out"), "--out", str(page)]) == 0
    assert "fgsm" in page.read_text()


def test_a_model_without_a_head_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SIZES, "model.kwargs.num_classes=0", "model.pretrained=false", "data.dataset=digits"]
    for verb in (["evaluate"], ["attack", "--threat", "fgsm:eps=1/255"]):
        assert main([*verb, "test_vit", *words, "--out", str(tmp_path / "out")]) == 1
        assert "test_vit has no head (num_classes = 0)" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
