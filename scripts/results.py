"""Results of campaigns: keep what a table needs of every run, and make the tables of docs/RESULTS.md from it.

    python scripts/results.py collect runs/campaigns/attention_natural     # → results/attention_natural/*.json
    python scripts/results.py tables                                       # results/ → docs/RESULTS.md

A file of results/ holds a run's recipe, seed, versions, seconds, epochs and, for every threat, which images were
classified correctly (one bit each, in the order of their ids), so that two runs are compared image by image.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGE = ROOT / "docs" / "RESULTS.md"
FOLDERS = ("evaluation", "corruptions")
Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    collecting = verbs.add_parser("collect")
    collecting.add_argument("folder", type=Path)
    verbs.add_parser("tables")
    options = parser.parse_args()
    if options.verb == "collect":
        collect(options.folder)
    else:
        PAGE.write_text(with_tables(PAGE.read_text()))


def collect(folder: Path) -> None:
    """One small file per run."""
    notes = json.loads((folder / "sweep.json").read_text())
    out = RESULTS / folder.name
    out.mkdir(parents=True, exist_ok=True)
    for metrics in sorted(folder.glob("*/metrics.jsonl")):
        run = read_run(metrics.parent, notes.get(metrics.parent.name, {}))
        (out / f"{metrics.parent.name}.json").write_text(json.dumps(run, indent=1) + "\n")


def read_run(folder: Path, note: Run) -> Run:
    """Everything about a run but its weights."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    config.get("data", {})["root"] = "cifar10.npz"
    threats = {}
    for part in FOLDERS:
        if (folder / part / "report.json").exists():
            threats.update(read_threats(folder / part))
    return {
        "name": folder.name,
        "seed": config["seed"],
        "versions": config.pop("versions", {}),
        "started": str(config.pop("started", "")),
        "seconds": {"train": sum(row["seconds"] for row in rows), "all": note.get("seconds")},
        "status": note.get("status", "trained, not judged"),
        "config": config,
        "epochs": rows,
        "threats": threats,
    }


def read_threats(folder: Path) -> Run:
    """Accuracy, interval, stages and the images of every threat."""
    from vitruvius.evaluation import load_ledger

    ledger = None
    if (folder / "ledger.safetensors").exists():
        ledger = load_ledger(folder)
    found = {}
    for threat in json.loads((folder / "report.json").read_text())["threats"]:
        kept = ("accuracy", "low", "high", "n", "loss", "seconds", "stages", "severity", "family")
        found[f"{folder.name}/{threat['spec']}"] = {key: threat[key] for key in kept}
        if ledger is not None:
            rows = ledger[threat["spec"]]
            bits = np.packbits(rows["correct"][rows["id"].argsort()].numpy())
            found[f"{folder.name}/{threat['spec']}"]["correct"] = base64.b64encode(bits.tobytes()).decode()
    return found


def load(campaign: str) -> list[Run]:
    """All runs of a campaign."""
    return [json.loads(path.read_text()) for path in sorted((RESULTS / campaign).glob("*.json"))]


def with_tables(page: str) -> str:
    """The page with every block between `<!-- table NAME -->` and `<!-- end -->` made anew."""
    parts = page.split("<!-- table ")
    made = [parts[0]]
    for part in parts[1:]:
        name, _, rest = part.partition(" -->")
        _, _, after = rest.partition("<!-- end -->")
        made.append(f"{name} -->\n{TABLES[name]()}\n<!-- end -->{after}")
    return "<!-- table ".join(made)


