"""Kinds of target: asked in order, and a new one is one registered class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from small_run import small_run
from vitruvius._config import build, override
from vitruvius._errors import ConfigError
from vitruvius.cli import main
from vitruvius.models import create_model
from vitruvius.targets.base import Target, TargetConfig, open_target, target_kinds


@pytest.fixture
def shelf() -> Iterator[None]:
    """A kind of its own: models on a shelf."""

    @target_kinds.register("shelf")
    class Shelf:
        """A model from a shelf: shelf:vit_digits."""

        order = 5.0
        has_data = True

        def accepts(self, text: str) -> bool:
            return text.startswith("shelf:")

        def open(self, text: str, overrides: Sequence[str], *, trust_plugins: bool) -> Target:
            name = f"vitruvius/{text.removeprefix('shelf:')}"
            kwargs = {"depth": 1, "embed_dim": 24}
            given = {"model": {"name": name, "kwargs": kwargs}, "data": {"dataset": "digits"}}
            config = build(TargetConfig, override(given, overrides), source=text)
            return Target(text=text, config=config, folder=Path("shelf"), make=lambda: create_model(name, **kwargs))

    yield
    del target_kinds._pieces["shelf"]


def test_a_second_model_is_no_setting_of_the_first(tmp_path: Path) -> None:
    for target in (str(tmp_path), "vitruvius/vit_digits"):
        with pytest.raises(ConfigError, match=r"'runs/other' after .* is not a setting .* one model is opened"):
            open_target(target, ["runs/other"])


def test_a_run_folder_opens_with_its_own_data(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", "train.epochs=1")
    target = open_target(str(run), ["device=cpu"])
    assert (target.is_run, target.own_data, target.folder) == (True, True, run)
    assert target.config.data.val_num_samples == 24
    assert not open_target(str(run), ["data.dataset=fake"]).own_data
    with pytest.raises(ConfigError, match=r"'seed=1' cannot be changed: .* is a run"):
        open_target(str(run), ["seed=1"])


def test_a_model_by_name_needs_to_be_told_its_images() -> None:
    with pytest.raises(ConfigError, match=r"is not a run folder; for a model by name say which images"):
        open_target("vitruvius/vit_digits")
    target = open_target("vitruvius/vit_digits", ["data.dataset=digits"])
    assert (target.is_run, target.own_data, target.folder) == (False, False, Path("runs/vitruvius-vit_digits"))


def test_a_registered_kind_is_asked_before_the_name_of_a_model(shelf: None) -> None:
    assert open_target("shelf:vit_digits").config.model.name == "vitruvius/vit_digits"


def test_every_verb_that_takes_a_model_takes_a_new_kind(
    shelf: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = tmp_path / "m.safetensors"
    assert main(["export", "shelf:vit_digits", "--format", "safetensors", "--out", str(exported)]) == 0
    assert exported.exists()
    assert main(["evaluate", "shelf:vit_digits", "--images", "4", "--out", str(tmp_path / "e")]) == 0


def test_the_number_of_images_is_one_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(small_run(tmp_path / "run", "train.epochs=1"))
    assert main(["evaluate", run, "--images", "5", "--out", str(tmp_path / "e")]) == 0
    assert "  5  " in capsys.readouterr().out
    examples = tmp_path / "a.safetensors"
    assert main(["attack", run, "--threat", "fgsm:eps=4/255", "--images", "5", "--out", str(examples)]) == 0
    assert main(["maps", run, "--images", "5", "--out", str(tmp_path / "maps.safetensors")]) == 0
