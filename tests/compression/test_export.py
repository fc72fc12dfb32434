"""What is exported answers as the model does, folded, masked and sparse."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

import vitruvius
from failing_disk import files_limited_to
from vitruvius._errors import CheckpointError, ConfigError, MissingExtra, RunError, SurgeryError
from vitruvius._files import save_tensors
from vitruvius.attention import part
from vitruvius.cli import main
from vitruvius.compression.export import Format, export, load_export, prepare
from vitruvius.models import PixelModel, load_weights
from vitruvius.surgery import rewire

MODULE = sys.modules["vitruvius.compression.export"]
ONNX = all(importlib.util.find_spec(package) for package in ("onnx", "onnxruntime", "onnxscript"))
NEEDS_ONNX = pytest.mark.skipif(
    not ONNX, reason="onnx, onnxruntime or onnxscript is not installed: pip install 'vitruvius[export]'"
)
NAME = "vitruvius/vit_digits"
KEEP = torch.eye(16, dtype=torch.bool).expand(3, 16, 16) | (
    torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0)) > 0.7
)
RECIPE = {
    "model": {"name": NAME, "kwargs": {"depth": 1}},
    "attention": [
        {"where": "*", "parts": [{"use": "low_rank", "rank": 2}, {"use": "mask", "file": "gone"}, "softmax"]}
    ],
}


def compressed() -> PixelModel:
    return vitruvius.create_model(NAME, depth=1, attention=[part("low_rank", rank=2), part("mask", keep=KEEP)])


def images(number: int = 5) -> Tensor:
    return torch.rand(number, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("format", "sparse"), [("torch-export", False), pytest.param("onnx", True, marks=NEEDS_ONNX)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_export_answers_the_same_for_any_number_of_images(format: Format, sparse: bool, tmp_path: Path) -> None:
    model = compressed()
    answer = read_back(format, export(model, tmp_path / "model", format=format, sparse=sparse))
    with torch.no_grad():
        for number in (1, 5):
            torch.testing.assert_close(answer(images(number)), model(images(number)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sparse", [False, True])
def test_safetensors_tell_their_model_and_need_no_other_file(sparse: bool, tmp_path: Path) -> None:
    model = compressed()
    path = export(model, tmp_path / "model.safetensors", format="safetensors", sparse=sparse, recipe=RECIPE)
    loaded = load_export(path)
    core = loaded.model.blocks[0].attn.core
    assert core.describe() == ("sparse_softmax" if sparse else "mask → softmax")
    assert torch.equal(next(core.children()).keep, KEEP)
    with torch.no_grad():
        torch.testing.assert_close(loaded(images()), model(images()), atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a timm model, its average maps, and masks made of them, by commands that know no run."""
    home = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(0)
    weights = timm.create_model("test_vit").state_dict()
    save_file(weights, home / "weights.safetensors")
    maps, masks = str(home / "maps.safetensors"), str(home / "masks.safetensors")
    fake = ["data.dataset=fake", "data.num_classes=1000", "data.train_num_samples=3", "data.workers=0"]
    assert main(["maps", "test_vit", f"model.weights={home / 'weights.safetensors'}", *fake, "--out", maps]) == 0
    assert main(["masks", maps, "--sparsity", "0.5", "--out", masks]) == 0
    return home


