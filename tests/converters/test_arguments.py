"""Settings of timm's train.py and of the light recipe: every option is taken, told apart, or named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vitruvius._errors import ConfigError
from vitruvius.cli import main
from vitruvius.converters import convert
from vitruvius.converters.arguments import read_arguments, recipe_from_arguments
from vitruvius.training import Config, read_recipe

TIMM = """
aa: rand-m9-mstd0.5-inc1
amp: true
amp_dtype: bfloat16
batch_size: 512
bce_target_thresh: null
clip_grad: 3.0
crop_pct: 1.0
data: null
data_dir: /data/cifar
dataset: torch/cifar10
gp: avg
log_interval: 50
lr: 0.001
lr_base: 0.1
model: vit_tiny_patch16_224
model_kwargs: {class_token: false, patch_size: 2, img_size: 32}
num_classes: 10
opt: adamw
opt_eps: 0.001
scale: [1.0, 1.0]
sched_on_updates: false
seed: 42
split_bn: true
std: [0.2471, 0.2435, 0.2616]
warmup_lr: 1.0e-05
"""


def converted(text: str, tmp_path: Path, name: str = "args.yaml") -> tuple[Config, str]:
    (tmp_path / name).write_text(text)
    recipe = read_arguments(tmp_path / name, lenient=True)
    out = recipe.write(tmp_path / "recipe.yaml", origin=name)
    return read_recipe(out), out.read_text()


def test_the_ddpm_images_are_read_from_their_raw_file(tmp_path: Path) -> None:
    config, text = converted("model: resnet18\ncombine_dataset: tfds/cifar_ddpm\ncombine_data_dir: /ddpm\n", tmp_path)
    mix: Any = config.data.mix
    assert mix.dataset == "bin/32x32x3"
    assert mix.root == "/ddpm/cifar10_ddpm_serialized/cifar_ddpm_improvedddpm_sorted_images.bin"
    assert "raw file" in text


def test_timms_options_keep_their_names_and_values(tmp_path: Path) -> None:
    config, text = converted(TIMM, tmp_path)
    assert config.model.name == "vit_tiny_patch16_224"
    own = {"num_classes": 10, "global_pool": "avg", "drop_rate": 0.0, "class_token": False, "patch_size": 2}
    assert config.model.kwargs == {**own, "img_size": 32}
    assert config.model.std == (0.2471, 0.2435, 0.2616)
    data, train = config.data, config.train
    assert (data.dataset, data.root, data.batch_size, data.scale) == ("torch/cifar10", "/data/cifar", 512, (1.0, 1.0))
    assert (train.lr, train.lr_base, train.opt_eps, train.clip_grad) == (1e-3, None, 1e-3, 3.0)
    assert (train.precision, train.sched_on_updates, train.warmup_lr) == ("bf16", False, 1e-5)
    assert config.seed == 42
    assert "not known here, left out: split_bn=True." in text


def test_pixels_that_were_not_normalised_are_not() -> None:
    sections = recipe_from_arguments({"model": "xcit_small_12_p16_224", "no_normalize": True}).sections
    assert sections["model"]["std"] == [1.0, 1.0, 1.0]


def test_distillation_of_timm_and_smaller_tasks() -> None:
    base = {"model": "resnet18", "log_interval": 50}
    task = recipe_from_arguments({**base, "kd_model_name": "resnet50", "kd_temperature": 4.0}).sections["task"]
    assert task == {"use": "distillation", "teacher": "resnet50", "kind": "soft", "temperature": 4.0}
    assert recipe_from_arguments({**base, "bce_loss": True}).sections["task"] == {"use": "supervised", "binary": True}
    task = recipe_from_arguments({**base, "jsd_loss": True, "aug_splits": 3}).sections["task"]
    assert task == {"use": "jsd", "splits": 3}


def test_the_command_writes_a_recipe_and_says_what_it_left_out(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "args.yaml").write_text(TIMM)
    words = ["convert", str(tmp_path / "args.yaml"), "--from", "timm-args", "--out", str(tmp_path / "r.yaml")]
    assert main(words) == 1
    assert "cannot be expressed in a recipe: split_bn=True" in capsys.readouterr().err
    words.append("--lenient")
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "note: not known here" in shown.err
    assert read_recipe(shown.out.strip()).model.name == "vit_tiny_patch16_224"
    assert main(words) != 0  # it is there already


def test_what_is_no_list_of_options_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="holds list, expected options by name"):
        read_arguments(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match="name no model"):
        recipe_from_arguments({"lr": 1})
    with pytest.raises(ConfigError, match="data_set=IMNET"):  # DeiT's
        recipe_from_arguments({**BASE, "data_set": "IMNET"})
    with pytest.raises(ConfigError, match="timm-args reads settings, not weights"):
        convert(tmp_path / "a.yaml", "timm-args")


BASE = {"model": "vit_tiny_patch16_224", "log_interval": 50}


def test_a_colour_jitter_of_null_stays_off() -> None:
    assert recipe_from_arguments({**BASE, "color_jitter": None}).sections["data"]["color_jitter"] == 0.0
    assert recipe_from_arguments(BASE).sections["data"]["color_jitter"] == 0.4


@pytest.mark.parametrize(("said", "meant"), [("reduce", "reduce"), ("broadcast", "broadcast"), ("", "none")])
def test_how_batch_norms_are_shared_is_taken_over(said: str, meant: str) -> None:
    args = {"model": "resnet18", "dataset": "torch/cifar10", "dist_bn": said, "sync_bn": True}
    train = recipe_from_arguments(args).sections["train"]
    assert (train["dist_bn"], train["sync_bn"]) == (meant, True)


def test_a_weight_or_a_radius_of_zero_is_zero_and_not_the_default() -> None:
    zeros = {"adv_training": "trades", "trades_beta": 0, "attack_eps": 0, "attack_steps": 1}
    task = recipe_from_arguments({**BASE, **zeros}).sections["task"]
    assert (task["beta"], task["eps"], task["attack"]["step_size"]) == (0, 0, 0)
