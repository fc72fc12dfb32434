"""What a table needs of every run of a campaign: one small file each, which git keeps.

A file of experiments/results holds a run's recipe, seed, versions, seconds, epochs and, for every threat, which images
were classified correctly (one bit each, in the order of their ids), so that two runs are compared image by image.
"""

from __future__ import annotations

import base64
import csv
import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from experiments.tables import RESULTS, ROOT, Run, is_judged, load, measured

CAMPAIGNS = ROOT / "experiments" / "campaigns"
HEAD = "# Measured: "


def collect(folder: Path, results: Path = RESULTS) -> list[str]:
    """One small file per run, or one for a study; what was written. A judged run is not replaced by one that is not."""
    out = results / folder.name
    out.mkdir(parents=True, exist_ok=True)
    if (folder / "study.json").is_file():
        write(out / "study.json", read_study(folder))
        return [str(out / "study.json")]
    notes = {}
    if (folder / "sweep.json").is_file():
        notes = json.loads((folder / "sweep.json").read_text())
    said = []
    for metrics in sorted(folder.glob("*/metrics.jsonl")):
        file = out / f"{metrics.parent.name}.json"
        run = read_run(metrics.parent, notes.get(metrics.parent.name, {}))
        if file.exists() and is_judged(json.loads(file.read_text())) and not is_judged(run):
            said.append(f"{file} stays: it is judged, and {metrics.parent} is not")
            continue
        write(file, run)
        said.append(f"{file} {run['status']}, {len(run['threats'])} threats")
    return said


def write(file: Path, content: Run) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")


