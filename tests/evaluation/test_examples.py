"""Adversarial examples become data sets that any model can be evaluated on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import vitruvius
from vitruvius._errors import ConfigError, DataError
from vitruvius._files import load_tensors, save_tensors
from vitruvius.attacks.autoattack import AutoAttack
from vitruvius.attacks.deepfool import DeepFool
from vitruvius.attacks.pgd import PGD
from vitruvius.attacks.square import Square
from vitruvius.cli import main
from vitruvius.data import DataConfig, eval_loader
from vitruvius.data.classes import ROBUSTBENCH, subset_names
from vitruvius.evaluation import evaluate
from vitruvius.evaluation import examples as examples_module
from vitruvius.evaluation.examples import draw_examples, make_examples, save_examples
from vitruvius.evaluation.robustbench import benchmark

DATA = DataConfig(dataset="digits", val_num_samples=20, batch_size=8)


def small() -> torch.nn.Module:
    return vitruvius.create_model("vitruvius/vit_digits", depth=1)


def loader(config: DataConfig = DATA) -> object:
    return eval_loader(config, input_size=(3, 8, 8))


def test_examples_are_the_attack_s_images_in_order_with_true_labels() -> None:
    model, attack = small(), PGD(eps=0.1, steps=2)
    examples = make_examples(model, loader(), attack)  # type: ignore[arg-type]
    batches = list(loader().with_ids())  # type: ignore[attr-defined]
    expected = torch.cat([attack(model, x, y, ids=ids) for x, y, ids in batches])
    assert torch.equal(examples.images, expected)
    assert torch.equal(examples.labels, torch.cat([y for _, y, _ in batches]))
    assert examples.accuracy == pytest.approx(float((model(expected).argmax(1) == examples.labels).float().mean()))


def test_a_stored_set_is_lossless_and_loads_as_data(tmp_path: Path) -> None:
    model = small()
    examples = make_examples(model, loader(), PGD(eps=0.1, steps=2))  # type: ignore[arg-type]
    file = save_examples(examples, tmp_path / "set.safetensors")
    again = DataConfig(dataset="tensors", root=str(file), batch_size=7)
    x = torch.cat([x for x, _ in loader(again)])  # type: ignore[attr-defined]
    assert torch.equal(x, examples.images)
    assert vitruvius.evaluate(model, loader(again))["clean"].accuracy == pytest.approx(examples.accuracy)  # type: ignore[arg-type]
    assert load_tensors(file)[1]["spec"].startswith("pgd(eps=0.1")


def test_a_folder_of_pictures_has_the_accuracy_after_rounding(tmp_path: Path) -> None:
    model, folder = small(), tmp_path / "pictures"
    scores = draw_examples(model, loader(), PGD(eps=0.1, steps=2), folder)  # type: ignore[arg-type]
    again = DataConfig(dataset="folder", root=str(folder), num_classes=None, workers=0, crop_pct=1.0)
    assert vitruvius.evaluate(model, loader(again))["clean"].accuracy == pytest.approx(scores.accuracy_8bit)  # type: ignore[arg-type]
    assert len(list(folder.rglob("*.png"))) == 20
    with pytest.raises(ConfigError, match="is not empty"):
        draw_examples(model, loader(), PGD(eps=0.1, steps=2), folder / "validation")  # type: ignore[arg-type]


class Fine(torch.nn.Module):
    """Class 1 where the first pixel is 100.4 grey levels, which no picture can hold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = ((255 * x[:, 0, 0, 0] - 100.4).abs() < 0.1).float()
        return torch.stack([1 - near, near], 1)


def test_what_is_lost_by_rounding_is_said() -> None:
    batches = [(torch.zeros(2, 3, 8, 8), torch.ones(2, dtype=torch.int64))]
    examples = make_examples(Fine().eval(), batches, lambda model, x, y: x + 100.4 / 255)
    assert (examples.accuracy, examples.accuracy_8bit) == (1.0, 0.0)


