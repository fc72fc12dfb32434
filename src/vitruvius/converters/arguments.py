"""Settings of another training program as a recipe: timm's args.yaml, DeiT's namespace, the light recipe's configs.

Names are timm's in both, so most options keep theirs. What has no counterpart is listed, what has another meaning is
said; both stand at the head of the recipe.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitruvius._errors import ConfigError
from vitruvius._files import StrPath, atomic_write_text, read_text
from vitruvius._yaml import dump_yaml, parse_value
from vitruvius.converters import _options as options
from vitruvius.converters._converted import SETTINGS, converters
from vitruvius.converters._objectives import distillation, objective
from vitruvius.models import models

NOTHING: tuple[Any, ...] = (None, "", False, [], {})
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


@converters.register(SETTINGS)
def read_arguments(path: StrPath) -> Recipe:
    """Settings of timm, DeiT or the light recipe (YAML, JSON, or the `Namespace(…)` of a log) as a recipe."""
    return recipe_from_arguments(_load(read_text(path), str(path)))


def write_recipe(recipe: Recipe, path: str | Path, *, origin: str = "") -> Path:
    """Write a recipe; an existing file is not overwritten."""
    path = Path(path)
    if path.exists():
        raise ConfigError(f"{path} exists already. Choose another file with --out.")
    atomic_write_text(path, recipe.text(origin))
    return path


def recipe_from_arguments(args: Mapping[str, Any]) -> Recipe:
    """The options of one run, by name, as a recipe."""
    args = {key.replace("-", "_"): "" if value in ("None", "none") else value for key, value in args.items()}
    if not args.get("model"):
        raise ConfigError("these options name no model; expected a key `model`, as in timm's args.yaml.")
    notes: list[str] = []
    model, data, train = _model(args, notes), _data(args, notes), _train(args, notes)
    task = objective(args, notes) or distillation(args, notes) or ("jsd" if args.get("jsd_loss") else "supervised")
    if isinstance(task, str):
        task = {"use": task, **({"binary": True} if args.get("bce_loss") else {})}
        task |= {"splits": args["aug_splits"]} if task["use"] == "jsd" and args.get("aug_splits") else {}
    _name_the_rest(args, notes)
    sections = {"seed": int(args.get("seed") or 0), "model": model, "data": data, "task": task, "train": train}
    return Recipe(sections=sections, notes=notes)


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
    if isinstance(args.get("input_size"), list | tuple):
        data["image_size"] = args["input_size"][-1]
    if args.get("repeated_aug"):
        data["aug_repeats"] = 3
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
    if args.get("data_set"):
        _as_deit(args, train, notes)
    if train.get("lr") is not None and train.get("lr_base") is not None:
        train = {key: value for key, value in train.items() if not key.startswith("lr_base")}  # lr wins there
    return train


def _as_deit(args: Mapping[str, Any], train: dict[str, Any], notes: list[str]) -> None:
    """DeiT trains in half precision, and its lr is for 512 images."""
    train.setdefault("precision", "fp16")
    if train.get("lr") is not None and not args.get("unscale_lr"):
        train |= {"lr_base": train.pop("lr"), "lr_base_size": 512, "lr_base_scale": "linear"}
        notes.append("lr is DeiT's for 512 images: lr_base here, scaled by the global batch.")
    if args.get("finetune"):
        notes.append("DeiT fine-tunes in eval mode, without drop path; here in train mode.")
    notes.append("DeiT's schedule stands still for the first two epochs; here it moves after the first.")


def _name_the_rest(args: Mapping[str, Any], notes: list[str]) -> None:
    unknown = {key: args[key] for key in args if key not in options.READ and key not in options.MACHINE}
    if said := [f"{key}={value}" for key, value in unknown.items() if value not in NOTHING]:
        notes.append(f"not known here, left out: {', '.join(said)}.")
    if args.get("resume"):
        notes.append("resume: train the recipe again and it goes on where its own run stopped.")
    if "log_interval" not in args and "data_set" not in args:
        notes.append("the file names only some options; the others have our defaults, not those of its program.")
