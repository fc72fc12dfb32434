"""Checkpoints of the zoo: make one of a run, with a card that was measured on its rounded weights, and check it again.

    python -m experiments.zoo make runs/adversarial vit_digits_adversarial --about "…" --data "…" --licence "…" \
        --recipe digits/adversarial --threat pgd:eps=0.1,steps=20 --threat autoattack:eps=0.1
    python -m experiments.zoo check vit_digits_adversarial

A checkpoint is a run folder: config.yaml, best.safetensors with every weight rounded to float16, card.json and card.md.
`--zoo FOLDER`, or the environment variable VITRUVIUS_ZOO, names another zoo than that of the checkout. `check` measures
by the threats of the card and fails where more than one image in 200 is answered otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitruvius._files import atomic_write_text, load_tensors, save_tensors
from vitruvius._recipes import ZOO, zoo_folder
from vitruvius._version import __version__
from vitruvius._yaml import dump_yaml, read_yaml
from vitruvius.cli.evaluate import evaluate
from vitruvius.corruptions import corruptions
from vitruvius.evaluation.shift_report import ShiftReport
from vitruvius.request import open_request
from vitruvius.targets.run_folder import PICTURES, find_checkpoint, hash_file, read_card

WEIGHTS = "best.safetensors"
LEFT_OUT = ("out", "tracking", "started")  # of a run's config: they say where and how it ran, not what it is
TOLERATED = 1 / 200  # of the images, answered otherwise on another machine
ROUNDING = 1e-9
Card = dict[str, Any]


def main() -> None:
    options = make_parser().parse_args()
    if options.zoo:
        os.environ[ZOO] = options.zoo
    if options.verb == "make":
        print(make(options))
    else:
        found, faults = check(options.name, options.settings)
        print(found)
        if faults:
            sys.exit(f"zoo/{options.name} is not what its card says: {'; '.join(faults)}.")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", metavar="FOLDER", help="another zoo than that of the checkout")
    verbs = parser.add_subparsers(dest="verb", required=True)
    making = verbs.add_parser("make", help="round the weights of a run, measure them, write the card")
    making.add_argument("run", type=Path)
    making.add_argument("name")
    making.add_argument("settings", nargs="*", metavar="data.key=value", help="where the images are")
    making.add_argument("--about", required=True, help="what it is and what it is for, in a sentence or two")
    making.add_argument("--data", required=True, help="the data set's name")
    making.add_argument("--licence", required=True, help="the licence of the data, and of the weights")
    making.add_argument("--recipe", required=True, help="the recipe as `vitruvius train` takes it")
    making.add_argument("--threat", action="append", default=[], metavar="SPEC", help="measured beside clean images")
    making.add_argument("--pictures", action="store_true", help="ship one test picture of each class, as pictures.npz")
    making.add_argument(
        "--class-names", nargs="*", default=[], help="what the classes of --pictures are called, by number"
    )
    making.add_argument("--images", type=int, help="how many images, a fixed random choice (default: all)")
    checking = verbs.add_parser("check", help="evaluate again and compare with the card")
    checking.add_argument("name")
    checking.add_argument("settings", nargs="*", metavar="data.key=value", help="where the images are")
    return parser


def make(options: argparse.Namespace) -> Path:
    """The folder of the new checkpoint; nothing is left of one that fails."""
    folder = zoo_folder() / options.name
    if folder.exists():
        raise SystemExit(f"{folder} is there already; delete it first.")
    try:
        write_run(options.run, folder)
        if options.pictures:
            write_pictures(str(folder), options.settings, folder / PICTURES, options.class_names)
        card = describe(options, folder)
        card["figures"] = measure(str(folder), options.settings, options.threat, options.images)
        atomic_write_text(folder / "card.md", page(card))
        atomic_write_text(folder / "card.json", json.dumps(card, indent=1, ensure_ascii=False) + "\n")  # last
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def write_run(run: Path, folder: Path) -> None:
    """The run folder of a checkpoint: weights rounded to float16, the recipe without paths of the machine."""
    source = next((run / name for name in (WEIGHTS, "last.safetensors") if (run / name).is_file()), None)
    if source is None:
        raise SystemExit(f"{run} holds no weights; expected a run folder.")
    weights = {name: rounded(name, value) for name, value in load_tensors(source)[0].items()}
    config = {key: value for key, value in read_yaml(run / "config.yaml").items() if key not in LEFT_OUT}
    config["model"] = {**config["model"], "weights": None, "pretrained": False}
    if config["data"].get("root"):
        config["data"]["root"] = Path(config["data"]["root"]).name
    folder.mkdir(parents=True)
    save_tensors(folder / WEIGHTS, weights, {"vitruvius": json.dumps(__version__)})
    atomic_write_text(folder / "config.yaml", dump_yaml(config))


def write_pictures(target: str, settings: Sequence[str], file: Path, class_names: Sequence[str]) -> None:
    """The first test picture of each class, as the model sees it: the checkpoint can be tried without its data."""
    with open_request(target, settings, alone=True) as request:
        found: dict[int, torch.Tensor] = {}
        for x, y, *_ in request.loader:
            for picture, label in zip(x, y.tolist(), strict=True):
                found.setdefault(label, picture)
    images = torch.stack([found[label] for label in sorted(found)])
    names = {"class_names": np.array(class_names)} if class_names else {}
    pixels = (255 * images).round().byte().movedim(1, -1).cpu().numpy()
    np.savez_compressed(file, image=pixels, label=sorted(found), **names)


def rounded(name: str, value: torch.Tensor) -> torch.Tensor:
    """A weight as float16; masks and counters as they are."""
    if not value.is_floating_point():
        return value
    half = value.half()
    if not bool(half.isfinite().all()):
        raise SystemExit(f"{name} has weights that float16 cannot hold; this model cannot be rounded.")
    return half


def describe(options: argparse.Namespace, folder: Path) -> Card:
    """Everything on the card but what was measured."""
    config = read_yaml(folder / "config.yaml")
    return {
        "name": options.name,
        "about": options.about,
        "model": config["model"]["name"],
        "attention": config.get("attention") or [],
        "data": {"name": options.data, "licence": options.licence},
        "recipe": options.recipe,
        "seed": config.get("seed", 0),
        "epochs": config["train"]["epochs"],
        "trained_with": config.get("versions", {}),
        "measured_with": {"vitruvius": __version__, "torch": torch.__version__},
        "made": datetime.now(UTC).date().isoformat(),
        "weights": "float16",
        "bytes": (folder / WEIGHTS).stat().st_size,
        "sha256": hash_file(folder / WEIGHTS),
    }


def measure(target: str, settings: Sequence[str], threats: Sequence[str], images: int | None) -> list[Card]:
    """Accuracy on clean images and under every threat, and the mean over corruptions as one row."""
    with tempfile.TemporaryDirectory() as out:
        found = evaluate(target, *settings, threat=threats, images=images, out=Path(out))
    assert found.report is not None
    scores = [score for score in found.report.threats if score.severity is None]
    labels = ["clean", *(spec for spec in threats if not is_corruption(spec))]
    rows = []
    for label, score in zip(labels, scores, strict=True):
        numbers = {key: getattr(score, key) for key in ("accuracy", "low", "high", "n")}
        rows.append({"label": label, "threat": label, **numbers})
    if found.corruptions is not None:
        spec = next(spec for spec in threats if is_corruption(spec))
        rows.append({**mean_over(found.corruptions), "threat": spec, "n": scores[0].n})
    return rows


def is_corruption(spec: str) -> bool:
    return spec.partition(":")[0] in ("corruptions", *corruptions)


def mean_over(shift: ShiftReport) -> Card:
    """The mean accuracy over corruptions and severities, with its interval over resampled images."""
    found, grid = shift.corruption, shift.accuracies
    low, high = (1 - end for end in reversed(found["mean_error_interval"]))
    label = f"corruptions, mean of {len(grid)} at {len(next(iter(grid.values())))} severities"
    if shift.drawn:
        label += f" ({', '.join(shift.drawn)} drawn)"
    return {"label": label, "accuracy": 1 - found["mean_error"], "low": low, "high": high}


def page(card: Card) -> str:
    """The card for a person."""
    rows = []
    for row in card["figures"]:
        interval = f"{100 * row['low']:.1f} – {100 * row['high']:.1f}"
        rows.append(f"| {row['label']} | {100 * row['accuracy']:.1f} % | {interval} | {row['n']:,} |")
    facts = [
        f"* **Model**: `{card['model']}`{with_attention(card)}, {card['bytes']:,} bytes of float16 weights",
        f"* **Data**: {card['data']['name']}. {card['data']['licence']}",
        f"* **Recipe**: `vitruvius train {card['recipe']}`, seed {card['seed']}, {card['epochs']} epochs, to the end",
        f"* **Trained with**: {listed(card['trained_with'])}",
        f"* **Measured with**: {listed(card['measured_with'])}, {card['made']}, on these rounded weights",
        f"* **SHA-256** of `{WEIGHTS}`: `{card['sha256']}`",
    ]
    head = ["| images | accuracy | 95 % interval | n |", "|---|---:|---:|---:|"]
    if (zoo_folder() / card["name"] / PICTURES).is_file():
        facts.append(
            f"* **Pictures**: `{PICTURES}`, one test picture of each class, used where no `data.root` is given"
        )
    use = [
        "```python",
        "import vitruvius",
        "",
        f'model = vitruvius.load_model("zoo/{card["name"]}")',
        "```",
        "",
        f"`vitruvius evaluate zoo/{card['name']} {flags(card)}` measures it again;",
        f"`python -m experiments.zoo check {card['name']}` compares with this card.",
    ]
    return "\n".join([f"# {card['name']}", "", card["about"], "", *facts, "", *head, *rows, "", *use]) + "\n"


def with_attention(card: Card) -> str:
    if not card["attention"]:
        return ""
    return f" with attention `{json.dumps(card['attention'])}`"


def listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def flags(card: Card) -> str:
    return " ".join(f"--threat {row['threat']}" for row in card["figures"] if row["threat"] != "clean")


def check(name: str, settings: Sequence[str] = ()) -> tuple[str, list[str]]:
    """What is measured now beside the card, and what differs."""
    find_checkpoint(f"zoo/{name}")
    card = read_card(name)
    threats = [row["threat"] for row in card["figures"] if row["threat"] != "clean"]
    images = card["figures"][0]["n"]
    now = measure(f"zoo/{name}", settings, threats, images)
    lines, faults = [], []
    for row, again in zip(card["figures"], now, strict=True):
        then, today = row["accuracy"], again["accuracy"]
        lines.append(f"{row['threat']}: card {100 * then:.2f} %, now {100 * today:.2f} % of {again['n']:,}")
        if again["n"] != row["n"] or abs(today - then) > max(1 / row["n"], TOLERATED) + ROUNDING:
            faults.append(lines[-1])
    return "\n".join(lines), faults


if __name__ == "__main__":
    main()
