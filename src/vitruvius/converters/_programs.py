"""The training programs whose options are read: what each assumes where an option is not given.

Facts of facebookresearch/deit (ab57153), of its copies in rachtsy/KPCA_code and GATECH-EIC/ViTCoD, of timm 0.9.16's
train.py and of dedeswim/vits-robustness-torch. An option that means nothing to a recipe is not listed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vitruvius.converters import _own_options as own

Args = Mapping[str, Any]
Extend = Callable[[Args, dict[str, Any], list[str]], None]

AUGMENTATION = {
    "color_jitter": 0.4,
    "smoothing": 0.1,
    "remode": "pixel",
    "recount": 1,
    "mixup_prob": 1.0,
    "mixup_switch_prob": 0.5,
    "mixup_mode": "batch",
}
OPTIMISATION = {"momentum": 0.9, "sched": "cosine", "decay_rate": 0.1, "patience_epochs": 10, "warmup_epochs": 5}
DEIT = {
    **AUGMENTATION,
    **OPTIMISATION,
    "data_set": "IMNET",
    "batch_size": 64,
    "epochs": 300,
    "input_size": 224,
    "drop": 0.0,
    "drop_path": 0.1,
    "model_ema": True,
    "model_ema_decay": 0.99996,
    "opt": "adamw",
    "opt_eps": 1e-8,
    "weight_decay": 0.05,
    "lr": 5e-4,
    "warmup_lr": 1e-6,
    "min_lr": 1e-5,
    "decay_epochs": 30,
    "cooldown_epochs": 10,
    "aa": "rand-m9-mstd0.5-inc1",
    "train_interpolation": "bicubic",
    "repeated_aug": True,
    "reprob": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
    "distillation_type": "none",
    "seed": 0,
}
LEVIT = {
    **{name: value for name, value in DEIT.items() if not name.startswith("drop")},
    "epochs": 1000,
    "clip_grad": 0.01,
    "clip_mode": "agc",
    "weight_decay": 0.025,
    "teacher_model": "regnety_160",
    "distillation_type": "hard",
    "distillation_alpha": 0.5,
}
PHOTOGRAPHS = {
    **AUGMENTATION,
    **OPTIMISATION,
    "scale": [0.08, 1.0],
    "ratio": [3 / 4, 4 / 3],
    "hflip": 0.5,
    "vflip": 0.0,
    "reprob": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
    "mixup_off_epoch": 0,
    "aug_splits": 0,
    "train_split": "train",
    "val_split": "validation",
    "train_interpolation": "random",
    "drop": 0.0,
    "clip_mode": "norm",
    "opt": "sgd",
    "lr_base": 0.1,
    "lr_base_size": 256,
    "epochs": 300,
    "model_ema": False,
    "model_ema_decay": 0.9998,
    "seed": 42,
}
TIMM = {
    **PHOTOGRAPHS,
    "batch_size": 128,
    "weight_decay": 2e-5,
    "warmup_lr": 1e-5,
    "min_lr": 0.0,
    "decay_epochs": 90,
    "decay_milestones": [90, 180, 270],
    "cooldown_epochs": 0,
    "aug_repeats": 0,
}
LIGHT = {
    **PHOTOGRAPHS,
    "batch_size": 256,
    "weight_decay": 1e-4,
    "lr": 0.1,
    "warmup_lr": 1e-4,
    "min_lr": 1e-5,
    "decay_epochs": 100,
    "decay_milestones": [30, 60],
    "cooldown_epochs": 10,
    "no_normalize": True,
    "attack": "pgd",
    "attack_eps": 4,
    "attack_steps": 10,
    "attack_norm": "linf",
    "eps_schedule": "constant",
    "eps_schedule_period": 10,
    "trades_beta": 6.0,
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training program: its name for `--from`, its defaults, its loop, and what its own options add to a recipe."""

    name: str
    says: str
    defaults: Args
    deit_loop: bool = False  # lr for 512 images, half precision, no cool-down, ImageNet's statistics, crop 0.875
    extend: Extend = own.nothing


PROGRAMS = {
    program.name: program
    for program in (
        Program(name="timm-args", says="timm's train.py", defaults=TIMM, extend=own.structured_start),
        Program(name="light-args", says="the light recipe's train.py", defaults=LIGHT),
        Program(name="deit-args", says="DeiT's main.py", defaults=DEIT, deit_loop=True),
        Program(
            name="kpca-robust-args",
            says="KPCA_code's Robust/main_train.py",
            defaults=DEIT,
            deit_loop=True,
            extend=own.pursuit,
        ),
        Program(
            name="kpca-scaled-args",
            says="KPCA_code's Scaled_Attention/main_train.py",
            defaults=DEIT,
            deit_loop=True,
            extend=own.scaled,
        ),
        Program(
            name="kpca-reconstruction-args",
            says="the reproduction study's Reconstruction/main_train.py",
            defaults={**DEIT, "repeated_aug": False},  # one process, which shuffles without repeating
            deit_loop=True,
            extend=own.reconstruction,
        ),
        Program(
            name="vitcod-args", says="ViTCoD's main.py for DeiT", defaults=DEIT, deit_loop=True, extend=own.low_rank
        ),
        Program(
            name="vitcod-levit-args",
            says="ViTCoD's main.py for LeViT",
            defaults=LEVIT,
            deit_loop=True,
            extend=own.low_rank,
        ),
    )
}


def guess(args: Args) -> Program:
    """The program whose options these are, by those that no other has; timm's where nothing else is seen."""
    if "svd_type" in args:
        kind = "vitcod-args"
        if str(args.get("model", "")).startswith("LeViT"):
            kind = "vitcod-levit-args"
    elif "robust" in args:
        kind = "kpca-robust-args"
    elif "s_scalar" in args:
        kind = "kpca-scaled-args"
    elif "data_set" in args:
        kind = "deit-args"
    elif "adv_training" in args or "attack_eps" in args:
        kind = "light-args"
    else:
        kind = "timm-args"
    return PROGRAMS[kind]
