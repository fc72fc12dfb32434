"""Settings of another training program as a recipe: timm's args.yaml, DeiT's namespace, the light recipe's configs.

Names are timm's in all of them, so most options keep theirs. What has another meaning is said at the head of the
recipe; what cannot be expressed is refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
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
        """The recipe as YAML, its notes in the head.

        `origin` is where the settings come from, for the first line (default: not said).
        """
        return head_of(f"Settings of {origin}.", origin, self.notes) + dump_yaml(self.sections)


def head_of(sentence: str, origin: str, notes: Sequence[str]) -> str:
    """Comment lines for the head of a YAML file: where it comes from, if that is known, and the notes.

    `sentence` is the first line; `origin` may be empty; `notes` follow, one line each.
    """
    lines = list(notes)
    if origin:
        lines.insert(0, sentence)
    return "".join(f"# {line}\n" for line in lines if line)


def read_arguments(path: StrPath, program: str = "timm-args", *, lenient: bool = False) -> Recipe:
    """Settings of another training program (YAML, JSON, or the `Namespace(…)` of a log) as a recipe.

    path: the file. program: whose settings they are, one of `SETTINGS`; with timm-args, options that only another
    program has say which it is. lenient: what cannot be expressed here is left out with a note instead of refused.
    """
    args = _load(read_text(path), str(path))
    if program == "timm-args":
        return recipe_from_arguments(args, lenient=lenient)
    return recipe_from_arguments(args, program, lenient=lenient)


def _reader(program: Program) -> Callable[..., Recipe]:
    def read(path: StrPath, *, lenient: bool = False) -> Recipe:
        return read_arguments(path, program.name, lenient=lenient)

    read.__doc__ = f"Settings of {program.says}, as a recipe."
    return read


for _program in PROGRAMS.values():
    converters.register(_program.name)(_reader(_program))


def write_recipe(recipe: Recipe, path: str | Path, *, origin: str = "") -> Path:
    """Write `recipe` to the file `path`, its notes in the head; an existing file is not overwritten.

    `origin` names where the settings come from (default: not said).
    """
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
    given = {key.replace("-", "_"): _plain(value) for key, value in args.items()}
    if not given.get("model"):
        raise ConfigError("these options name no model; expected a key `model`, as in timm's args.yaml.")
    whose = guess(given)
    if program is not None:
        whose = PROGRAMS[program]
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


def _plain(value: Any) -> Any:
    """A value without the words for nothing."""
    if value in ("None", "none"):
        return ""
    return value


def _load(text: str, name: str) -> dict[str, Any]:
    if text.lstrip().startswith("Namespace("):
        return _printed_namespace(text)
    found = parse_value(re.sub(r"!!python/\S+", "", text))  # tags of pickled namespaces and tuples
    if isinstance(found, dict):
        found = found.get("args", found)
    if not isinstance(found, dict):
        raise ConfigError(f"{name} holds {type(found).__name__}, expected options by name, as in timm's args.yaml.")
    return {str(key): value for key, value in found.items()}


def _printed_namespace(text: str) -> dict[str, Any]:
    """`Namespace(lr=0.1, …)`, as argparse prints it into logs."""
    call = ast.parse(text.strip(), mode="eval").body
    assert isinstance(call, ast.Call)
    return {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}


def _taken(args: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: args[theirs] for theirs, ours in names.items() if args.get(theirs) not in (None, "")}


def _model(args: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    model = {key: value for key, value in _taken(args, options.MODEL).items() if value is not False}
    model["name"] = _known_model(str(model["name"]))
    kwargs = _model_kwargs(args, notes)
    if args.get("finetune"):
        model["reset_head"] = True
        notes.append("finetune: there the head is new only where its shape differs, here always (model.reset_head).")
    if "no_normalize" in args and not args.get("normalize_model"):
        model |= {"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]}
    if kwargs:
        model["kwargs"] = kwargs
    return model


def _known_model(name: str) -> str:
    """The name with our prefix, where the model is ours."""
    ours = f"vitruvius/{name}"
    if ours in models:
        return ours
    return name


def _model_kwargs(args: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """What the model's constructor is given."""
    kwargs = {**_taken(args, options.KWARGS), **dict(args.get("model_kwargs") or {})}
    if args.get("drop_connect"):
        kwargs.setdefault("drop_path_rate", args["drop_connect"])
        notes.append("drop_connect is timm's old name of drop_path; taken as model.kwargs.drop_path_rate.")
    size = args.get("input_size")
    if isinstance(size, int) and size != 224:  # DeiT builds its models for it
        kwargs["img_size"] = size
    return kwargs


def _data(args: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    data = _taken(args, options.DATA)
    data.setdefault("dataset", "folder")
    if args.get("data_set"):
        data["dataset"] = _deit_dataset(str(args["data_set"]), notes)
    if "color_jitter" in args and args["color_jitter"] is None:
        data["color_jitter"] = 0.0  # null is off there; here it would mean 0.4
    if isinstance(args.get("input_size"), list | tuple):
        data["image_size"] = args["input_size"][-1]
    _add_augmentation(args, data)
    if args.get("combine_dataset"):
        data["mix"] = _mix(args, args.get("combine_data_dir") or data.get("root"), notes)
    return data


def _deit_dataset(name: str, notes: list[str]) -> str:
    """What DeiT's --data-set is called here."""
    if name.startswith("INAT"):
        notes.append(f"data_set {name}: say the year with data.train_split, e.g. 2021_train.")
    return options.DEIT_DATA.get(name, "folder")


def _add_augmentation(args: Mapping[str, Any], data: dict[str, Any]) -> None:
    """What has another name or another form there."""
    if args.get("repeated_aug"):
        data["aug_repeats"] = 3
    if not args.get("jsd_loss"):
        data.pop("aug_splits", None)
    if args.get("ThreeAugment") or args.get("three_augment"):
        data["aa"] = "3a"


def _mix(args: Mapping[str, Any], root: str | None, notes: list[str]) -> dict[str, Any]:
    """The second set of every batch; the light recipe's TFDS builder reads a raw file, and so do we."""
    name = str(args["combine_dataset"])
    if name.removeprefix("tfds/") == "cifar_ddpm":
        name = "bin/32x32x3"
        root = f"{root or '.'}/{options.DDPM_IMAGES}"
        notes.append(f"combine_dataset {args['combine_dataset']}: read from its raw file {root} (data.mix.root).")
    mix = {"dataset": name, "fraction": args.get("combined_dataset_ratio", 0.5)}
    if root:
        mix["root"] = root
    return mix


def _train(args: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    train = {**_taken(args, options.TRAIN), "holdout": 0}
    train.setdefault("sched_on_updates", False)
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
    if said:
        _leave_out(said, notes, lenient)
    _note_what_differs(args, notes)


def _leave_out(said: list[str], notes: list[str], lenient: bool) -> None:
    if not lenient:
        raise ConfigError(
            f"these options cannot be expressed in a recipe: {', '.join(said)}. Take them out of the file, or convert "
            "with --lenient, which leaves them out and says so in the head of the recipe."
        )
    notes.append(f"not known here, left out: {', '.join(said)}.")


def _note_what_differs(args: Mapping[str, Any], notes: list[str]) -> None:
    """Options that are understood and mean something else here."""
    if args.get("resume") and "svd_type" not in args:
        notes.append("resume: train the recipe again and it goes on where its own run stopped.")


def _is_understood(key: str, value: Any) -> bool:
    if key in options.READ or key in options.MACHINE or value in NOTHING:
        return True
    return key in options.HERE_TOO and value == options.HERE_TOO[key]
