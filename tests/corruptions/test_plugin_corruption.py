"""A corruption from one file outside the package: a threat by name, in the group `all`, suggested; ImageNet-C whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vitruvius._registry import load_plugins
from vitruvius.cli import main
from vitruvius.corruptions import corruption_names, corruptions
from vitruvius.corruptions.base import IMAGENET_C
from vitruvius.shifts import open_shift

PLUGIN = '''
from vitruvius.corruptions import Corruption, corruptions


@corruptions.register("solarise")
class Solarise(Corruption):
    """Bright pixels are inverted."""

    name = "solarise"
    imagenet = cifar = (0.9, 0.8, 0.7, 0.6, 0.5)

    def disturb(self, x, dice, /, threshold):
        return x.where(x < threshold, 1 - x)
'''
MODEL = ["vitruvius/vit_digits", "plugins=[solarise_plugin]", "data.dataset=digits", "device=cpu"]


@pytest.fixture(autouse=True)
def one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "solarise_plugin.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corruptions, "_pieces", {name: corruptions[name] for name in corruptions})
    monkeypatch.delitem(sys.modules, "solarise_plugin", raising=False)
    return tmp_path


def test_it_is_evaluated_by_its_name(one_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", *MODEL, "data.val_num_samples=16", "--threat", "solarise:severity=3", "--out", "here"]
    assert main(words) == 0, capsys.readouterr().err
    assert "solarise" in capsys.readouterr().out


def test_a_misspelt_name_suggests_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", *MODEL, "--threat", "solarize:severity=3"]) == 1
    assert "no corruption named 'solarize'; did you mean 'solarise'?" in capsys.readouterr().err


def test_it_is_in_the_group_of_all_and_not_in_what_is_published() -> None:
    load_plugins(["solarise_plugin"])
    assert corruption_names("all") == (*IMAGENET_C, "solarise")
    assert len(corruption_names("benchmark")) == 15
    assert "solarise" in corruptions


def test_imagenet_c_stays_complete(one_file: Path) -> None:
    load_plugins(["solarise_plugin"])
    for name in IMAGENET_C:
        for severity in range(1, 6):
            folder = one_file / "imagenet-c" / name / str(severity) / "n01440764"
            folder.mkdir(parents=True)
            (folder / "one.JPEG").touch()
    assert open_shift(f"imagenet-c:{one_file}").missing == ()
