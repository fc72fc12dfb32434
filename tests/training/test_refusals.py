"""What cannot be trained is refused with one clear error, before a folder is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from small_run import small_config, small_run
from vitruvius._errors import CheckpointError, ConfigError, DataError, VitruviusError
from vitruvius.training.config import as_config


@pytest.mark.parametrize(
    ("overrides", "error", "letter"),
    [
        (["model.name=vitruvius/vit_digit"], VitruviusError, "did you mean 'vitruvius/vit_digits'"),
        (["attention=[{parts: [rcp]}]"], VitruviusError, "no attention named 'rcp'; did you mean 'rpc'"),
        (["attention=[{where: x, parts: [rpc]}]"], VitruviusError, "where='x' matches none of the 1 attention sites"),
        (["task=supervized"], VitruviusError, "no task named 'supervized'; did you mean 'supervised'"),
        (["task={use: supervised, penalty: 1}"], ConfigError, "no part of the model's attention has a penalty"),
        (["init=mimetik"], VitruviusError, "mimetic"),
        (["train.opt=adamm"], ConfigError, "train.opt = 'adamm' cannot be made"),
        (["data.dataset=folder"], DataError, "data.root is not set"),
        (["data.dataset=folder", "data.root=/no/such/place"], DataError, "does not exist"),
        (["model.kwargs.num_classes=7"], ConfigError, "num_classes = 7, but digits has 10 classes"),
        (["model.kwargs.dept=2"], ConfigError, "cannot be made with .*'dept'"),
        (["model.kwargs.num_heads=5"], ConfigError, "cannot be made with .*'num_heads': 5"),
        (["data.image_size=7"], ConfigError, "does not take 3 channel.* of 7 × 7 pixels"),
        (["data.batch_size=640"], DataError, "do not fill one batch of 640"),
        (["train.device=quantum"], ConfigError, "device 'quantum' cannot be used here"),
        (["plugins=[no_such_lab]"], ConfigError, "no_such_lab"),
        (["model.weights=/no/such/run"], CheckpointError, "no weights at /no/such/run"),
        (["model.name=pit_ti_224", "model.kwargs={}", "train.grad_checkpointing=true"], ConfigError, "not offer it"),
        (["train.compile=hopes"], ConfigError, "train.compile = 'hopes'"),
        (["train.compile=true", "train.compile_mode=hopes"], ConfigError, "compile_mode = 'hopes'"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_folder_is_made(
    overrides: list[str], error: type[Exception], letter: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=letter):
        small_run(tmp_path / "run", *overrides)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "letter"),
    [
        ("train.epochs=0", "train.epochs = 0, expected a whole number of at least 1"),
        ("train.lr=0", "train.lr = 0, expected a number above 0"),
        ("train.holdout=1", "train.holdout = 1, expected a number of at least 0 and below 1"),
        ("train.clip_grad=-1", "train.clip_grad = -1, expected a number above 0"),
        ("train.warmup_epochs=2", "train.warmup_epochs = 2, expected fewer than the 2 of train.epochs"),
        ("train.min_lr=1", "train.min_lr = 1, expected at most the peak rate, train.lr = 0.005"),
        ("train.layer_decay=-1", "train.layer_decay = -1, expected a number above 0"),
        ("train.cooldown_epochs=-1", "train.cooldown_epochs = -1"),
        ("train.lr_cycle_limit=0", "train.lr_cycle_limit = 0"),
        ("out=", "override 'out=' says no value"),
        ("train.lr=fast", "train.lr = 'fast', expected a number"),
        ("train.epoch=3", r"unknown key 'train.epoch'; did you mean 'train.epochs'\?|did you mean 'epochs'\?"),
        ("trian.epochs=3", r"unknown key 'trian'; did you mean 'train'\?"),
        ("train.sched=cosinus", "expected one of cosine, tanh, step, multistep, plateau, poly, none"),
    ],
)
def test_a_recipe_that_cannot_be_meant_names_key_and_expectation(setting: str, letter: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=letter) as caught:
        small_config(tmp_path / "run", setting)
    assert "softmax.yaml" in str(caught.value) or setting == "out="


def test_warmup_of_a_schedule_that_never_moves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.warmup_epochs = 1, but train.sched = none never moves"):
        small_config(tmp_path / "run", "train.sched=none", "train.warmup_epochs=1")


@pytest.mark.parametrize(("epochs", "warmup"), [(1, 0), (2, 1), (3, 2)])
def test_a_packaged_recipe_tried_with_few_epochs_shortens_its_warm_up_with_a_line(
    epochs: int, warmup: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = as_config("digits/softmax", [f"train.epochs={epochs}"])
    assert config.train.warmup_epochs == warmup
    assert ("is shortened to" in caplog.text) == (epochs <= 2)
    with pytest.raises(ConfigError, match=r"expected fewer than the 1 of train\.epochs"):
        as_config("digits/softmax", ["train.epochs=1", "train.warmup_epochs=2"])
