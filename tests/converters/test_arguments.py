"""Settings of timm's train.py, DeiT and the light recipe: every option is taken, told apart, or named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vitruvius._errors import ConfigError
from vitruvius.cli import main
from vitruvius.converters import convert, read_arguments, write_recipe
from vitruvius.converters._objectives import objective
from vitruvius.converters.arguments import recipe_from_arguments
from vitruvius.data._config import Mix
from vitruvius.tasks.distillation import lesson
from vitruvius.training import Config, read_recipe

TIMM = """
aa: rand-m9-mstd0.5-inc1
amp: true
amp_dtype: bfloat16
amp_impl: native
aug_repeats: 0
aug_splits: 0
batch_size: 512
bce_loss: false
bce_target_thresh: null
checkpoint_hist: 10
clip_grad: 3.0
clip_mode: norm
color_jitter: 0.4
cooldown_epochs: 0
crop_pct: 1.0
cutmix: 0.0
data: null
data_dir: /data/cifar
dataset: torch/cifar10
decay_rate: 0.1
dist_bn: reduce
drop: 0.0
drop_path: null
epochs: 200
gp: avg
hflip: 0.5
img_size: null
input_size: null
layer_decay: null
log_interval: 50
log_wandb: false
lr: 0.001
lr_base: 0.1
lr_base_scale: ''
lr_base_size: 256
lr_cycle_limit: 1
mean: [0.4914, 0.4822, 0.4465]
min_lr: 1.0e-06
mixup: 0.0
model: vit_tiny_patch16_224
model_ema: false
model_kwargs: {class_token: false, patch_size: 2, img_size: 32}
momentum: 0.9
num_classes: 10
opt: adamw
opt_betas: null
opt_eps: 0.001
opt_kwargs: {}
output: ''
pretrained: false
ratio: [1.0, 1.0]
recount: 1
remode: pixel
reprob: 0.0
scale: [1.0, 1.0]
sched: cosine
sched_on_updates: false
seed: 42
smoothing: 0.1
split_bn: true
std: [0.2471, 0.2435, 0.2616]
torchcompile: null
train_interpolation: random
train_split: train
val_split: validation
warmup_epochs: 10
warmup_lr: 1.0e-05
weight_decay: 0.01
workers: 4
"""
DEIT: dict[str, Any] = {
    "batch_size": 256, "epochs": 300, "model": "deit_tiny_distilled_patch16_224", "input_size": 224, "drop": 0.0,
    "drop_path": 0.1, "model_ema": True, "model_ema_decay": 0.99996, "model_ema_force_cpu": False, "opt": "adamw",
    "opt_eps": 1e-8, "opt_betas": None, "clip_grad": None, "momentum": 0.9, "weight_decay": 0.05, "sched": "cosine",
    "lr": 5e-4, "lr_noise": None, "lr_noise_pct": 0.67, "lr_noise_std": 1.0, "warmup_lr": 1e-6, "min_lr": 1e-5,
    "decay_epochs": 30, "warmup_epochs": 5, "cooldown_epochs": 10, "patience_epochs": 10, "decay_rate": 0.1,
    "color_jitter": 0.4, "aa": "rand-m9-mstd0.5-inc1", "smoothing": 0.1, "train_interpolation": "bicubic",
    "repeated_aug": True, "reprob": 0.25, "remode": "pixel", "recount": 1, "resplit": False, "mixup": 0.8,
    "cutmix": 1.0, "cutmix_minmax": None, "mixup_prob": 1.0, "mixup_switch_prob": 0.5, "mixup_mode": "batch",
    "teacher_model": "regnety_160", "teacher_path": "", "distillation_type": "hard", "distillation_alpha": 0.5,
    "distillation_tau": 1.0, "finetune": "", "data_path": "/imagenet", "data_set": "IMNET", "output_dir": "out",
    "device": "cuda", "seed": 0, "resume": "", "start_epoch": 0, "eval": False, "num_workers": 10, "pin_mem": True,
    "world_size": 4, "dist_url": "env://", "nb_classes": 1000, "robust": True, "num_iter": 4, "lambd": 4.0, "layer": 0,
}  # fmt: skip
LIGHT = """
model: xcit_small_12_p4_32
dataset: torch/cifar10
val_split: test
adv_training: trades
attack: pgd
attack-eps: 8
attack_steps: 10
attack_norm: linf
eps_schedule: linear
eps_schedule_period: 10
trades_beta: 6.0
lr: null
lr_base: 2.0e-4
lr_base_size: 512
opt: adamw
sched: cosine
epochs: 20
cooldown_epochs: 2
warmup_epochs: 5
batch_size: 128
weight_decay: 0.5
drop_path: 0.05
smoothing: 0.0
rand_crop: true
pad: 4
rand_rotation: 2
aa: None
normalize_model: true
no_normalize: true
mean: [0.4914, 0.4822, 0.4465]
std: [0.2471, 0.2435, 0.2616]
num_classes: 10
input_size: [3, 32, 32]
finetune: runs/xcit_s12_linf8
combine_dataset: npz
combine_data_dir: cifar_ddpm.npz
combined_dataset_ratio: 0.3
bn_tf: false
eval_metric: robust_top1
"""


def converted(text: str, tmp_path: Path, name: str = "args.yaml") -> tuple[Config, str]:
    (tmp_path / name).write_text(text)
    recipe = read_arguments(tmp_path / name, lenient=True)
    out = write_recipe(recipe, tmp_path / "recipe.yaml", origin=name)
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


def test_a_namespace_of_deit_becomes_distillation_with_a_scaled_rate(tmp_path: Path) -> None:
    config, text = converted(json.dumps(DEIT), tmp_path, "args.json")
    train = config.train
    assert (train.lr, train.lr_base, train.lr_base_size, train.lr_base_scale) == (None, 5e-4, 512, "linear")
    assert (train.precision, train.model_ema, train.model_ema_decay) == ("fp16", True, 0.99996)
    assert (config.data.dataset, config.data.root, config.data.aug_repeats) == ("folder", "/imagenet", 3)
    assert config.model.kwargs == {"num_classes": 1000, "drop_rate": 0.0, "drop_path_rate": 0.1}
    weights = {"task_loss_weight": 0.5, "distill_loss_weight": 0.5}
    assert config.task == {"use": "distillation", "teacher": "regnety_160.deit_in1k", "kind": "hard", **weights}
    assert "never judges it" in text
    assert train.cooldown_epochs == 0, "DeiT's loop ends before the cool-down"
    assert (config.data.crop_pct, config.model.mean) == (0.875, (0.485, 0.456, 0.406))
    assert config.attention[0].parts == [{"use": "rpc", "iterations": 4, "sparsity": 4.0, "variant": "released"}]
    assert "lr is DeiT's for 512 images" in text


@pytest.mark.parametrize(
    ("told", "classes"), [({"nb_classes": 7}, 7), ({"data_set": "CIFAR", "nb_classes": None}, 100)]
)
def test_soft_distillation_weighs_as_much_as_in_deit(told: dict[str, Any], classes: int) -> None:
    """DeiT's loss is T² Σ KL / (B · K): a mean over images and over classes."""
    soft = {"distillation_type": "soft", "distillation_alpha": 0.1, "distillation_tau": 3.0}
    recipe = recipe_from_arguments({**DEIT, **soft, **told}, "deit-args", lenient=True)
    student, teacher = torch.randn(2, 4, classes, generator=torch.Generator().manual_seed(0))
    log_p, log_q = ((logits / 3).log_softmax(1) for logits in (teacher, student))
    theirs = 0.1 * 9 * F.kl_div(log_q, log_p, reduction="sum", log_target=True) / student.numel()
    task = recipe.sections["task"]
    ours = task["distill_loss_weight"] * lesson(student, teacher, hard=False, temperature=task["temperature"])
    torch.testing.assert_close(ours, theirs)
    assert task["task_loss_weight"] == 0.9
    assert any("divides by the number of classes" in note for note in recipe.notes)


