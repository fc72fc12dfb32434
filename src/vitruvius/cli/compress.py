"""Compress a model in one command: maps, masks, fine-tuning, evaluation, export, cycles (You et al. 2023, ViTCoD)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitruvius._errors import ConfigError
from vitruvius._secrets import redact
from vitruvius._version import __version__
from vitruvius._yaml import dump_yaml, to_plain

if TYPE_CHECKING:
    from vitruvius.targets.base import Target

SECTIONS = ("model", "attention", "data", "task", "train", "seed", "plugins")  # of the recipe of fine-tuning
TUNED = ("train.", "data.", "task", "seed=", "tracking", "analyses")  # settings of fine-tuning that may be said
OF_MODEL = ("model.", "attention", "plugins")  # of a model by name


def compress(
    target: str,
    /,
    *overrides: str,
    sparsity: float = 0.9,
    rank: int | None = None,
    rule: str = "information",
    budget: Literal["global", "layer", "head"] = "global",
    epochs: int | None = None,
    threat: Sequence[str] = (),
    images: int | None = None,
    out: Path | None = None,
    trust_plugins: bool = False,
) -> Path:
    """Maps, masks, fine-tuning, evaluation, export and cycles of a model in one go; ends with a page (ViTCoD, 2023).

    Every step leaves its artefact in one folder and is left out where that is there already, so an interrupted command
    resumes. Fine-tuning is an ordinary training from the model's weights; its recipe is recipe.yaml in the folder.

    Args:
        target: a run folder, or a model name with its data.
        overrides: settings of fine-tuning and of the data, e.g. train.epochs=5; of a model by name also model.….
        sparsity: share of pairs to remove (default: 0.9).
        rank: also squeeze q and k through this many heads (default: all).
        rule: which pairs stay (default: information).
        budget: what removes that share: all sites together, every site, or every head (default: global).
        epochs: of fine-tuning; 0: none (default: a third of the run's; of a model by name 0).
        threat: judged besides clean images, e.g. pgd:eps=4/255; may come again.
        images: average maps over N training images, and judge N of the validation split (default: all).
        out: folder of all artefacts (default: RUN_compressed, or runs/NAME_compressed).
        trust_plugins: import the modules a run names under plugins:, which runs code.
    """
    from vitruvius._files import Lock, atomic_write_text, check_out
    from vitruvius.cli.evaluate import evaluate
    from vitruvius.cli.masks import cycles, export, maps, masks
    from vitruvius.targets.base import local_run, open_target

    source = local_run(target)
    words = _of_target(source, overrides)
    opened = open_target(source, words, trust_plugins=trust_plugins)
    from vitruvius.compression.steps import masked_rules
    from vitruvius.report import write_page
    from vitruvius.training import train

    tuning = _tuning(opened, source, epochs)
    names = ("sparsity", "rank", "rule", "budget", "epochs", "threats", "images")
    asked = dict(zip(names, (sparsity, rank, rule, budget, epochs, threat, images), strict=True))
    _check(opened, tuning, overrides, asked)
    folder = out or opened.folder.with_name(f"{opened.folder.name}_compressed")
    check_out(folder, opened.folder)
    with Lock(folder):
        _claim(folder, {"run": source, **asked, "overrides": list(overrides)})
        if not (folder / "maps.safetensors").is_file():
            maps(source, *words, images=images, out=folder / "maps.safetensors")
        if not (folder / "masks.safetensors").is_file():
            of = source if opened.is_run else None
            masks(folder / "maps.safetensors", rule=[rule], sparsity=sparsity, budget=budget, of=of)
        attention = masked_rules(tuning.get("attention") or (), folder / "masks.safetensors", rank)
        tuned = folder / "tuned"
        recipe = {**tuning, "attention": attention, "out": str(tuned)}
        atomic_write_text(folder / "recipe.yaml", dump_yaml(redact(recipe)))
        if tuning["train"]["epochs"]:
            tuned = train(recipe, [*_of_tuning(opened, overrides), f"out={tuned}"])
        elif not (tuned / "config.yaml").is_file():
            _write_untrained(recipe, tuned)
        data = [word for word in words if word.startswith("data.")]
        for name, judged, settings in (("before", source, words), ("compressed", str(tuned), data)):
            print(f"\n{name}:")
            evaluate(judged, *settings, threat=threat, images=images, out=folder / f"evaluation_{name}")
        if not (folder / "export.pt2").is_file():
            export(str(tuned), out=folder / "export.pt2")
        print("\ncycles of ViTCoD's accelerator, a model and no measurement:")
        cycles(str(tuned))
    before = opened.folder if opened.is_run else folder / "evaluation_before"
    evaluations = {before: folder / "evaluation_before", tuned: folder / "evaluation_compressed"}
    page = write_page(
        [before, tuned], folder / "page.html", title="Before and after compression", evaluations=evaluations
    )
    print(page)
    return folder


def _of_target(source: str, overrides: Sequence[str]) -> list[str]:
    """The overrides that say what is compressed: of a run only its data."""
    kinds = ("data.",) if (Path(source) / "config.yaml").is_file() else ("data.", "device=", *OF_MODEL)
    return [setting for setting in overrides if setting.startswith(kinds)]


def _of_tuning(target: Target, overrides: Sequence[str]) -> list[str]:
    """The overrides that the recipe of fine-tuning does not have from the target."""
    return [setting for setting in overrides if target.is_run or not setting.startswith(("device=", *OF_MODEL))]


def _tuning(target: Target, source: str, epochs: int | None) -> dict[str, Any]:
    """The recipe of a run, from its own weights, with a tenth of its learning rate; of a model by name a new one."""
    recipe = target.recipe if target.is_run else to_plain(target.config)
    tuning = {key: recipe[key] for key in SECTIONS if key in recipe}
    if target.is_run:
        tuning["model"] = {**tuning["model"], "weights": source, "pretrained": False, "reset_head": False}
    train = dict(tuning.get("train") or {})
    rate = 0.1 * float(train.get("lr") or 1e-3)
    train |= {"lr": rate, "lr_base": None, "min_lr": rate / 10, "warmup_epochs": 0, "cooldown_epochs": 0}
    if epochs is None:
        epochs = max(1, round(int(train.get("epochs", 3)) / 3)) if target.is_run else 0
    return {**tuning, "train": {**train, "epochs": epochs}}


def _check(target: Target, tuning: dict[str, Any], overrides: Sequence[str], asked: Mapping[str, Any]) -> None:
    """Refuse what would fail before anything is written; masks come later."""
    from vitruvius._checks import check_count
    from vitruvius.compression.steps import read_rules
    from vitruvius.evaluation.threats import make_threats
    from vitruvius.surgery import survey
    from vitruvius.training.config import as_config
    from vitruvius.training.loop import check_run

    if not 0 <= asked["sparsity"] < 1:
        raise ConfigError(f"--sparsity {asked['sparsity']}: expected a share of pairs from 0 to below 1.")
    for name in ("rank", "images"):
        if asked[name] is not None:
            check_count(asked[name], f"--{name}")
    if (asked["epochs"] or 0) < 0:
        raise ConfigError(f"--epochs {asked['epochs']}: expected a number of epochs, 0 or more.")
    read_rules(asked["rule"])
    for threat in asked["threats"]:
        make_threats(threat, where="--threat")
    for setting in _of_tuning(target, overrides):
        if not setting.startswith(TUNED):
            raise ConfigError(
                f"{setting!r} cannot be changed: a compression fine-tunes the model of {target.text}. Settings of the "
                "training and its data can: train.epochs=5, data.root=…."
            )
        if setting.startswith(("train.", "task")) and not tuning["train"]["epochs"]:
            raise ConfigError(f"{setting!r} is a setting of fine-tuning, and there is none; give --epochs too.")
    if tuning["train"]["epochs"]:
        check_run(as_config({**tuning, "out": None}, _of_tuning(target, overrides)))
    rank = asked["rank"]
    for site in survey(target.model).values() if rank is not None else ():
        if site.attends == "tokens" and rank > site.num_heads:
            raise ConfigError(f"--rank {rank}, but {site.name!r} has {site.num_heads} heads; 1 … {site.num_heads} fit.")


def _write_untrained(recipe: Mapping[str, Any], folder: Path) -> None:
    """The run that a fine-tuning of no epochs leaves: the model's own weights under the new attention."""
    from vitruvius._config import build
    from vitruvius._files import atomic_write_text, save_tensors
    from vitruvius.models.config import AttentionRule, ModelConfig
    from vitruvius.models.create import create_from_config

    rules = [build(AttentionRule, rule, source="attention") for rule in recipe["attention"]]
    model = create_from_config(build(ModelConfig, recipe["model"], source="model"), rules, seed=recipe.get("seed", 0))
    folder.mkdir(exist_ok=True)
    save_tensors(folder / "best.safetensors", model.model.state_dict(), {"vitruvius": __version__})
    kept = {key: value for key, value in recipe.items() if key not in ("train", "task", "out")}
    atomic_write_text(folder / "config.yaml", dump_yaml(redact({**kept, "versions": {"vitruvius": __version__}})))


def _claim(folder: Path, asked: Mapping[str, Any]) -> None:
    """Note what the folder is for; other settings need another folder."""
    from vitruvius._files import atomic_write_text

    text = redact(json.dumps(asked, indent=1))
    file = folder / "compress.json"
    if file.is_file() and file.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"{folder} holds another compression: compress.json says\n{file.read_text(encoding='utf-8')}\n"
            "Choose another folder with --out, or delete this one."
        )
    atomic_write_text(file, text)
