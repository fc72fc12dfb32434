"""Settings of timm's train.py as a recipe, with those that the light recipe's fork of it has in addition.

The names are timm's here too, so most options keep theirs. What has another meaning is said at the head of the recipe;
what cannot be expressed is refused. Facts of timm 0.9.16's train.py and of dedeswim/vits-robustness-torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitruvius._errors import ConfigError
from vitruvius._files import StrPath, atomic_write_text, read_text
from vitruvius._yaml import dump_yaml, parse_value
from vitruvius.converters.base import comment, converters
from vitruvius.models import models

Args = Mapping[str, Any]
TAKEN = {  # options by the section of a recipe that takes them; theirs=ours where the names differ
    "model": "pretrained mean std model=name initial_checkpoint=weights finetune=weights",
    "model.kwargs": """
        num_classes in_chans gp=global_pool drop=drop_rate drop_path=drop_path_rate drop_block=drop_block_rate
    """,
    "data": """
        dataset train_split val_split class_map train_num_samples val_num_samples batch_size workers no_aug
        train_crop_mode scale ratio rand_crop pad hflip vflip color_jitter color_jitter_prob grayscale_prob
        gaussian_blur_prob aa train_interpolation interpolation crop_pct crop_mode reprob remode recount aug_repeats
        aug_splits mixup cutmix cutmix_minmax mixup_prob mixup_switch_prob mixup_mode mixup_off_epoch smoothing
        data=root data_dir=root img_size=image_size validation_batch_size=eval_batch_size dataset_download=download
        rand_rotation=rotation
    """,
    "train": """
        epochs opt lr lr_base lr_base_size lr_base_scale weight_decay momentum opt_eps opt_betas opt_kwargs layer_decay
        layer_decay_min_scale sched sched_on_updates warmup_epochs warmup_lr warmup_prefix min_lr cooldown_epochs
        decay_epochs decay_milestones decay_rate patience_epochs lr_noise lr_noise_pct lr_noise_std lr_cycle_mul
        lr_cycle_decay lr_cycle_limit lr_k_decay clip_grad clip_mode grad_accum_steps model_ema model_ema_decay
        model_ema_warmup grad_checkpointing channels_last sync_bn dist_bn
    """,
}
READ_TOGETHER = """
    amp amp_dtype seed input_size torchcompile model_kwargs normalize_model no_normalize drop_connect resume
    bce_loss jsd_loss kd_model_name kd_distill_type kd_temperature distill_loss_weight task_loss_weight adv_training
    attack attack_eps attack_steps attack_lr attack_norm eps_schedule eps_schedule_period zero_eps_epochs
    trades_beta combine_dataset combine_data_dir combined_dataset_ratio
"""
LIGHT_ONLY = "adv_training attack_eps normalize_model no_normalize combine_dataset finetuning_patch_size"
# about the machine, the log or the run folder
NO_SETTINGS = """
    fast_norm log_interval recovery_interval checkpoint_hist output experiment eval_metric tta local_rank
    use_multi_epochs_loader pin_mem no_pin_mem device world_size dist_url dist_backend distributed rank gpu
    log_wandb wandb_project wandb_tags wandb_resume_id wandb_run run_notes save_images no_prefetcher worker_seeding
    torchscript force_cpu use_mp_loader start_epoch config no_ddp_bb synchronize_step device_modules cache_dir
    val_interval num_gpu amp_impl apex_amp native_amp fuser aot_autograd torchcompile_mode input_img_mode
    dataset_trust_remote_code input_key target_key model_ema_force_cpu epoch_repeats no_resume_opt bn_tf
    eval_attack_eps finetuning_patch_size keep_patch_embedding reinit_patch_embedding