def read_run(folder: Path, note: Run) -> Run:
    """Everything about a run but its weights."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if config.get("data", {}).get("root"):
        config["data"]["root"] = Path(config["data"]["root"]).name
    findings, wanted = read_findings(folder), config["train"]["epochs"]
    state = "judged" if findings["threats"] else "trained, not judged"
    return {
        "name": folder.name,
        "seed": config["seed"],
        "versions": config.pop("versions", {}),
        "started": str(config.pop("started", "")),
        "seconds": {"train": sum(row["seconds"] for row in rows), "all": note.get("seconds"), **wall_clock(folder)},
        "status": note.get("status")
        or (f"stopped after epoch {len(rows)} of {wanted}" if len(rows) < wanted else state),
        "config": config,
        "epochs": rows,
        **findings,
    }


def wall_clock(folder: Path) -> Run:
    """Seconds of the whole training, data and held-out evaluations included, and of judging."""
    file = folder.parent / "seconds" / f"{folder.name}.json"
    if not file.is_file():
        return {}
    known = json.loads(file.read_text())
    return {f"wall_{part}": seconds for part, seconds in known.items()}


def read_findings(folder: Path) -> Run:
    """Threats, checks for masked gradients, speed and cycles, by the folder of the evaluation inside the run."""
    found: Run = {"threats": {}, "checks": {}, "speed": {}}
    for report in sorted(folder.rglob("report.json")):
        place = report.parent.relative_to(folder).as_posix()
        if "shifts" not in report.parent.parts:
            found["threats"].update(read_threats(report.parent, place))
    for key, name in (("checks", "sanity.json"), ("speed", "speed.json")):
        for file in sorted(folder.rglob(name)):
            found[key][file.parent.relative_to(folder).as_posix()] = json.loads(file.read_text())
    for key in ("cycles", "milliseconds"):
        file = folder / f"{key}.json"
        found[key] = json.loads(file.read_text()) if file.is_file() else None
    return found


def read_threats(folder: Path, place: str) -> Run:
    """Accuracy, interval, stages, calibration and the images of every threat."""
    from vitruvius.evaluation import load_ledger

    ledger = None
    if (folder / "ledger.safetensors").exists():
        ledger = load_ledger(folder)
    found = {}
    for threat in json.loads((folder / "report.json").read_text())["threats"]:
        kept = ("accuracy", "low", "high", "n", "loss", "seconds", "stages", "severity", "family", "doubts")
        found[f"{place}/{threat['spec']}"] = {key: threat[key] for key in kept}
        if ledger is not None:
            found[f"{place}/{threat['spec']}"] |= of_images(ledger[threat["spec"]], clean=place == "all_images")
    return found


def of_images(rows: Any, *, clean: bool = False) -> Run:
    """Which images were right, one bit each, and the expected calibration error over 15 bins.

    Of clean images also the confidence of each, as float16, so that the error can be computed again with other bins.
    """
    from vitruvius.evaluation.metrics import EqualWidth, expected_error

    order = rows["id"].argsort()
    kept: Run = {"correct": bits(rows["correct"][order].numpy())}
    if "confidence" in rows:
        kept["ece"] = expected_error(EqualWidth(number=15)(rows["confidence"], rows["correct"]))
        if clean:
            kept["confidence"] = base64.b64encode(rows["confidence"][order].half().numpy().tobytes()).decode()
    return kept


def bits(correct: np.ndarray) -> str:
    return base64.b64encode(np.packbits(correct).tobytes()).decode()


def read_study(folder: Path) -> Run:
    """The rows of a study, and the answers to single images where it keeps them."""
    from vitruvius._files import load_tensors

    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    for row in rows:
        row["model"] = Path(row["model"]).name
    for file in sorted(folder.glob("*/answers/*.safetensors")):
        columns, about = load_tensors(file)
        for row in rows:
            if row["key"] == about["key"] and file.parents[1].name.endswith(row["model"]):
                row["correct"] = bits(columns["correct"][columns["id"].argsort()].numpy())
    for table in sorted(folder.glob("*/table.csv")):
        signs = signs_of_heads(table)
        for row in rows:
            if table.parent.name.endswith(row["model"]) and (row.get("analysis"), row.get("statistic")) in signs:
                row["signs"] = signs[row["analysis"], row["statistic"]]
    about = json.loads((folder / "study.json").read_text())
    subjects = json.loads((folder / "subjects.json").read_text())
    finished = datetime.date.fromtimestamp((folder / "table.csv").stat().st_mtime)
    return {
        **about,
        "settings": {key: without_folders(key, value) for key, value in about["settings"].items()},
        "versions": {Path(name).name: subject.get("versions", {}) for name, subject in subjects.items()},
        "finished": finished.isoformat(),
        "rows": rows,
    }


def signs_of_heads(table: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Of each analysis and statistic, by null: one sign per head, + above chance, - below it, 0 neither."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    with table.open(newline="") as file:
        for row in csv.DictReader(file):
            if row.get("null"):
                signs = found.setdefault((row["analysis"], row["statistic"]), {})
                sign = {"above": "+", "below": "-"}.get(row["claim"].split(" ")[0], "0")
                signs[row["null"]] = signs.get(row["null"], "") + sign
    return found


def without_folders(key: str, value: Any) -> Any:
    """A setting without the folders of the machine that it was used on."""
    if key in ("data.root", "model.weights", "shipped") and value is not None:
        return Path(value).name
    return value


def write_heads() -> None:
    """Say in the heads of campaigns and recipes what was measured."""
    for file, line in expected_heads().items():
        file.write_text(with_head(file.read_text(), line))


def expected_heads() -> dict[Path, str]:
    """What the heads of campaigns, and of recipes that a campaign runs as they stand, must say of what was measured."""
    found = {}
    for file in sorted((CAMPAIGNS).glob("*.yaml")):
        campaign = yaml.safe_load(file.read_text())
        judged = {run["name"]: run for run in load(file.stem) if is_judged(run)}
        if "list" not in campaign or not judged:
            continue
        planned = [item["name"] for item in campaign["list"]]
        done = [name for name in planned if name in judged]
        found[file] = f"{HEAD}{len(done)} of {len(planned)} runs (docs/results)."
        for item in campaign["list"]:
            if item["name"] in judged and set(item) <= {"name", "recipe"}:
                recipe = find_recipe(item.get("recipe", campaign["recipe"]))
                found.setdefault(recipe, f"{HEAD}{measured(judged[item['name']])}")
    return found


def find_recipe(name: str) -> Path:
    if (ROOT / name).is_file():
        return ROOT / name
    return ROOT / "recipes" / f"{name}.yaml"


def with_head(text: str, line: str) -> str:
    """The text of a YAML file whose head says this line: in place of an older one, else at its end."""
    lines = text.splitlines()
    head = next(number for number, one in enumerate(lines) if not one.startswith("#"))
    kept = [one for one in lines[:head] if not one.startswith(HEAD)]
    kept = [one.replace(" Not run here.", "") for one in kept]
    return "\n".join([*kept, line, *lines[head:]]) + "\n"
