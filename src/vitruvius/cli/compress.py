"""Compress a run in one command: maps, masks, fine-tuning, evaluation, export, cycles (You et al. 2023, ViTCoD)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitruvius._errors import ConfigError, RunError

if TYPE_CHECKING:
    from vitruvius.targets.base import Target

SECTIONS = ("model", "attention", "data", "task", "train", "seed", "plugins")  # of the run, for its fine-tuning
TUNED = ("train.", "data.", "task", "seed=", "tracking", "analyses")  # settings of fine-tuning that may be said


def compress(
    run: str,
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
    """Maps, masks, fine-tuning, evaluation, export and cycles of a run in one go; ends with a page (ViTCoD, 2023).

    Every step leaves its artefact in one folder and is left out where that is there already, so an interrupted command
    resumes. Fine-tuning is an ordinary training from the run's weights; its recipe is recipe.yaml in the folder.

    Args:
        run: a run folder.
        overrides: settings of fine-tuning and of the data, e.g. train.epochs=5.
        sparsity: share of pairs to remove (default: 0.9).
        rank: also squeeze q and k through this many heads (default: all).
        rule: which pairs stay (default: information).
        budget: what removes that share: all sites together, every site, or every head (default: global).
        epochs: of fine-tuning (default: a third of the run's).
        threat: judged besides clean images, e.g. pgd:eps=4/255; may come again.
        images: average maps over N training images, and judge N of the validation split (default: all).
        out: folder of all artefacts (default: RUN_compressed).
        trust_plugins: import the modules a run names under plugins:, which runs code.
    """
    from vitruvius._files import Lock, atomic_write_text
    from vitruvius._secrets import redact
    from vitruvius._yaml import dump_yaml
    from vitruvius.cli.evaluate import evaluate
    from vitruvius.cli.masks import cycles, export, maps, masks
    from vitruvius.targets.base import local_run, open_target

    source = Path(local_run(run))
    if not (source / "config.yaml").is_file():
        raise RunError(f"{source} is not a run folder: it has no config.yaml. `vitruvius train` makes one.")
    data = [setting for setting in overrides if setting.startswith("data.")]
    target = open_target(str(source), data, trust_plugins=trust_plugins)
    from vitruvius.report import write_page
    from vitruvius.training import train

    tuning = _tuning(target.recipe, source, epochs)
    asked = {
        "sparsity": sparsity,
        "rank": rank,
        "rule": rule,
        "budget": budget,
        "epochs": epochs,
        "threats": threat,
        "images": images,
    }
    _check(target, tuning, overrides, asked)
    folder = out or source.with_name(f"{source.name}_compressed")
    with Lock(folder):
        _claim(folder, {"run": str(source), **asked, "overrides": list(overrides)})
        if not (folder / "maps.safetensors").is_file():
            maps(str(source), *data, images=images, out=folder / "maps.safetensors")
        if not (folder / "masks.safetensors").is_file():
            masks(folder / "maps.safetensors", rule=[rule], sparsity=sparsity, budget=budget, of=str(source))
        attention = _rules(tuning.get("attention") or (), folder / "masks.safetensors", rank)
        recipe = {**tuning, "attention": attention, "out": str(folder / "tuned")}
        atomic_write_text(folder / "recipe.yaml", dump_yaml(redact(recipe)))
        tuned = train(recipe, [*overrides, f"out={folder / 'tuned'}"])
        evaluations = {source: folder / "evaluation_before", tuned: folder / "evaluation_compressed"}
        for judged, place in evaluations.items():
            print(f"\n{place.name.removeprefix('evaluation_')}:")
            evaluate(str(judged), *data, threat=threat, images=images, out=place)
        if not (folder / "export.pt2").is_file():
            export(str(tuned), out=folder / "export.pt2")
        print("\ncycles of ViTCoD's accelerator, a model and no measurement:")
        cycles(str(tuned))
    page = write_page(
        [source, tuned], folder / "page.html", title="Before and after compression", evaluations=evaluations
    )
    print(page)
    return folder


def _tuning(recipe: Mapping[str, Any], run: Path, epochs: int | None) -> dict[str, Any]:
    """The recipe of a run, from its own weights, with a tenth of its learning rate."""
    tuning = {key: recipe[key] for key in SECTIONS if key in recipe}
    tuning["model"] = {**tuning["model"], "weights": str(run), "pretrained": False, "reset_head": False}
    train = dict(tuning.get("train") or {})
    rate = 0.1 * float(train.get("lr") or 1e-3)
    train |= {"lr": rate, "lr_base": None, "min_lr": rate / 10, "warmup_epochs": 0, "cooldown_epochs": 0}
    train["epochs"] = epochs or max(1, round(int(train.get("epochs", 3)) / 3))
    return {**tuning, "train": train}


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
    for name in ("rank", "epochs", "images"):
        if asked[name] is not None:
            check_count(asked[name], f"--{name}")
    read_rules(asked["rule"])
    for threat in asked["threats"]:
        make_threats(threat, where="--threat")
    for setting in overrides:
        if not setting.startswith(TUNED):
            raise ConfigError(
                f"{setting!r} cannot be changed: a compression fine-tunes the model of {target.text}. Settings of the "
                "training and its data can: train.epochs=5, data.root=…."
            )
    check_run(as_config({**tuning, "out": None}, overrides))
    rank = asked["rank"]
    for site in survey(target.model).values() if rank is not None else ():
        if site.attends == "tokens" and rank > site.num_heads:
            raise ConfigError(f"--rank {rank}, but {site.name!r} has {site.num_heads} heads; 1 … {site.num_heads} fit.")


def _claim(folder: Path, asked: Mapping[str, Any]) -> None:
    """Note what the folder is for; other settings need another folder."""
    from vitruvius._files import atomic_write_text
    from vitruvius._secrets import redact

    text = redact(json.dumps(asked, indent=1))
    file = folder / "compress.json"
    if file.is_file() and file.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"{folder} holds another compression: compress.json says\n{file.read_text(encoding='utf-8')}\n"
            "Choose another folder with --out, or delete this one."
        )
    atomic_write_text(file, text)


def _rules(old: Sequence[dict[str, Any]], masks: Path, rank: int | None) -> list[dict[str, Any]]:
    """The run's rules with the new stages before their kernels; sites without a rule get one of their own."""
    from vitruvius.compression.files import load_masks

    stages: list[dict[str, Any]] = [{"use": "mask", "file": str(masks)}]
    if rank is not None:
        stages.insert(0, {"use": "low_rank", "rank": rank})
    rules = [{"where": rule["where"], "parts": _with_stages(rule["parts"], stages)} for rule in old]
    left = [name for name in load_masks(masks).keep if not any(fnmatchcase(name, rule["where"]) for rule in old)]
    return [*rules, *({"where": name, "parts": stages} for name in left)]


def _with_stages(parts: Sequence[Any], stages: Sequence[dict[str, Any]]) -> list[Any]:
    """The parts with the new stages before the kernel, and before what chooses among the keys that are left."""
    from vitruvius._registry import read_spec
    from vitruvius.attention import attentions

    names = [read_spec(part, where="attention")[0] for part in parts]
    added = [stage for stage in stages if stage["use"] == "mask" or stage["use"] not in names]
    kept = [(part, attentions[name]) for part, name in zip(parts, names, strict=True) if name != "mask"]
    place = next((i for i, (_, piece) in enumerate(kept) if _comes_last(piece)), len(kept))
    others = [part for part, _ in kept]
    return [*others[:place], *added, *others[place:]]


def _comes_last(piece: object) -> bool:
    from vitruvius.attention import Kernel

    return isinstance(piece, type) and (issubclass(piece, Kernel) or "choice of keys" in getattr(piece, "writes", ()))