"""
HAPPENS_ANYWAY = {"attack_boundaries": [0, 1], "train_mode": True}  # with these values
NOTHING: tuple[Any, ...] = (None, "", False, [], {})
ONLY_IN_FULL = ("log_interval", "device", "dist_url", "world_size")  # in every file that the program wrote itself
PRECISION = {"float16": "fp16", "bfloat16": "bf16"}
DDPM_IMAGES = "cifar10_ddpm_serialized/cifar_ddpm_improvedddpm_sorted_images.bin"

DEFAULTS = {  # of both programs
    "color_jitter": 0.4, "smoothing": 0.1, "remode": "pixel", "recount": 1, "mixup_prob": 1.0,
    "mixup_switch_prob": 0.5, "mixup_mode": "batch", "momentum": 0.9, "sched": "cosine", "decay_rate": 0.1,
    "patience_epochs": 10, "warmup_epochs": 5, "scale": [0.08, 1.0], "ratio": [3 / 4, 4 / 3], "hflip": 0.5,
    "vflip": 0.0, "reprob": 0.0, "mixup": 0.0, "cutmix": 0.0, "mixup_off_epoch": 0, "aug_splits": 0,
    "train_split": "train", "val_split": "validation", "train_interpolation": "random", "drop": 0.0,
    "clip_mode": "norm", "opt": "sgd", "lr_base": 0.1, "lr_base_size": 256, "epochs": 300, "model_ema": False,
    "model_ema_decay": 0.9998, "seed": 42,
}  # fmt: skip
TIMM = DEFAULTS | {
    "batch_size": 128, "weight_decay": 2e-5, "warmup_lr": 1e-5, "min_lr": 0.0, "decay_epochs": 90,
    "decay_milestones": [90, 180, 270], "cooldown_epochs": 0, "aug_repeats": 0,
}  # fmt: skip
LIGHT = DEFAULTS | {
    "batch_size": 256, "weight_decay": 1e-4, "lr": 0.1, "warmup_lr": 1e-4, "min_lr": 1e-5, "decay_epochs": 100,
    "decay_milestones": [30, 60], "cooldown_epochs": 10, "no_normalize": True, "attack": "pgd", "attack_eps": 4,
    "attack_steps": 10, "attack_norm": "linf", "eps_schedule": "constant", "eps_schedule_period": 10,
    "trades_beta": 6.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The sections of a recipe, and what the user should know."""

    sections: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def write(self, path: str | Path, *, origin: str) -> Path:
        """Write the YAML file `path`, with `origin` and notes in its head; an existing file is not overwritten."""
        path = Path(path)
        if path.exists():
            raise ConfigError(f"{path} exists already. Choose another file with --out.")
        atomic_write_text(path, comment([f"Settings of {origin}.", *self.notes]) + dump_yaml(self.sections))
        return path


@converters.register("timm-args")
def read_arguments(path: StrPath, *, lenient: bool = False) -> Recipe:
    """Settings of timm's train.py, or of the light recipe's, as a recipe.

    path: args.yaml, or the same as JSON. lenient: what cannot be expressed here is left out with a note instead of
    refused.
    """
    content = parse_value(re.sub(r"!!python/\S+", "", read_text(path)))  # tags of pickled tuples
    if isinstance(content, dict):
        content = content.get("args", content)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}, expected options by name, as in timm's args.yaml.")
    return recipe_from_arguments(content, lenient=lenient)


def recipe_from_arguments(args: Args, *, lenient: bool = False) -> Recipe:
    """The options of one run, by name, as a recipe; what they do not say is the default of their program.

    lenient: leave out what cannot be expressed here, with a note.
    """
    given = {str(key).replace("-", "_"): "" if value in ("None", "none") else value for key, value in args.items()}
    if not given.get("model"):
        raise ConfigError("these options name no model; expected a key `model`, as in timm's args.yaml.")
    is_light = not given.keys().isdisjoint(LIGHT_ONLY.split())
    notes: list[str] = []
    if given.keys().isdisjoint(ONLY_IN_FULL):
        program = "the light recipe's train.py" if is_light else "timm's train.py"
        notes.append(f"the file names only some options; the others have the defaults of {program}.")
    args = {**(LIGHT if is_light else TIMM), **given}
    sections: dict[str, Any] = {
        "seed": int(args.get("seed") or 0),
        "model": _model(args, notes),
        "data": _data(args, notes),
        "task": _task(args, notes),
        "train": _train(args, notes),
    }
    _refuse_the_rest(args, notes, lenient)
    return Recipe(sections=sections, notes=notes)


def _names(section: str) -> dict[str, str]:
    """The options of a section: their name, and ours."""
    words = (word.partition("=") for word in TAKEN[section].split())
    return {theirs: ours or theirs for theirs, _, ours in words}


def _taken(args: Args, section: str) -> dict[str, Any]:
    return {ours: args[theirs] for theirs, ours in _names(section).items() if args.get(theirs) not in (None, "")}


