"""Results of campaigns: bring them home, keep what a table needs of every run, make the tables of docs/RESULTS.md.

    python scripts/results.py pack runs/campaigns/attention_pgd out          # → out/attention_pgd.tar.gz.00, .01, …
    python scripts/results.py unpack out/attention_pgd.tar.gz.00 runs/campaigns
    python scripts/results.py collect runs/campaigns/attention_pgd           # → results/attention_pgd/*.json
    python scripts/results.py tables                                         # results/ → docs/RESULTS.md
    python scripts/results.py figures                                        # results/ → docs/figures/results_*.png
    python scripts/results.py heads                                          # results/ → heads of campaigns and recipes

A pack holds a campaign but its weights and the states of its optimisers, unfinished runs too; `--weights RUN` takes
the weights of a run along. Unpacked, a sweep knows which of its runs are finished and goes on with the others.

A file of results/ holds a run's recipe, seed, versions, seconds, epochs and, for every threat, which images were
classified correctly (one bit each, in the order of their ids), so that two runs are compared image by image.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from result_tables import RESULTS, Run, is_judged, load, measured, print_table, with_tables

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "RESULTS.md"
PIECE = 15  # MiB of one file of a pack
WEIGHTS = ("best.safetensors", "last.safetensors")
HEAVY = ("maps.safetensors", "maps.partial")  # left out of a pack, as weights and states are
HEAD = "# Measured: "


def main() -> None:
    options = make_parser().parse_args()
    options.run(options)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack", help="a campaign's files but its weights, in pieces")
    packing.add_argument("folder", type=Path)
    packing.add_argument("out", type=Path)
    packing.add_argument("--weights", nargs="*", default=[], metavar="RUN", help="runs whose weights come along")
    packing.add_argument(
        "--piece", type=int, default=PIECE, metavar="MIB", help="size of a piece (default %(default)s)"
    )
    packing.set_defaults(run=lambda o: print(*pack(o.folder, o.out, weights=o.weights, piece=o.piece), sep="\n"))
    unpacking = verbs.add_parser("unpack", help="the campaign's folder again")
    unpacking.add_argument("piece", type=Path, help="the first piece of a pack; the others lie beside it")
    unpacking.add_argument("folder", type=Path, help="where the folder of the campaign goes")
    unpacking.set_defaults(run=lambda o: print(unpack(o.piece, o.folder)))
    collecting = verbs.add_parser("collect", help="one small file per run")
    collecting.add_argument("folder", type=Path)
    collecting.add_argument("--results", type=Path, default=RESULTS, help="where they go (default: results/)")
    collecting.set_defaults(run=lambda o: print(*collect(o.folder, o.results), sep="\n"))
    tables = verbs.add_parser("tables", help="make the tables of docs/RESULTS.md anew, or print those of one campaign")
    tables.add_argument("campaign", nargs="?")
    tables.add_argument("--results", type=Path, default=RESULTS)
    tables.set_defaults(run=make_tables)
    figures = verbs.add_parser("figures", help="draw the figures of docs/RESULTS.md anew")
    figures.set_defaults(run=make_figures)
    heads = verbs.add_parser("heads", help="say in the heads of campaigns and recipes what was measured")
    heads.set_defaults(run=write_heads)
    return parser


def make_tables(options: argparse.Namespace) -> None:
    if options.campaign:
        print(print_table(options.campaign, options.results))
    else:
        PAGE.write_text(with_tables(PAGE.read_text()))


# ---------------------------------------------------------------- packs


def make_figures(_: argparse.Namespace) -> None:
    from result_figures import write_figures

    print(*write_figures(), sep="\n")


def pack(folder: Path, out: Path, *, weights: list[str], piece: int = PIECE) -> list[str]:
    """Write a campaign as NAME.tar.gz in pieces; what was written, with sizes."""
    if not folder.is_dir():
        raise SystemExit(f"{folder} is not a folder; expected that of a sweep or a study.")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file in packed_files(folder, weights):
            archive.add(file, arcname=f"{folder.name}/{file.relative_to(folder).as_posix()}")
    data = buffer.getvalue()
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob(f"{folder.name}.tar.gz.*"):
        old.unlink()
    said = []
    for number, start in enumerate(range(0, len(data), piece * 2**20)):
        part = out / f"{folder.name}.tar.gz.{number:02d}"
        part.write_bytes(data[start : start + piece * 2**20])
        said.append(f"{part} {part.stat().st_size / 2**20:.1f} MiB")
    return said


def packed_files(folder: Path, weights: list[str]) -> Iterator[Path]:
    """What a pack holds of a campaign: everything but locks, states, maps and weights, but for those asked for."""
    wanted = {weights_of(folder / name) for name in weights}
    for file in sorted(folder.rglob("*")):
        is_plain = file.is_file() and not file.is_symlink() and ".lock" not in file.name
        if is_plain and (file in wanted or not is_heavy(file)):
            yield file


def is_heavy(file: Path) -> bool:
    """Maps, states, and weights: of the best and the last epoch, of averages, and kept ones."""
    of_run = file.suffix == ".safetensors" and (file.parent / "config.yaml").is_file()
    return of_run or file.suffix == ".pt" or file.name in HEAVY or file.parent.name == "kept"


def weights_of(run: Path) -> Path:
    """The best weights of a run, else its last ones."""
    for name in WEIGHTS:
        if (run / name).is_file():
            return run / name
    raise SystemExit(f"{run.parent} has no weights of {run.name}.")


def unpack(piece: Path, folder: Path) -> Path:
    """Join the pieces of a pack and lay its files under a folder; the campaign's folder there."""
    stem, _, number = piece.name.rpartition(".")
    if not stem.endswith(".tar.gz") or not number.isdigit():
        raise SystemExit(f"{piece} is not a piece of a pack; expected NAME.tar.gz.00.")
    parts = sorted(piece.parent.glob(f"{stem}.[0-9][0-9]"))
    numbers = [int(part.name[-2:]) for part in parts]
    if numbers != list(range(len(parts))):
        raise SystemExit(f"{piece.parent} lacks a piece of {stem}: it has {numbers}.")
    data = io.BytesIO(b"".join(part.read_bytes() for part in parts))
    with tarfile.open(fileobj=data, mode="r:gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / stem.removesuffix(".tar.gz")


# ---------------------------------------------------------------- collecting


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
    return {
        "name": folder.name,
        "seed": config["seed"],
        "versions": config.pop("versions", {}),
        "started": str(config.pop("started", "")),
        "seconds": {"train": sum(row["seconds"] for row in rows), "all": note.get("seconds"), **wall_clock(folder)},
        "status": note.get("status", "trained, not judged"),
        "config": config,
        "epochs": rows,
        **read_findings(folder),
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
    found: Run = {"threats": {}, "checks": {}, "speed": {}, "cycles": None}
    for report in sorted(folder.rglob("report.json")):
        place = report.parent.relative_to(folder).as_posix()
        if "shifts" not in report.parent.parts:
            found["threats"].update(read_threats(report.parent, place))
    for key, name in (("checks", "sanity.json"), ("speed", "speed.json")):
        for file in sorted(folder.rglob(name)):
            found[key][file.parent.relative_to(folder).as_posix()] = json.loads(file.read_text())
    if (folder / "cycles.json").is_file():
        found["cycles"] = json.loads((folder / "cycles.json").read_text())
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
            found[f"{place}/{threat['spec']}"] |= of_images(ledger[threat["spec"]])
    return found


def of_images(rows: Any) -> Run:
    """Which images were right, one bit each, and the expected calibration error over 15 bins."""
    from vitruvius.evaluation.metrics import EqualWidth, expected_error

    kept: Run = {"correct": bits(rows["correct"][rows["id"].argsort()].numpy())}
    if "confidence" in rows:
        kept["ece"] = expected_error(EqualWidth(number=15)(rows["confidence"], rows["correct"]))
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


def without_folders(key: str, value: Any) -> Any:
    """A setting without the folders of the machine that it was used on."""
    if key in ("data.root", "model.weights", "shipped") and value is not None:
        return Path(value).name
    return value


# ---------------------------------------------------------------- heads


def write_heads(_: argparse.Namespace) -> None:
    for file, line in expected_heads().items():
        file.write_text(with_head(file.read_text(), line))


def expected_heads() -> dict[Path, str]:
    """What the heads of campaigns, and of recipes that a campaign runs as they stand, must say of what was measured."""
    found = {}
    for file in sorted((ROOT / "campaigns").glob("*.yaml")):
        campaign = yaml.safe_load(file.read_text())
        judged = {run["name"]: run for run in load(file.stem) if is_judged(run)}
        if "list" not in campaign or not judged:
            continue
        planned = [item["name"] for item in campaign["list"]]
        done = [name for name in planned if name in judged]
        found[file] = f"{HEAD}{len(done)} of {len(planned)} runs (docs/RESULTS.md)."
        for item in campaign["list"]:
            if item["name"] in judged and set(item) <= {"name", "recipe"}:
                recipe = find_recipe(item.get("recipe", campaign["recipe"]))
                found[recipe] = f"{HEAD}{measured(judged[item['name']])}"
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


if __name__ == "__main__":
    main()
