"""Settings of another training program as a recipe: timm's args.yaml, DeiT's namespace, the light recipe's configs.

Names are timm's in all of them, so most options keep theirs. What has another meaning is said at the head of the
recipe; what cannot be expressed is refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitruvius._errors import ConfigError
from vitruvius._files import StrPath, atomic_write_text, read_text
from vitruvius._yaml import dump_yaml, parse_value
from vitruvius.converters import _options as options
from vitruvius.converters._converted import IMAGENET, converters
from vitruvius.converters._objectives import distillation, objective
from vitruvius.converters._programs import PROGRAMS, Program, guess
from vitruvius.models import models

NOTHING: tuple[Any, ...] = (None, "", False, [], {})
ONLY_IN_FULL = ("log_interval", "device", "dist_url", "world_size")  # in every namespace that a program wrote itself
PRECISION = {"float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The sections of a recipe, and what the user should know."""

    sections: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def text(self, origin: str = "") -> str:
        """The recipe as YAML, its notes in the head."""
        head = [f"Settings of {origin}." if origin else "", *self.notes]
        return "".join(f"# {line}\n" for line in head if line) + dump_yaml(self.sections)


def read_arguments(path: StrPath, program: str = "timm-args", *, lenient: bool = False) -> Recipe:
    """Settings of another training program (YAML, JSON, or the `Namespace(…)` of a log) as a recipe.

    path: the file. program: whose settings they are, one of `SETTINGS`; with timm-args, options that only another
    program has say which it is. lenient: what cannot be expressed here is left out with a note instead of refused.
    """
    args = _load(read_text(path), str(path))
    return recipe_from_arguments(args, None if program == "timm-args" else program, lenient=lenient)


def _reader(program: Program) -> Callable[..., Recipe]:
    def read(path: StrPath, *, lenient: bool = False) -> Recipe:
        return read_arguments(path, program.name, lenient=lenient)

    read.__doc__ = f"Settings of {program.says}, as a recipe."
    return read


for _program in PROGRAMS.values():
    converters.register(_program.name)(_reader(_program))


def write_recipe(recipe: Recipe, path: str | Path, *, origin: str = "") -> Path:
    """Write a recipe; an existing file is not overwritten."""
    path = Path(path)
    if path.exists():
        raise ConfigError(f"{path} exists already. Choose another file with --out.")
    atomic_write_text(path, recipe.text(origin))
    return path


def recipe_from_arguments(args: Mapping[str, Any], program: str | None = None, *, lenient: bool = False) -> Recipe:
    """The options of one run, by name, as a recipe.

    args: option → value. program: whose they are, one of `SETTINGS`; None: seen from the options. lenient: leave out
    what cannot be expressed here, with a note.
    """
    given = {key.replace("-", "_"): "" if value in ("None", "none") else value for key, value in args.items()}
    if not given.get("model"):
        raise ConfigError("these options name no model; expected a key `model`, as in timm's args.yaml.")
    whose = guess(given) if program is None else PROGRAMS[program]
    notes: list[str] = []
    args = {**whose.defaults, **given}
    if given.keys().isdisjoint(ONLY_IN_FULL):
        notes.append(f"the file names only some options; the others have the defaults of {whose.says}.")
    sections: dict[str, Any] = {
        "seed": int(args.get("seed") or 0),
        "model": _model(args, notes),
        "data": _data(args, notes),
        "task": _task(args, notes),
        "train": _train(args, notes),
    }
    if whose.deit_loop:
        _as_deit(args, sections, notes)
    whose.extend(args, sections, notes)
    _refuse_the_rest(args, notes, lenient)
    if not sections["model"].get("kwargs"):
        sections["model"].pop("kwargs", None)
    return Recipe(sections=sections, notes=notes)


