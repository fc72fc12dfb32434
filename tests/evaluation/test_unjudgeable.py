"""What cannot be judged is refused: images that are no pixels, labels that are no classes, models that say nothing."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import THREATS, assert_same_rows, loader, model
from torch import Tensor, nn

from failing_disk import fill_the_disk
from vitruvius._errors import ConfigError, DataError, RunError
from vitruvius.attacks.norms import LINF
from vitruvius.evaluation import evaluate


class Broken(nn.Module):
    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> Tensor:
        return self.answer.expand(len(x), *self.answer.shape)


def images(value: float = 0.5, **settings: Any) -> Tensor:
    return torch.full((2, 3, 8, 8), value, **settings)


LABELS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("x", "y", "letter"),
    [
        (images(1.5), LABELS, r"pixels reach from 1.5 to 1.5; expected \[0, 1\]. Normalisation belongs inside"),
        (images(-0.1), LABELS, r"pixels reach from -0.1 to -0.1; expected \[0, 1\]"),
        (images(float("nan")), LABELS, "images hold NaN pixels"),
        (images(float("inf")), LABELS, "pixels reach from inf"),
        (images(1, dtype=torch.uint8), LABELS, "images have dtype torch.uint8"),
        (images(), torch.tensor([1, 10]), r"labels reach up to 10, but the model has 10 classes"),
        (images(), torch.tensor([-1, 1]), "labels reach down to -1"),
        (images(), torch.tensor([0.5, 1.0]), "labels have dtype torch.float32"),
        (images(), torch.rand(2, 10), r"labels have shape \(2, 10\); an evaluation needs one whole number"),
        (images(), torch.tensor([1]), r"images \(2, 3, 8, 8\) and labels \(1,\) do not pair"),
        (images(), torch.tensor([1, 2, 3]), r"images \(2, 3, 8, 8\) and labels \(3,\) do not pair"),
        (images()[0], torch.tensor(1), r"one image \(3, 8, 8\) without a batch"),
        (images().permute(0, 2, 3, 1), LABELS, r"images \(2, 8, 8, 3\) have their channels last"),
        (torch.rand(2, 3, 16, 16), LABELS, r"images \(2, 3, 16, 16\) for a model of \(3, 8, 8\); resize them"),
        (images().numpy(), LABELS.numpy(), r"the loader yields \(ndarray, ndarray\); expected tensors"),
    ],
)
def test_what_cannot_be_judged_is_refused(x: Tensor, y: Tensor, letter: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=letter):
        evaluate(model(), [(x, y)], THREATS, folder=tmp_path / "evaluation")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_model_in_train_mode_is_refused_even_in_part() -> None:
    net = model()
    net.model.blocks.train()
    with pytest.raises(ConfigError, match=r"the model is in train mode.*call model.eval\(\)"):
        evaluate(net, loader())


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x.flatten(1), None


@pytest.mark.parametrize(
    ("net", "said"),
    [
        (Broken(torch.full((10,), torch.nan)), "logits that are not finite for 6 of 6 images; check its weights"),
        (Broken(torch.full((10,), torch.inf)), "logits that are not finite for 6 of 6 images; check its weights"),
        (Broken(torch.zeros(2, 10)), r"the model returned shape \(6, 2, 10\); expected logits \(6, classes\)"),
        (Pair(), "the model returned tuple; expected one tensor of logits"),
    ],
    ids=["nan", "inf", "shape", "several things"],
)
def test_a_model_that_answers_no_logits_is_refused(net: nn.Module, said: str) -> None:
    with pytest.raises((ConfigError, DataError), match=said):
        evaluate(net.eval(), loader())


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (("a.png", "b.png"), "tuple"),
        ([0, 1], "list"),
        (torch.tensor([0.0, 1.0]), r"torch.float32 \(2,\)"),
        (torch.tensor([0]), r"torch.int64 \(1,\)"),
    ],
)
def test_ids_that_do_not_number_the_images_are_refused(ids: Any, said: str) -> None:
    with pytest.raises(DataError, match=rf"third part of a batch is {said}; expected ids"):
        evaluate(model(), [(images(), LABELS, ids)])


def test_images_that_share_an_id_are_refused() -> None:
    x, y = torch.rand(4, 3, 8, 8), torch.tensor([1, 2, 3, 4])
    with pytest.raises(DataError, match="two images of a batch have the id 7"):
        evaluate(model(), [(x, y, torch.tensor([7, 7, 7, 7]))])
    with pytest.raises(DataError, match="image 7 came before with other pixels"):
        evaluate(model(), [(x[:2], y[:2], torch.tensor([7, 8])), (x[2:], y[2:], torch.tensor([7, 9]))])


def halved(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return x[: len(x) // 2]


def brightened(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return x + 0.9


class Leaping:
    """Says a radius that it does not keep."""

    eps, norm = 0.1, LINF

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return 1 - x


@pytest.mark.parametrize(
    ("threat", "said"),
    [
        (halved, r"halved returned \(1, 3, 8, 8\) for images \(2, 3, 8, 8\)"),
        (brightened, "returned pixels from 1.1 to 1.1"),
        (Leaping(), "moved an image by 0.6 in linf; eps is 0.1"),
    ],
    ids=["halved", "brightened", "leaping"],
)
def test_a_threat_that_leaves_the_image_or_its_ball_is_refused(threat: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        evaluate(model(), [(images(0.2), LABELS)], [threat])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((None, [(images(), LABELS)]), "None is not a model"),
        ((model(), None), "the loader is None"),
        ((model(), [(images(), LABELS)], None), "None is not an attack"),
        ((model(), [(images(), LABELS)], [None]), "None is not an attack"),
        ((model(num_classes=0), [(images(), LABELS)]), "has no head"),
        ((model(), [(images(), LABELS)], ["autoattack:eps=8/255,batch_size=0"]), "batch_size=0"),
        ((model(), [(images(), LABELS)], ["pgd:eps=8/255,step_size=.inf"]), "step_size=inf"),
    ],
)
def test_what_is_no_model_no_loader_and_no_threat_is_refused(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises((ConfigError, DataError), match=said):
        evaluate(*arguments)


@pytest.mark.parametrize("threats", [(), ("autoattack:eps=8/255,version=custom,attacks=[apgd-ce]",)])
@pytest.mark.parametrize("precisions", [(torch.float64, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_model_and_images_may_be_of_another_precision(
    precisions: tuple[torch.dtype, torch.dtype], threats: tuple[str, ...]
) -> None:
    x, y = images(0.25), LABELS  # which every precision can write
    ours, theirs = precisions
    report = evaluate(model().to(ours), [(x.to(theirs), y)], threats)
    assert report["clean"].loss == pytest.approx(evaluate(model(), [(x, y)])["clean"].loss, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_may_be_whole_numbers_of_any_width(dtype: torch.dtype) -> None:
    threats = [*THREATS, "square:eps=8/255,queries=2"]
    expected = evaluate(model(), [(images(), LABELS)], threats)
    assert str(evaluate(model(), [(images(), LABELS.to(dtype))], threats)) == str(expected)


def test_an_empty_loader_is_refused() -> None:
    def nothing() -> Iterator[Any]:
        yield from ()

    with pytest.raises(DataError, match="the loader 'unnamed' yielded no images; nothing to evaluate"):
        evaluate(model(), nothing())


def test_images_that_were_skipped_are_told() -> None:
    data = loader()
    data.broken = [f"{number}.png" for number in range(7)]
    report = evaluate(model(), data)
    assert report.remarks == ["7 image(s) could not be read and were left out: 0.png, 1.png, 2.png, 3.png, 4.png, …."]


def test_no_permission_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_the_disk(monkeypatch, after=0, number=errno.EACCES)
    with pytest.raises(RunError, match=r"cannot write to .*: no permission"):
        evaluate(model(), loader(), folder=tmp_path / "evaluation")
    assert not (tmp_path / "evaluation").exists()


@pytest.mark.parametrize("files", [2, 5, 14, 15])
def test_a_full_disk_is_one_error_and_loses_nothing(
    files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve parts, then ledger and report."""
    with monkeypatch.context() as patch:
        fill_the_disk(patch, after=files)
        with pytest.raises(RunError, match=r"cannot write .*: the disk is full"):
            evaluate(model(), loader(), THREATS, folder=tmp_path)
    assert len(list((tmp_path / "parts").glob("*"))) == (files - 2 if files < 15 else 0)
    evaluate(model(), loader(), THREATS, folder=tmp_path)
    evaluate(model(), loader(), THREATS, folder=tmp_path / "undisturbed")
    assert_same_rows(tmp_path, tmp_path / "undisturbed")
