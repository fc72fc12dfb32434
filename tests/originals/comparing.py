"""A packaged recipe beside the original's own command: both as flat keys, and what differs between them.

Keys that mean nothing under the other settings (a decay rate of a cosine) are left out; null is what it stands for.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vitruvius._registry import read_spec
from vitruvius._yaml import read_yaml
from vitruvius.attacks import attacks
from vitruvius.attention import attentions
from vitruvius.listing import recipes_folder
from vitruvius.models import PixelModel, create_model
from vitruvius.tasks import tasks
from vitruvius.training import Config

FOLDER = Path(__file__).parent
MACHINE = {"data.root", "data.download", "data.workers", "data.eval_batch_size", "data.num_classes", "data.mix.root"}
ASKED_ALONE = ("out", "analyses", "tracking", "plugins", "versions", "started")  # sections that change no weight
CLASSES = {"folder": 1000, "torch/cifar10": 10, "torch/cifar100": 100, "torch/svhn": 10, "torch/flowers102": 102}
CLASSES |= {"torch/caltech101": 101, "tfds/caltech101": 102, "tfds/image_net_subset": 100}
PHOTOGRAPHS = {"hflip": 0.5, "scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3), "color_jitter": 0.4, "pad": 0}
AUGMENTATION = {*PHOTOGRAPHS, "vflip", "train_interpolation", "rotation", "aa", "reprob", "remode", "recount"}
OWN_SIZES = {"vitruvius/vit_tiny_patch2_32": {"embed_dim": 192, "depth": 12, "num_heads": 3}}
HEAD = re.compile(r"\b(Differs|Data|Expected): ")
DECLARED = re.compile(r"([\w.*]+): (.+?) ≠ (.+?)(?:, (.*)|\.?)$", re.S)


@cache
def commands() -> dict[str, dict[str, Any]]:
    """Every published command by the name of its recipe: from, source, processes, options, gives."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(FOLDER.glob("*.yaml")):
        facts = read_yaml(file)
        shared = facts.pop("shared", {})
        for name, command in facts.items():
            like = shared[command["like"]] if "like" in command else {}
            found[name] = {**command, "options": {**like, **command.get("options", {})}}
    return found


def differences(ours: Config, theirs: Config) -> dict[str, tuple[Any, Any]]:
    """Key → (ours, theirs), where they differ."""
    mine, other = flat(ours), flat(theirs)
    keys = [key for key in {**mine, **other} if key not in MACHINE and _is_meant(key, mine, other)]
    return {key: (mine.get(key), other.get(key)) for key in keys if not _same(mine.get(key), other.get(key))}