def _task(args: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    task = objective(args, notes) or distillation(args, notes)
    if task is None and args.get("jsd_loss"):
        task = {"use": "jsd"}
        if args.get("aug_splits"):
            task["splits"] = args["aug_splits"]
    if task is None:
        task = {"use": "supervised"}
    if args.get("bce_loss"):
        task["binary"] = True
    return task


def _load(text: str, name: str) -> dict[str, Any]:
    if text.lstrip().startswith("Namespace("):
        call = ast.parse(text.strip(), mode="eval").body
        assert isinstance(call, ast.Call)
        return {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
    found = parse_value(re.sub(r"!!python/\S+", "", text))  # tags of pickled namespaces and tuples
    found = found.get("args", found) if isinstance(found, dict) else found
    if not isinstance(found, dict):
        raise ConfigError(f"{name} holds {type(found).__name__}, expected options by name, as in timm's args.yaml.")
    return {str(key): value for key, value in found.items()}


def _taken(args: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: args[theirs] for theirs, ours in names.items() if args.get(theirs) not in (None, "")}


def _model(args: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    model = {key: value for key, value in _taken(args, options.MODEL).items() if value is not False}
    name = str(model["name"])
    model["name"] = f"vitruvius/{name}" if f"vitruvius/{name}" in models else name
    kwargs = {**_taken(args, options.KWARGS), **dict(args.get("model_kwargs") or {})}
    if args.get("drop_connect"):
        kwargs.setdefault("drop_path_rate", args["drop_connect"])
        notes.append("drop_connect is timm's old name of drop_path; taken as model.kwargs.drop_path_rate.")
    size = args.get("input_size")
    if isinstance(size, int) and size != 224:  # DeiT builds its models for it
        kwargs["img_size"] = size
    if args.get("finetune"):
        model["reset_head"] = True
        notes.append("finetune: there the head is new only where its shape differs, here always (model.reset_head).")
    if "no_normalize" in args and not args.get("normalize_model"):
        model |= {"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]}
    return {**model, **({"kwargs": kwargs} if kwargs else {})}


def _data(args: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    data = _taken(args, options.DATA)
    if args.get("data_set"):
        data["dataset"] = options.DEIT_DATA.get(str(args["data_set"]), "folder")
        if str(args["data_set"]).startswith("INAT"):
            notes.append(f"data_set {args['data_set']}: say the year with data.train_split, e.g. 2021_train.")
    data.setdefault("dataset", "folder")
    if "color_jitter" in args and args["color_jitter"] is None:
        data["color_jitter"] = 0.0  # null is off there; here it would mean 0.4
    if isinstance(args.get("input_size"), list | tuple):
        data["image_size"] = args["input_size"][-1]
    if args.get("repeated_aug"):
        data["aug_repeats"] = 3
    if not args.get("jsd_loss"):
        data.pop("aug_splits", None)
    if args.get("ThreeAugment") or args.get("three_augment"):
        data["aa"] = "3a"
    if args.get("combine_dataset"):
        data["mix"] = _mix(args, args.get("combine_data_dir") or data.get("root"), notes)
    return data


def _mix(args: Mapping[str, Any], root: str | None, notes: list[str]) -> dict[str, Any]:
    """The second set of every batch; the light recipe's TFDS builder reads a raw file, and so do we."""
    name = str(args["combine_dataset"])
    if name.removeprefix("tfds/") == "cifar_ddpm":
        name, root = "bin/32x32x3", f"{root or '.'}/{options.DDPM_IMAGES}"
        notes.append(f"combine_dataset {args['combine_dataset']}: read from its raw file {root} (data.mix.root).")
    return {
        "dataset": name,
        "fraction": args.get("combined_dataset_ratio", 0.5),
        **({"root": root} if root else {}),
    }


def _train(args: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    train = {**_taken(args, options.TRAIN), "holdout": 0}
    train.setdefault("sched_on_updates", False)
    notes.append("holdout 0: the validation split chooses the best weights, as there. 0.1 would be honest.")
    if args.get("torchcompile"):
        train["compile"] = args["torchcompile"]
    if args.get("amp"):
        train["precision"] = PRECISION.get(str(args.get("amp_dtype") or "float16"), "fp16")
    if train.get("lr") is not None and train.get("lr_base") is not None:
        train = {key: value for key, value in train.items() if not key.startswith("lr_base")}  # lr wins there
    return train


def _as_deit(args: Mapping[str, Any], sections: dict[str, Any], notes: list[str]) -> None:
    """What DeiT's program does without being asked."""
    model, data, train = sections["model"], sections["data"], sections["train"]
    train.setdefault("precision", "fp16")
    if train.get("lr") is not None and not args.get("unscale_lr"):
        train |= {"lr_base": train.pop("lr"), "lr_base_size": 512, "lr_base_scale": "linear"}
        notes.append("lr is DeiT's for 512 images: lr_base here, scaled by the global batch.")
    if train.pop("cooldown_epochs", 0):
        notes.append("cooldown_epochs: DeiT's loop ends after its epochs and never comes to the cool-down; 0 here.")
    model.setdefault("mean", list(IMAGENET["mean"]))
    model.setdefault("std", list(IMAGENET["std"]))
    data.setdefault("crop_pct", 0.875)
    data.setdefault("interpolation", "bicubic")
    if args.get("finetune"):
        notes.append("DeiT fine-tunes in eval mode, without drop path; here in train mode.")
    if train.get("model_ema"):
        notes.append("DeiT keeps an average of the weights (model_ema) and never judges it; here it may become best.")
    notes.append("DeiT's schedule stands still for the first two epochs; here it moves after the first.")


def _refuse_the_rest(args: Mapping[str, Any], notes: list[str], lenient: bool) -> None:
    said = [f"{key}={value}" for key, value in args.items() if not _is_understood(key, value)]
    if args.get("aug_splits") and not args.get("jsd_loss"):
        said.append(f"aug_splits={args['aug_splits']} (without jsd_loss)")
    if said and not lenient:
        raise ConfigError(
            f"these options cannot be expressed in a recipe: {', '.join(said)}. Take them out of the file, or convert "
            "with --lenient, which leaves them out and says so in the head of the recipe."
        )
    if said:
        notes.append(f"not known here, left out: {', '.join(said)}.")
    if args.get("resume") and "svd_type" not in args:
        notes.append("resume: train the recipe again and it goes on where its own run stopped.")


def _is_understood(key: str, value: Any) -> bool:
    if key in options.READ or key in options.MACHINE or value in NOTHING:
        return True
    return key in options.HERE_TOO and value == options.HERE_TOO[key]