@pytest.mark.parametrize("wrap", ["!!python/object:argparse.Namespace\n{}", "Namespace({})"])
def test_namespaces_as_pickled_yaml_and_as_printed_are_read(wrap: str, tmp_path: Path) -> None:
    words = ", ".join(f"{key}={value!r}" for key, value in DEIT.items())
    lines = "\n".join(f"{key}: {json.dumps(value)}" for key, value in DEIT.items())
    config, _ = converted(wrap.format(words if "Namespace(" in wrap else lines), tmp_path)
    (tmp_path / "other").mkdir()
    assert config.train == converted(json.dumps(DEIT), tmp_path / "other")[0].train


def test_the_light_recipes_options_become_an_adversarial_task(tmp_path: Path) -> None:
    config, text = converted(LIGHT, tmp_path)
    assert config.task == {
        "use": "trades",
        "eps": pytest.approx(8 / 255),
        "norm": "linf",
        "attack": {"use": "pgd", "steps": 10, "step_size": pytest.approx(1.2 / 255)},
        "coupled": False,
        "beta": 6.0,
        "schedule": {"use": "linear", "epochs": 10},
    }
    assert config.model.name == "vitruvius/xcit_small_12_p4_32"
    assert (config.model.weights, config.model.reset_head) == ("runs/xcit_s12_linf8", True)
    data = config.data
    assert (data.rotation, data.pad, data.rand_crop, data.image_size, data.aa) == (2, 4, True, 32, None)
    assert data.mix == Mix(dataset="npz", root="cifar_ddpm.npz", fraction=0.3)
    assert (config.train.lr, config.train.lr_base) == (None, 2e-4)
    assert "names only some options" in text
    assert "here PGD-10" in text


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
    with pytest.raises(ConfigError, match="these options name no model"):
        recipe_from_arguments({"lr": 1})
    with pytest.raises(ConfigError, match=r"timm-args reads settings, not weights: read_arguments"):
        convert(tmp_path / "a.yaml", "timm-args")


BASE = {"model": "vit_tiny_patch16_224", "log_interval": 50}