ATTACK = ["attack", "vitruvius/vit_digits", "data.dataset=digits", "device=cpu", "--threat", "fgsm:eps=8/255"]


def test_pictures_are_readable_even_where_classes_are_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pictures"
    assert main([*ATTACK, "--images", "4", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert len(list((out / "validation").iterdir())) < 10  # of four digits at most four classes
    again = [f"data.root={out}", "data.dataset=folder", "data.workers=0", "data.crop_pct=1", "device=cpu"]
    assert main(["evaluate", "vitruvius/vit_digits", *again, "--out", str(tmp_path / "evaluation")]) == 0
    report = json.loads((tmp_path / "evaluation" / "report.json").read_text())
    assert f"8 bits {report['threats'][0]['accuracy']:.4f}" in said


def test_pictures_go_on_after_a_kill_and_attack_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill is simulated: an exception that nothing catches, between two pictures."""
    words = [*ATTACK, "--images", "20", "data.eval_batch_size=8", "--out"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    whole = capsys.readouterr().out
    draw, drawn = examples_module._png, 0

    def mortal(image: torch.Tensor) -> bytes:
        nonlocal drawn
        drawn += 1
        if drawn > 11:
            raise KeyboardInterrupt
        return draw(image)

    attacked: list[int] = []
    attack = examples_module._Attacks.attack

    def counting(attacks: examples_module._Attacks, x: torch.Tensor, *rest: torch.Tensor) -> object:
        attacked.append(len(x))
        return attack(attacks, x, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(examples_module, "_png", mortal)
        assert main([*words, str(tmp_path / "cut")]) == 130
    capsys.readouterr()
    (tmp_path / "cut" / ".parts").mkdir(exist_ok=True)
    (tmp_path / "cut" / ".parts" / ".00000001.png.77.tmp").write_bytes(b"half")
    monkeypatch.setattr(examples_module._Attacks, "attack", counting)
    assert main([*words, str(tmp_path / "cut")]) == 0
    assert attacked == [8, 4]  # the first batch was whole
    assert capsys.readouterr().out.replace("cut", "whole") == whole
    names = sorted(str(path.relative_to(tmp_path / "cut")) for path in (tmp_path / "cut").rglob("*"))
    assert names == sorted(str(path.relative_to(tmp_path / "whole")) for path in (tmp_path / "whole").rglob("*"))
    other = [word.replace("8/255", "4/255") for word in words]
    assert main([*other, str(tmp_path / "cut")]) == 1
    assert "holds pictures made otherwise (spec was" in capsys.readouterr().err


def test_perturbations_are_stretched_to_the_whole_range() -> None:
    model, eps = small(), 0.05
    moved = make_examples(model, loader(), PGD(eps=eps, steps=3)).images  # type: ignore[arg-type]
    stretched = make_examples(model, loader(), PGD(eps=eps, steps=3), what="perturbations").images  # type: ignore[arg-type]
    x = torch.cat([x for x, _ in loader()])  # type: ignore[attr-defined]
    torch.testing.assert_close(stretched * 2 * eps - eps, moved - x, atol=1e-6, rtol=0)
    for threat in (lambda m, x, y: x, DeepFool()):
        with pytest.raises(ConfigError, match="has no finite eps to stretch perturbations by; keep images"):
            make_examples(model, loader(), threat, what="perturbations")  # type: ignore[arg-type]


def test_the_command_makes_a_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["attack", "vitruvius/vit_digits", "data.dataset=digits", "data.val_num_samples=8", "device=cpu"]
    assert main([*words, "--threat", "fgsm:eps=8/255", "--out", str(tmp_path / "a.safetensors")]) == 0
    assert "after rounding to 8 bits" in capsys.readouterr().out
    assert load_tensors(tmp_path / "a.safetensors")[0]["images"].shape == (8, 3, 8, 8)


@pytest.mark.parametrize(
    ("tensors", "letter"),
    [
        ({"pictures": torch.zeros(2, 3, 8, 8)}, "expected the tensors images and labels"),
        ({"images": torch.zeros(2, 3, 8, 8), "labels": torch.zeros(3)}, r"expected \(N, C, H, W\) and \(N\)"),
    ],
)
def test_a_file_that_is_no_image_set_is_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], letter: str) -> None:
    save_tensors(tmp_path / "x.safetensors", tensors)
    with pytest.raises(DataError, match=letter):
        loader(DataConfig(dataset="tensors", root=str(tmp_path / "x.safetensors")))


def test_robustbench_s_list_has_five_thousand_images() -> None:
    names = subset_names(ROBUSTBENCH)
    assert len(set(names)) == 5000
    assert names[0] == "ILSVRC2012_val_00015253.JPEG"
    with pytest.raises(DataError, match="by file name; digits has none"):
        loader(DataConfig(dataset="digits", subset="robustbench-imagenet"))


def test_a_subset_by_file_name_is_exactly_that(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    draw_examples(small(), loader(), PGD(eps=0.1, steps=1), folder)  # type: ignore[arg-type]
    chosen = sorted(path.name for path in folder.rglob("*.png"))[3:7]
    (tmp_path / "list.txt").write_text("\n".join(chosen))
    config = DataConfig(dataset="folder", root=str(folder), subset=str(tmp_path / "list.txt"), workers=0)
    assert loader(config).num_images == 4  # type: ignore[attr-defined]
    (tmp_path / "list.txt").write_text("absent.png")
    with pytest.raises(DataError, match="lacks 1 of the 1 images"):
        loader(config)


def test_the_robustbench_entry_says_what_was_measured(tmp_path: Path) -> None:
    data = DataConfig(dataset="digits", val_num_samples=4)
    report, entry = benchmark(small(), loader(data), dataset="digits", name="Us2026", eps=8 / 255)  # type: ignore[arg-type]
    entry.save(tmp_path / "Us2026.json")
    written = json.loads((tmp_path / "Us2026.json").read_text())
    assert written["eps"] == "8/255"
    assert float(written["autoattack_acc"]) == pytest.approx(100 * report.threats[-1].accuracy, abs=0.01)
    assert float(written["autoattack_acc"]) <= float(written["clean_acc"])
    assert written["reported"] == written["autoattack_acc"]
    _, theirs = benchmark(small(), loader(data), dataset="digits", name="Them", eps=8 / 255, reported="71.2")  # type: ignore[arg-type]
    assert theirs.reported == "71.2"


@pytest.fixture
def two_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """AutoAttack is two queries of Square."""
    square = lambda self: [("square", Square(eps=self.eps, norm=self.norm, queries=2))]  # noqa: E731
    monkeypatch.setattr(AutoAttack, "stages", square)


@pytest.mark.usefixtures("two_queries")
def test_the_robustbench_entry_is_of_autoattack_whatever_else_the_folder_holds(tmp_path: Path) -> None:
    model = small()
    batches = [(x, model(x).argmax(1)) for x, _ in loader()]  # type: ignore[attr-defined]
    settings = {"dataset": "digits", "name": "Us", "folder": tmp_path}
    _, first = benchmark(model, batches, eps=1.0, **settings)  # type: ignore[arg-type]
    evaluate(model, batches, [lambda model, x, y: x], folder=tmp_path)
    _, again = benchmark(model, batches, eps=1.0, **settings)  # type: ignore[arg-type]
    assert float(first.autoattack_acc) < 100
    assert again == first


@pytest.mark.usefixtures("two_queries")
@pytest.mark.parametrize(
    ("norm", "eps", "written"), [("Linf", 8 / 255, "8/255"), ("LINF", 0.1, "25.5/255"), ("L2", 0.5, "0.5")]
)
def test_the_radius_of_an_entry_does_not_depend_on_how_the_norm_is_spelt(norm: str, eps: float, written: str) -> None:
    data = DataConfig(dataset="digits", val_num_samples=4)
    _, entry = benchmark(small(), loader(data), dataset="digits", name="Us", eps=eps, norm=norm)  # type: ignore[arg-type]
    assert entry.eps == written
