"""Compress a run in one command: maps, masks, fine-tuning, evaluation, export, cycles (You et al. 2023, ViTCoD).

Every step leaves its artefact in one folder and is left out where that is there already, so an interrupted command
goes on. Fine-tuning is an ordinary training from the run's weights; its recipe is recipe.yaml in the folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from vitruvius._checks import check_count
from vitruvius._errors import ConfigError, RunError
from vitruvius._files import Lock, atomic_write_text
from vitruvius._registry import read_spec
from vitruvius._secrets import redact, redact_text
from vitruvius._yaml import dump_yaml, read_yaml
from vitruvius.attention import Kernel, attentions
from vitruvius.compression.command import cycles_of, export_target, maps_of_target, masks_of_maps, read_rules
from vitruvius.evaluation.command import EvaluateOptions, evaluate_target
from vitruvius.evaluation.threats import make_threats
from vitruvius.models import load_model
from vitruvius.surgery import survey
from vitruvius.targets import load_target_plugins, local_run
from vitruvius.training._train import train
from vitruvius.training.config import as_config
from vitruvius.training.dry_run import rehearse

SECTIONS = ("model", "attention", "data", "task", "train", "seed", "plugins")  # of the run, for its fine-tuning
TUNED = ("train.", "data.", "task", "seed=", "tracking", "analyses")  # settings of fine-tuning that may be said
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Compression:
    """What is asked of a compression."""

    sparsity: float = 0.9  # share of all pairs of queries and keys that is removed
    rank: int | None = None  # heads that q and k are squeezed through; None: no auto-encoder
    rule: str = "information"
    epochs: int | None = None  # of fine-tuning; None: a third of the run's
    rate: float = 0.1  # of the run's learning rate
    threats: tuple[str, ...] = ()  # judged besides clean images
    images: int | None = None  # of the training split for the maps, of the validation split for judging; None: all

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise ConfigError(f"sparsity = {self.sparsity}, expected a share of pairs from 0 to below 1.")
        for count, name in ((self.rank, "--rank"), (self.epochs, "--epochs"), (self.images, "--images")):
            if count is not None:
                check_count(count, name)


def compress(
    run: str | Path,
    asked: Compression,
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    tell: Tell = lambda _: None,
) -> Path:
    """Compress a run folder; the folder with all artefacts, of which `tuned` is the compressed run.

    run: the run folder. asked: what is wanted. overrides: settings of fine-tuning and of the data, `data.root=…`,
    `train.epochs=5`. out: the folder; default: RUN_compressed beside the run. tell: called with the text of each step.
    """
    run = Path(local_run(run))
    if not (run / "config.yaml").is_file():
        raise RunError(f"{run} is not a run folder: it has no config.yaml. `vitruvius train` makes one.")
    load_target_plugins(str(run))  # the recipe of fine-tuning names them too
    _check_names(asked)
    _check_tuning(run, asked, overrides)
    folder = Path(out or run.with_name(f"{run.name}_compressed"))
    with Lock(folder):
        _claim(folder, run, asked, overrides)
        _take_steps(run, asked, overrides, folder, tell)
    return folder


def _take_steps(run: Path, asked: Compression, overrides: Sequence[str], folder: Path, tell: Tell) -> None:
    """What is not there yet: maps, masks, the tuned run, evaluations, the export, cycles."""
    data = [setting for setting in overrides if setting.startswith("data.")]
    maps, masks, tuned = folder / "maps.safetensors", folder / "masks.safetensors", folder / "tuned"
    if not maps.is_file():
        maps_of_target(str(run), data, str(maps), images=asked.images)
    tell(f"maps: {maps}")
    if not masks.is_file():
        _, text = masks_of_maps(str(maps), asked.rule, str(masks), sparsity=asked.sparsity, of=str(run))
        tell(text)
    recipe = _recipe(run, masks, asked, tuned)
    atomic_write_text(folder / "recipe.yaml", dump_yaml(redact(recipe)))
    train(recipe, [*overrides, f"out={tuned}"])
    _judge(run, tuned, folder, data, asked, tell)
    exported = folder / "export.pt2"
    if not exported.is_file():
        export_target(str(tuned), str(exported))
    tell(f"export: {exported}")
    table, _ = cycles_of(str(tuned))
    tell(f"cycles of ViTCoD's accelerator, a model and no measurement:\n{table}")


def _check_names(asked: Compression) -> None:
    """A misspelt rule or threat is found before anything is written."""
    read_rules(asked.rule)
    for threat in asked.threats:
        make_threats(threat, where="--threat")


def _check_tuning(run: Path, asked: Compression, overrides: Sequence[str]) -> None:
    """Refuse settings of fine-tuning that would fail, before hours go into what comes first; masks come later."""
    for setting in overrides:
        if not setting.startswith(TUNED):
            raise ConfigError(
                f"{setting!r} cannot be changed: a compression fine-tunes the model of {run}. Settings of the training "
                "and its data can: train.epochs=5, data.root=…."
            )
    old = read_yaml(run / "config.yaml").get("attention") or []
    rehearse(as_config({**_tuning(run, asked), "attention": old, "out": None}, overrides))
    if asked.rank is not None:
        _check_rank(run, asked.rank)


def _check_rank(run: Path, rank: int) -> None:
    """Refuse to squeeze heads through more heads than there are, before maps are made."""
    for site in survey(load_model(run)).values():
        if site.attends == "tokens" and rank > site.num_heads:
            raise ConfigError(f"--rank {rank}, but {site.name!r} has {site.num_heads} heads; 1 … {site.num_heads} fit.")


def _claim(folder: Path, run: Path, asked: Compression, overrides: Sequence[str]) -> None:
    """Remember what the folder is for; other settings need another folder."""
    settings = {"run": str(run), **asdict(asked), "overrides": list(overrides)}
    wanted = redact_text(json.dumps(settings, indent=1))
    known = folder / "compress.json"
    if known.is_file() and known.read_text(encoding="utf-8") != wanted:
        raise ConfigError(
            f"{folder} holds another compression: compress.json says\n{known.read_text(encoding='utf-8')}\n"
            "Choose another folder with --out, or delete this one."
        )
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_text(known, wanted)


def _recipe(run: Path, masks: Path, asked: Compression, tuned: Path) -> dict[str, Any]:
    """The run's recipe, from its own weights, with the new stages and a smaller rate."""
    old = read_yaml(run / "config.yaml").get("attention") or []
    return _tuning(run, asked) | {"attention": _rules(old, masks, asked.rank), "out": str(tuned)}