def attention_natural() -> str:
    """Clean, PGD, AutoAttack and corruptions of naturally trained models; each against softmax, on the same images."""
    runs = {run["name"]: run for run in load("attention_natural")}
    judged = [run for run in runs.values() if run["threats"]]
    lines = [
        "| attention | clean | PGD-20 0.5/255 | PGD-20 1/255 | AutoAttack 1/255 | against softmax (p) | corruptions |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for run in sorted(judged, key=lambda run: -find(run, "autoattack")["accuracy"]):
        lines.append(attention_row(run, runs["softmax"]))
    return "\n".join(lines)


def attention_row(run: Run, reference: Run) -> str:
    return cells(
        f"`{run['name']}`",
        percent(find(run, "clean")),
        percent(find(run, "pgd", "0.5/255")),
        percent(find(run, "pgd", "(eps=1/255")),
        with_interval(find(run, "autoattack")),
        against(run, reference, "autoattack"),
        f"{100 * corrupted(run):.1f}",
    )


def attention_pgd() -> str:
    """Clean, PGD and AutoAttack of adversarially trained models; each against softmax, on the same images."""
    runs = {run["name"]: run for run in load("attention_pgd")}
    lines = [
        "| attention | clean | PGD-20 8/255 | AutoAttack 8/255 | against softmax (p) |",
        "|---|---:|---:|---:|---:|",
    ]
    judged = [run for run in runs.values() if run["threats"]]
    for run in sorted(judged, key=lambda run: -find(run, "autoattack")["accuracy"]):
        lines.append(
            cells(
                f"`{run['name']}`",
                percent(find(run, "clean")),
                percent(find(run, "pgd")),
                with_interval(find(run, "autoattack")),
                against(run, runs["softmax"], "autoattack"),
            )
        )
    return "\n".join(lines)


def structured() -> str:
    """Accuracy after every start; each against timm's start with the same seed, on the same images."""
    runs = {run["name"]: run for run in load("structured")}
    lines = [
        "| start | seed | epoch 20 | epoch 40 | test accuracy | against timm (p) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for run in sorted(runs.values(), key=lambda run: -find(run, "clean")["accuracy"]):
        start, _, _ = run["name"].partition("_seed")
        reference = runs["timm"]
        if run["seed"]:
            reference = runs[f"timm_seed{run['seed']}"]
        early = {row["epoch"] + 1: f"{100 * row['val_accuracy']:.1f}" for row in run["epochs"] if "val_accuracy" in row}
        lines.append(
            cells(
                f"`{start}`",
                str(run["seed"]),
                early.get(20, ""),
                early.get(40, ""),
                with_interval(find(run, "clean")),
                against(run, reference, "clean"),
            )
        )
    return "\n".join(lines)


def light() -> str:
    """One step, many steps and AutoAttack of models trained with one step; each against the light recipe."""
    runs = {run["name"]: run for run in load("light")}
    lines = [
        "| recipe | clean | one step | PGD-20 | AutoAttack 8/255 | against `light` (p) | alarms |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for run in sorted(runs.values(), key=lambda run: -find(run, "autoattack")["accuracy"]):
        lines.append(
            cells(
                f"`{run['name']}`",
                percent(find(run, "clean")),
                percent(find(run, "pgd", "steps=1,")),
                percent(find(run, "pgd", "steps=20")),
                with_interval(find(run, "autoattack")),
                against(run, runs["light"], "autoattack"),
                str(max(row.get("alarms", 0) for row in run["epochs"])),
            )
        )
    return "\n".join(lines)


def cells(*texts: str) -> str:
    return "| " + " | ".join(texts) + " |"


def with_interval(threat: Run) -> str:
    return f"**{percent(threat)}** [{100 * threat['low']:.1f}, {100 * threat['high']:.1f}]"


def against(run: Run, reference: Run, *words: str) -> str:
    """Difference to a reference on the same images, in points, with its p value; nothing for the reference itself."""
    if run["name"] == reference["name"]:
        return ""
    one, other = find(run, *words), find(reference, *words)
    if "correct" in one and "correct" in other:
        difference, p = paired(one, other)
    else:
        difference, p = unpaired(one, other)
    return f"{100 * difference:+.1f} ({p:.2g})"


def find(run: Run, *words: str) -> Run:
    """The threat whose name holds all words."""
    return next(threat for spec, threat in run["threats"].items() if all(word in spec for word in words))


def percent(threat: Run) -> str:
    return f"{100 * threat['accuracy']:.1f}"


def corrupted(run: Run) -> float:
    """Mean accuracy over the corruptions at all severities."""
    values = [threat["accuracy"] for threat in run["threats"].values() if threat["severity"] is not None]
    return sum(values) / len(values)


def paired(one: Run, other: Run) -> tuple[float, float]:
    """Difference of accuracies on the same images, and the exact two-sided p of McNemar's test."""
    bits = [np.unpackbits(np.frombuffer(base64.b64decode(t["correct"]), np.uint8))[: t["n"]] for t in (one, other)]
    better = int(((bits[0] == 1) & (bits[1] == 0)).sum())
    worse = int(((bits[0] == 0) & (bits[1] == 1)).sum())
    number = better + worse
    tail = sum(math.comb(number, k) for k in range(min(better, worse) + 1)) / 2**number
    return (better - worse) / one["n"], min(1.0, 2 * tail)


def unpaired(one: Run, other: Run) -> tuple[float, float]:
    """Difference of accuracies where the answers to single images were not kept, and the two-sided p of a z-test."""
    difference = one["accuracy"] - other["accuracy"]
    pooled = (one["accuracy"] * one["n"] + other["accuracy"] * other["n"]) / (one["n"] + other["n"])
    deviation = math.sqrt(pooled * (1 - pooled) * (1 / one["n"] + 1 / other["n"]))
    if deviation == 0:
        return difference, 1.0
    return difference, math.erfc(abs(difference) / deviation / math.sqrt(2))


TABLES = {
    "attention_natural": attention_natural,
    "attention_pgd": attention_pgd,
    "structured": structured,
    "light": light,
}


if __name__ == "__main__":
    main()