def test_a_colour_jitter_of_null_stays_off() -> None:
    assert recipe_from_arguments({**BASE, "color_jitter": None}).sections["data"]["color_jitter"] == 0.0
    assert recipe_from_arguments(BASE).sections["data"]["color_jitter"] == 0.4


@pytest.mark.parametrize(
    ("word", "init"),
    [
        ("", "timm"),
        ("skip", "skip"),
        ("jax_nlhb", {"use": "jax", "negative_log_head_bias": True}),
        ("mimetic0.7_0.6", {"use": "mimetic", "variant": "released", "alpha": 0.7, "beta": 0.6, "base": "skip"}),
        ("impulse5", {"use": "impulse_optimised", "kernel": 5, "tolerance": 0, "base": "skip", "rest": "U"}),
    ],
)
def test_structured_starts_become_the_section_init(word: str, init: Any) -> None:
    kwargs = {"weight_init": word, "sin_pe": True, "class_token": False, "pseudo_input2": "U"}
    sections = recipe_from_arguments({**BASE, "model_kwargs": kwargs}).sections
    assert sections["init"] == init
    assert sections["model"]["positions"] == "sincos"
    assert sections["model"]["kwargs"] == {"class_token": False, "drop_rate": 0.0}


def test_drawing_the_filters_once_is_sharing_them() -> None:
    kwargs = {"weight_init": "impulse3", "init_once": False, "pseudo_input1": "G"}
    init = recipe_from_arguments({**BASE, "model_kwargs": kwargs}).sections["init"]
    assert (init["shared"], init["first"]) == (False, "G")


def test_an_unknown_start_is_refused() -> None:
    with pytest.raises(ConfigError, match="weight_init = 'impulse'; known: skip"):
        recipe_from_arguments({**BASE, "model_kwargs": {"weight_init": "impulse"}})


def test_vitcods_two_steps_become_attention_weights_and_a_penalty() -> None:
    released = {"use": "low_rank", "reconstruction": "released", "start": "released", "rank": 3}
    url = "https://dl.fbaipublicfiles.com/deit/deit_small_patch16_224-cd65a155.pth"
    first = {"model": "deit_small_patch16_224", "svd_type": "mix_head_fc_qk", "resume": url}
    sections = recipe_from_arguments(first, "vitcod-args").sections
    assert sections["model"]["name"] == "deit_small_patch16_224.fb_in1k"
    assert sections["model"]["pretrained"]
    assert sections["attention"] == [{"where": "blocks.*.attn", "parts": [released]}]
    assert (sections["train"]["precision"], sections["task"]["penalty"]) == ("fp32", 1e-4)
    second = {**first, "resume": "step1.pth", "restart_finetune": True, "mask_path": "info_0.9.npy"}
    sections = recipe_from_arguments(second).sections
    assert sections["model"]["weights"] == "step1.pth"
    assert sections["attention"][0]["parts"] == [released, {"use": "mask", "file": "info_0.9.npy"}]


def test_levits_masks_reach_its_downsampling_too() -> None:
    args = {"model": "LeViT_192", "svd_type": "mix_head_fc_qk", "mask": "masks/0.9", "restart_finetune": True}
    sections = recipe_from_arguments({**args, "resume": "step1.pth"}).sections
    assert sections["model"]["name"] == "levit_192"
    assert [rule["parts"][0].get("rank") for rule in sections["attention"]] == [2, 3, 4, None]
    assert sections["attention"][-1]["where"] == "stages.*.downsample.*"
    assert sections["task"]["use"] == "distillation"


@pytest.mark.parametrize(("layer", "rules"), [(-1, ["blocks.*.attn"]), (0, ["blocks.0.attn", "blocks.[1-9]*.attn"])])
def test_rpc_stands_in_one_layer_or_in_all(layer: int, rules: list[str]) -> None:
    args = {"model": "deit_tiny_patch16_224", "robust": True, "num_iter": 2, "lambd": 3, "layer": layer}
    attention = recipe_from_arguments(args).sections["attention"]
    assert [rule["where"] for rule in attention] == rules
    middle = recipe_from_arguments({**args, "layer": 5}).sections["attention"]
    assert [rule["parts"] == ["symmetric"] for rule in middle] == [block != 5 for block in range(12)]


@pytest.mark.parametrize(("said", "meant"), [("reduce", "reduce"), ("broadcast", "broadcast"), ("", "none")])
def test_how_batch_norms_are_shared_is_taken_over(said: str, meant: str) -> None:
    args = {"model": "resnet18", "dataset": "torch/cifar10", "dist_bn": said, "sync_bn": True}
    train = recipe_from_arguments(args).sections["train"]
    assert (train["dist_bn"], train["sync_bn"]) == (meant, True)


def test_a_weight_or_a_radius_of_zero_is_zero_and_not_the_default() -> None:
    task = objective({"adv_training": "trades", "trades_beta": 0, "attack_eps": 0, "attack_steps": 1}, [])
    assert task is not None
    assert (task["beta"], task["eps"], task["attack"]["step_size"]) == (0, 0, 0)