def _model(args: Args, notes: list[str]) -> dict[str, Any]:
    model = {key: value for key, value in _taken(args, "model").items() if value is not False}
    if f"vitruvius/{model['name']}" in models:
        model["name"] = f"vitruvius/{model['name']}"
    if args.get("finetune"):
        model["reset_head"] = True
        notes.append("finetune: there the head is new only where its shape differs, here always (model.reset_head).")
    if "no_normalize" in args and not args.get("normalize_model"):
        model |= {"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]}
    kwargs = {**_taken(args, "model.kwargs"), **dict(args.get("model_kwargs") or {})}
    if args.get("drop_connect"):
        kwargs.setdefault("drop_path_rate", args["drop_connect"])
        notes.append("drop_connect is timm's old name of drop_path; taken as model.kwargs.drop_path_rate.")
    return {**model, "kwargs": kwargs} if kwargs else model


def _data(args: Args, notes: list[str]) -> dict[str, Any]:
    data = {"dataset": "folder", **_taken(args, "data")}
    if "color_jitter" in args and args["color_jitter"] is None:
        data["color_jitter"] = 0.0  # null is off there; here it would mean 0.4
    if isinstance(args.get("input_size"), list | tuple):
        data["image_size"] = args["input_size"][-1]
    if not args.get("jsd_loss"):
        data.pop("aug_splits", None)
    if args.get("combine_dataset"):
        data["mix"] = _mix(args, args.get("combine_data_dir") or data.get("root"), notes)
    return data


def _mix(args: Args, root: str | None, notes: list[str]) -> dict[str, Any]:
    """The second set of every batch; the light recipe's TFDS builder reads a raw file, and so do we."""
    name = str(args["combine_dataset"])
    if name.removeprefix("tfds/") == "cifar_ddpm":
        name = "bin/32x32x3"
        root = f"{root or '.'}/{DDPM_IMAGES}"
        notes.append(f"combine_dataset {args['combine_dataset']}: read from its raw file {root} (data.mix.root).")
    mix = {"dataset": name, "fraction": args.get("combined_dataset_ratio", 0.5)}
    return {**mix, "root": root} if root else mix


def _task(args: Args, notes: list[str]) -> dict[str, Any]:
    task: dict[str, Any] = {"use": "supervised"}
    if args.get("adv_training"):
        task = _adversarial(args, notes)
    elif args.get("kd_model_name"):
        task = _distillation(args, notes)
    elif args.get("jsd_loss"):
        task = {"use": "jsd", **({"splits": args["aug_splits"]} if args.get("aug_splits") else {})}
    if args.get("bce_loss"):
        task["binary"] = True
    return task


def _adversarial(args: Args, notes: list[str]) -> dict[str, Any]:
    """The light recipe's --adv-training; radii and steps are given in 1/255 there."""
    trades = args["adv_training"] == "trades"
    eps = float(_given(args, "attack_eps"))
    steps = int(args.get("attack_steps") or 10)  # an attack makes a step, and of some length
    step_size = float(args.get("attack_lr") or 1.5 * eps / steps) / 255
    task: dict[str, Any] = {
        "use": "trades" if trades else "adversarial",
        "eps": eps / 255,
        "norm": _given(args, "attack_norm"),
        "attack": {"use": _given(args, "attack"), "steps": steps, "step_size": step_size},
    }
    if trades:
        task["beta"] = float(_given(args, "trades_beta"))
    if _given(args, "eps_schedule") != "constant" and args.get("eps_schedule_period"):
        task["coupled"] = False  # the step stays that of the final eps
        task["schedule"] = {"use": args["eps_schedule"], "epochs": args["eps_schedule_period"]}
        if args.get("zero_eps_epochs"):
            task["schedule"] |= {"zero": args["zero_eps_epochs"], "variant": "released"}
    notes.append("there the 1-step training attack chooses the best weights, here PGD-10 (train.select_threat).")
    return task


def _given(args: Args, name: str) -> Any:
    """An option, or the light recipe's default where it is missing or says nothing; 0 says something."""
    value = args.get(name)
    return LIGHT[name] if value is None or value == "" or value is False else value


def _distillation(args: Args, notes: list[str]) -> dict[str, Any]:
    kind = args.get("kd_distill_type")
    task = {"use": "distillation", "teacher": args["kd_model_name"], "kind": "feature" if kind == "feature" else "soft"}
    if kind == "token":
        notes.append("kd_distill_type token: models with a distillation token use it here without being asked.")
    names = {"kd_temperature": "temperature"} | {name: name for name in ("distill_loss_weight", "task_loss_weight")}
    return task | {ours: float(args[theirs]) for theirs, ours in names.items() if args.get(theirs) is not None}


def _train(args: Args, notes: list[str]) -> dict[str, Any]:
    train = {"sched_on_updates": False, **_taken(args, "train"), "holdout": 0}
    notes.append("holdout 0: the validation split chooses the best weights, as there. 0.1 would be honest.")
    if args.get("torchcompile"):
        train["compile"] = args["torchcompile"]
    if args.get("dist_bn") == "":
        train["dist_bn"] = "none"
    if args.get("amp"):
        train["precision"] = PRECISION.get(str(args.get("amp_dtype") or "float16"), "fp16")
    if train.get("lr") is not None and train.get("lr_base") is not None:
        train = {key: value for key, value in train.items() if not key.startswith("lr_base")}  # lr wins there
    return train


def _refuse_the_rest(args: Args, notes: list[str], lenient: bool) -> None:
    understood = {*READ_TOGETHER.split(), *NO_SETTINGS.split()}.union(*(_names(section) for section in TAKEN))
    unknown = [
        f"{key}={value}"
        for key, value in args.items()
        if key not in understood and value not in NOTHING and HAPPENS_ANYWAY.get(key) != value
    ]
    if args.get("aug_splits") and not args.get("jsd_loss"):
        unknown.append(f"aug_splits={args['aug_splits']} (without jsd_loss)")
    if unknown and not lenient:
        raise ConfigError(
            f"these options cannot be expressed in a recipe: {', '.join(unknown)}. Take them out of the file, or "
            "convert with --lenient, which leaves them out and says so in the head of the recipe."
        )
    if unknown:
        notes.append(f"not known here, left out: {', '.join(unknown)}.")
    if args.get("resume"):
        notes.append("resume: train the recipe again and it resumes where its own run stopped.")