def _tuning(run: Path, asked: Compression) -> dict[str, Any]:
    """The run's recipe, from its own weights, with a smaller rate."""
    old = read_yaml(run / "config.yaml")
    recipe = {key: old[key] for key in SECTIONS if key in old}
    recipe["model"] |= {"weights": str(run), "pretrained": False, "reset_head": False}
    train_section = dict(recipe.get("train") or {})
    epochs = asked.epochs or max(1, round(int(train_section.get("epochs", 3)) / 3))
    rate = asked.rate * float(train_section.get("lr") or 1e-3)
    train_section |= {"lr": rate, "lr_base": None, "min_lr": rate / 10, "warmup_epochs": 0, "cooldown_epochs": 0}
    recipe["train"] = {**train_section, "epochs": epochs}
    return recipe


def _rules(old: Sequence[dict[str, Any]], masks: Path, rank: int | None) -> list[dict[str, Any]]:
    """The run's rules with the new stages before their kernels; sites without a rule get one of their own."""
    from vitruvius.compression.files import load_masks

    stages: list[Any] = [{"use": "mask", "file": str(masks)}]
    if rank is not None:
        stages.insert(0, {"use": "low_rank", "rank": rank})
    rules = [{"where": rule["where"], "parts": _with_stages(rule["parts"], stages)} for rule in old]
    left = [name for name in load_masks(masks).keep if not any(fnmatchcase(name, rule["where"]) for rule in old)]
    return [*rules, *({"where": name, "parts": stages} for name in left)]


def _with_stages(parts: Sequence[Any], stages: Sequence[dict[str, Any]]) -> list[Any]:
    """The parts with the new stages before the kernel, and before what chooses among the keys that are left."""
    names = [read_spec(part, where="attention")[0] for part in parts]
    added = [stage for stage in stages if stage["use"] == "mask" or stage["use"] not in names]
    kept = [(part, name) for part, name in zip(parts, names, strict=True) if name != "mask"]
    place = next((i for i, (_, name) in enumerate(kept) if _comes_last(attentions[name])), len(kept))
    others = [part for part, _ in kept]
    return [*others[:place], *added, *others[place:]]


def _comes_last(piece: object) -> bool:
    return isinstance(piece, type) and (issubclass(piece, Kernel) or bool(getattr(piece, "chooses", False)))


def _judge(run: Path, tuned: Path, folder: Path, data: Sequence[str], asked: Compression, tell: Tell) -> None:
    """Both models on the same images and threats."""
    options = EvaluateOptions(threats=asked.threats, images=asked.images)
    for name, target in (("before", run), ("compressed", tuned)):
        found = evaluate_target(str(target), data, options, str(folder / f"evaluation_{name}"))
        tell(f"{name}:\n{found.report}")
