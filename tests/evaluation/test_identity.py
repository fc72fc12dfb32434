"""A ledger answers for its own images, labels and model, and for no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from judging import loader, model
from torch import Tensor, nn

import vitruvius
from families import FAMILIES, Family
from small_run import small_run
from vitruvius._errors import RunError
from vitruvius.cli import main
from vitruvius.evaluation import evaluate
from vitruvius.evaluation.base import settings_fingerprint

FGSM = "fgsm:eps=4/255"


class Shown:
    """The same digits under the same name and ids, with pixels or labels changed."""

    name = "digits/validation"
    num_images = 22

    def __init__(self, *, brighter: float = 0.0, label_shift: int = 0) -> None:
        self.brighter = brighter
        self.label_shift = label_shift

    def with_ids(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for x, y, ids in loader().with_ids():
            last = ids == ids.max()  # one image of each batch is enough
            moved = torch.where(last[:, None, None, None], (x + self.brighter).clamp(0, 1), x)
            yield moved, (y + self.label_shift * last) % 10, ids


def test_the_same_images_and_model_are_not_judged_again(tmp_path: Path) -> None:
    first = evaluate(model(), Shown(), FGSM, folder=tmp_path)
    asked: list[int] = []
    again = model()
    again.register_forward_pre_hook(lambda _, inputs: asked.append(len(inputs[0])))
    assert evaluate(again, Shown(), FGSM, folder=tmp_path).to_dict() == first.to_dict()
    assert not asked


@pytest.mark.parametrize(
    "data", [Shown(brighter=0.1), Shown(brighter=1e-3), Shown(label_shift=1)], ids=["images", "preprocessing", "labels"]
)
def test_other_images_or_labels_under_the_same_name_are_refused(data: Any, tmp_path: Path) -> None:
    evaluate(model(), Shown(), folder=tmp_path)
    with pytest.raises(RunError, match=r"the ledger of other images: image \d+ has other pixels or another label"):
        evaluate(model(), data, FGSM, folder=tmp_path)


def test_images_that_changed_between_two_halves_are_noticed(tmp_path: Path) -> None:
    class Half(Shown):
        def with_ids(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for number, batch in enumerate(super().with_ids()):
                if number == 2:
                    raise KeyboardInterrupt
                yield batch

    with pytest.raises(KeyboardInterrupt):
        evaluate(model(), Half(), folder=tmp_path)
    with pytest.raises(RunError, match="holds the ledger of other images"):
        evaluate(model(), Shown(brighter=0.1), folder=tmp_path)


class Squashed(nn.Module):
    """A model whose answer depends on attributes of every plain kind."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.inside = model()
        self.factor = 1.0
        self.squash = torch.tanh
        self.settings = {"temperature": 1.0}
        self.shift = torch.zeros(10)
        self.scales = [1.0, np.float32(1.0)]
        for name, value in attributes.items():
            setattr(self, name, value)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.squash(self.inside(x)) / self.settings["temperature"] + self.shift
        return answer * self.factor * float(self.scales[1])


@pytest.mark.parametrize(
    "attribute",
    [
        {"factor": 2.0},
        {"squash": torch.relu},
        {"settings": {"temperature": 2.0}},
        {"shift": torch.arange(10.0)},
        {"scales": [1.0, np.float32(2.0)]},
    ],
    ids=lambda attribute: next(iter(attribute)),
)
def test_a_model_that_differs_in_a_plain_attribute_is_refused(attribute: dict[str, Any], tmp_path: Path) -> None:
    evaluate(Squashed(), Shown(), folder=tmp_path)
    assert evaluate(Squashed(), Shown(), folder=tmp_path)["clean"].n == 22
    with pytest.raises(RunError, match=r"holds the ledger of another evaluation: settings was \w+, now \w+\. Choose"):
        evaluate(Squashed(**attribute), Shown(), folder=tmp_path)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_pass_makes_no_other_model_of_one_that_keeps_a_cache(family: Family) -> None:
    net, x = family.randomised()
    before = settings_fingerprint(net)
    net(x)
    assert settings_fingerprint(net) == before


def test_the_version_is_noted_and_not_part_of_the_identity(tmp_path: Path) -> None:
    evaluate(model(), Shown(), folder=tmp_path)
    file = tmp_path / "ledger.json"
    known = json.loads(file.read_text())
    assert known["version"] == vitruvius.__version__
    file.write_text(json.dumps({**known, "version": "0.0.1"}))
    assert evaluate(model(), Shown(), folder=tmp_path)["clean"].n == 22


def test_a_false_start_does_not_lock_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(small_run(tmp_path / "run", "train.epochs=1"))
    assert main(["evaluate", run, "--images", "4"]) == 0
    assert main(["evaluate", run]) == 1
    error = capsys.readouterr().err
    assert "--out" in error
    assert "--fresh" in error
    assert main(["evaluate", run, "--fresh"]) == 0
    assert "  24  " in capsys.readouterr().out