def by_hand(home: Path, *, masked: bool) -> PixelModel:
    model = vitruvius.create_model("test_vit")
    load_weights(model, home / "weights.safetensors")
    return rewire(model, part("mask", file=home / "masks.safetensors")).eval() if masked else model.eval()


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("format", ["torch-export", "safetensors", pytest.param("onnx", marks=NEEDS_ONNX), "timm-hub"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_pretrained_model_is_pruned_and_exported_without_training(
    format: Format, masked: bool, pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / ("hub" if format == "timm-hub" else f"model.{format}")
    words = ["export", "test_vit", f"model.weights={pretrained / 'weights.safetensors'}", "--format", format]
    masks = ["--masks", str(pretrained / "masks.safetensors")] if masked else []
    code = main([*words, *masks, "--out", str(file)])
    if format == "timm-hub" and masked:
        assert code == 1
        assert "cannot do mask" in capsys.readouterr().err
        assert not file.exists()
        return
    assert code == 0
    x = torch.rand(2, 3, 160, 160, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        answer = read_back(format, file)(x)
        torch.testing.assert_close(answer, by_hand(pretrained, masked=masked)(x), atol=1e-4, rtol=1e-3)


def read_back(format: str, file: Path) -> Callable[[Tensor], Tensor]:
    """What somebody else does with the file."""
    if format == "torch-export":
        return torch.export.load(file).module()
    if format == "safetensors":
        return load_export(file).eval()
    if format == "timm-hub":
        plain = timm.create_model(f"local-dir:{file}", pretrained=True).eval()
        data = timm.data.resolve_model_data_config(plain)
        mean, std = (torch.tensor(data[key]).view(-1, 1, 1) for key in ("mean", "std"))
        return lambda x: plain((x - mean) / std)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"images": x.numpy()})[0])


def test_the_hub_is_told_what_the_model_was_changed_to(tmp_path: Path) -> None:
    model = vitruvius.create_model("test_vit", num_classes=7, img_size=64, mean=(0.1, 0.2, 0.3), attention="symmetric")
    export(model, tmp_path / "hub", format="timm-hub")
    plain = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True)
    data = timm.data.resolve_model_data_config(plain)
    assert tuple(data["input_size"]) == (3, 64, 64)
    assert tuple(data["mean"]) == (0.1, 0.2, 0.3)
    assert plain.num_classes == 7
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="not an empty folder"):
        export(model, tmp_path / "other", format="timm-hub")
    with pytest.raises(SurgeryError, match="by name"):
        export(vitruvius.create_model(NAME), tmp_path / "ours", format="timm-hub")


def test_the_model_itself_stays_as_it_is() -> None:
    model = compressed()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ready, folded = prepare(model, sparse=True)
    assert folded
    assert ready.model.blocks[0].attn.core.describe() == "sparse_softmax"
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_model_in_training_goes_on_training_after_its_export(tmp_path: Path) -> None:
    model = compressed().train()
    export(model, tmp_path / "model.safetensors", format="safetensors", recipe=RECIPE)
    assert all(module.training for module in model.modules())  # nor is it moved from its device


def test_auto_encoders_that_cannot_be_folded_stay() -> None:
    model = vitruvius.create_model("test_vit", img_size=32, depth=1, num_classes=5, qk_norm=True)
    vitruvius.rewire(model, part("low_rank", rank=1))
    low_rank = model.model.blocks[0].attn.core.low_rank
    low_rank.set_projection("q", torch.tensor([[0.6], [0.8]]))  # mixes heads that have been normalised one by one
    ready, folded = prepare(model)
    assert not folded
    with torch.no_grad():
        torch.testing.assert_close(ready(torch.ones(1, 3, 32, 32)), model(torch.ones(1, 3, 32, 32)))


def test_an_export_that_answers_differently_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULE.WRITERS, "torch-export", lambda model, *_: (b"new", lambda x: model(x) + 1))
    (tmp_path / "model.pt2").write_text("the export before")
    with pytest.raises(ValueError, match="answers differently"):
        export(compressed(), tmp_path / "model.pt2")
    assert (tmp_path / "model.pt2").read_text() == "the export before"


@pytest.mark.parametrize("format", ["torch-export", "safetensors", pytest.param("onnx", marks=NEEDS_ONNX)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_full_disk_leaves_the_export_that_was_there(format: Format, tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_text("the export before")
    with files_limited_to(4096), pytest.raises(RunError, match=r"disk is full\. What was there before is intact"):
        export(compressed(), path, format=format, recipe=RECIPE)
    assert path.read_text() == "the export before"
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_a_folder_or_a_file_in_the_way_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "prepare", None)
    (tmp_path / "file").touch()
    for wrong, words in {
        str(tmp_path): r"is a folder; name the file, e.g. .*/export.pt2",
        f"{tmp_path}/new/": "is a folder; name the file",
        f"{tmp_path}/file/deeper/model.pt2": "is a file, not a folder",
        f"{tmp_path}/a\0b": "null byte",
        f"{tmp_path}/{'a' * 300}/model.pt2": "cannot write",
    }.items():
        with pytest.raises(RunError, match=words) as error:
            export(compressed(), wrong)
        assert "\n" not in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_bad_questions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'tflite', expected one of torch-export, onnx, safetensors"):
        export(compressed(), tmp_path / "x", format="tflite")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs the recipe"):
        export(compressed(), tmp_path / "x.safetensors", format="safetensors")
    save_tensors(tmp_path / "plain.safetensors", {"a": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="not an export"):
        load_export(tmp_path / "plain.safetensors")
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[export\]'"):
        export(compressed(), tmp_path / "x.onnx", format="onnx")