def _is_meant(key: str, mine: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both sides use the key: a setting of something that one of them switches off is no difference more."""
    if key.startswith("init.") and key != "init.use":
        return mine.get("init.use") == other.get("init.use")
    return not key.startswith(("train.", "data.")) or (key in mine and key in other)


def flat(config: Config) -> dict[str, Any]:
    """Every key that matters, with what null stands for."""
    sections = {key: value for key, value in asdict(config).items() if key not in ASKED_ALONE}
    model = made(config)
    sections["model"] = _model(config, model)
    sections["data"] = _data(config, model)
    sections["train"] = _train(config)
    sections["task"] = _task(config)
    sections["attention"] = [_rule(rule) for rule in sections["attention"]]
    sections["init"] = _named(config.init)
    return dict(_leaves("", sections))


@cache
def _made(name: str, kwargs: str, positions: Any, restride: int | None) -> PixelModel:
    with torch.device("meta"):
        return create_model(name, positions=positions, restride=restride, **dict(eval(kwargs)))


def made(config: Config) -> PixelModel:
    """Its model without numbers."""
    model = config.model
    return _made(model.name, repr(sorted(model.kwargs.items())), model.positions, model.restride)


def _model(config: Config, model: PixelModel) -> dict[str, Any]:
    section = asdict(config.model)
    if not config.model.pretrained:
        section["name"] = config.model.name.partition(".")[0]  # a tag names weights
    section["mean"] = tuple(config.model.mean or model.data_config["mean"])
    section["std"] = tuple(config.model.std or model.data_config["std"])
    own = OWN_SIZES.get(config.model.name, {})
    kwargs = {key: value for key, value in config.model.kwargs.items() if value != own.get(key)}
    for key in ("drop_rate", "drop_path_rate"):
        if kwargs.get(key) == 0:
            del kwargs[key]
    kwargs.setdefault("num_classes", 100 if config.data.classes == "imagenet-100" else CLASSES[config.data.dataset])
    if kwargs.get("class_token") is False:
        kwargs.pop("no_embed_class", None)
    section["kwargs"] = kwargs
    return section


def _data(config: Config, model: PixelModel) -> dict[str, Any]:
    section = asdict(config.data)
    for key, value in PHOTOGRAPHS.items():
        if section[key] is None:
            section[key] = value
    for key in ("crop_pct", "interpolation", "crop_mode"):
        section[key] = section[key] or model.data_config.get(key)
    section["image_size"] = section["image_size"] or model.data_config["input_size"][-1]
    if section["aa"] and not section["aa"].startswith("3a"):
        del section["color_jitter"]  # timm jitters only where no policy does
    if section["rand_crop"]:
        del section["scale"], section["ratio"]
    if section["no_aug"]:
        section = {key: value for key, value in section.items() if key not in AUGMENTATION}
    if section["mix"]:
        section["mix"] = {key: value for key, value in section["mix"].items() if key != "root"}
    if section["val_split"] in ("val", "validation", "test"):
        del section["val_split"]  # names of the one split there is
    return section


def _train(config: Config) -> dict[str, Any]:
    section = asdict(config.train)
    unused: list[str] = []
    if section["opt"] == "adamw" and section["opt_eps"] is None:
        section["opt_eps"] = 1e-8
    if section["sched"] == "cosine":
        unused += ["decay_epochs", "decay_rate", "decay_milestones", "patience_epochs"]
    if section["sched"] == "step":
        unused += ["cooldown_epochs", "decay_milestones", "patience_epochs"]  # timm's step schedule has none
    if section["clip_grad"] is None:
        unused.append("clip_mode")
    if not section["model_ema"]:
        unused.append("model_ema_decay")
    if section["opt"] != "sgd":
        unused.append("momentum")
    else:
        unused.append("opt_eps")
    if section["lr_base"] is None:
        unused += ["lr_base_size", "lr_base_scale"]
    if section["warmup_epochs"] == 0:
        unused.append("warmup_lr")
    return {key: value for key, value in section.items() if key not in unused}


def _task(config: Config) -> dict[str, Any]:
    task = _with_defaults(config.task, tasks)
    if isinstance(task.get("attack"), str | dict):
        task["attack"] = _with_defaults(task["attack"], attacks)
    if isinstance(task.get("schedule"), str | dict):
        task["schedule"] = _named(task["schedule"])
        if task["schedule"]["use"] == "constant":
            task.pop("coupled", None)
    for name in ("attack", "schedule"):
        task |= {f"{name}.{key}": value for key, value in (task.pop(name, None) or {}).items()}
    return {key: _number(value) for key, value in task.items()}


def _rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    return {"where": rule["where"], "parts": [_with_defaults(part, attentions) for part in rule["parts"]]}


def _with_defaults(spec: Any, registry: Any) -> dict[str, Any]:
    named = _named(spec)
    signature = inspect.signature(registry[named["use"]])
    kept = {p.name: p.default for p in signature.parameters.values() if p.default is not p.empty}
    return {**kept, **named}


def _named(spec: Any) -> dict[str, Any]:
    if spec is None:
        return {}
    use, settings = read_spec(spec, where="")
    return {"use": use, **settings}


def _number(value: Any) -> Any:
    """`4/255` as the number it is."""
    if isinstance(value, str) and re.fullmatch(r"[\d.]+/[\d.]+", value):
        above, below = value.split("/")
        return float(above) / float(below)
    return value


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _leaves(f"{prefix}.{number}", inner)
    else:
        yield prefix, value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def show(value: Any) -> str:
    """A value as a head writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(show(item) for item in value) + "]"
    return str(value)


def declared(name: str) -> dict[str, tuple[str, str, str]]:
    """What a recipe's head says it differs in: key → (ours, theirs, why)."""
    found: dict[str, tuple[str, str, str]] = {}
    for text in declarations(recipes_folder() / f"{name}.yaml"):
        match = DECLARED.fullmatch(text)
        assert match, f"{name}: cannot read 'Differs: {text}'; write KEY: OURS ≠ THEIRS, WHY"
        key, ours, theirs, why = match.groups()
        found[key] = (ours, theirs, why or "")
    return found


def declarations(file: Path) -> list[str]:
    """The texts after `Differs:` in a recipe's head, unwrapped."""
    lines = file.read_text(encoding="utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    text = " ".join(line[1:].strip() for line in lines[:end] if not line.startswith("#   "))
    parts = HEAD.split(text)[1:]
    return [body.strip() for word, body in zip(parts[::2], parts[1::2], strict=True) if word == "Differs"]
