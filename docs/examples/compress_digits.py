"""Compress a ViT on the embedded digits: train → maps → masks at 50, 80, 90 and 95 % → fine-tune → evaluate.

    python docs/examples/compress_digits.py [--out runs/compress] [--epochs 20] [--tune 5]

Ends with a table and a figure of accuracy against sparsity; beside it the starts of the low-rank auto-encoder,
before and after fine-tuning. Called again, it continues where it stopped. You et al. 2023, arXiv:2210.09573.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from vitruvius.analysis.callback import first_images
from vitruvius.compression import average_maps
from vitruvius.compression.files import load_masks, save_maps, save_masks
from vitruvius.compression.masks import make_masks
from vitruvius.compression.rules import rules
from vitruvius.data import eval_loader, train_loader
from vitruvius.evaluation import evaluate
from vitruvius.listing import find_recipe
from vitruvius.models import PixelModel, load_model
from vitruvius.models.create import create_from_config
from vitruvius.report import save_figure
from vitruvius.report.sections.maps import draw_accuracy, draw_masks
from vitruvius.surgery import survey
from vitruvius.surgery.calibrating import calibrate_low_rank
from vitruvius.training import Config, read_recipe, train

SPARSITIES = (0.5, 0.8, 0.9, 0.95)
MODEL = ["model.kwargs.img_size=12", "data.image_size=12", "model.kwargs.num_heads=6"]
# 36 patches, since 16 have no room for 95 %; six heads, so that there is something to squeeze
STARTS = ["calibrated", "svd", "released"]  # of the auto-encoder
RANK = 3  # heads that q and k share


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("runs/compress"))
    parser.add_argument("--epochs", type=int, default=20, help="of the dense model")
    parser.add_argument("--tune", type=int, default=5, help="epochs of every fine-tuning")
    chosen = parser.parse_args(arguments)
    compress(chosen.out, [f"train.epochs={chosen.epochs}"], [f"train.epochs={chosen.tune}"])


def compress(out: Path, training: list[str], tuning: list[str]) -> dict[str, object]:
    """The whole pipeline; its numbers, which are also written to results.json."""
    config = recipe("digits/softmax", out / "dense", training)
    dense = load_model(train(config))
    shown = eval_loader(config.data, input_size=dense.data_config, split=config.data.train_split)
    maps = average_maps(dense, shown)
    save_maps(out / "maps.safetensors", maps, sites=survey(dense))
    accuracy = judge(dense, config)
    print(f"dense: {accuracy:.2%}")
    masked = {s: mask_and_tune(out, maps, s, tuning) for s in SPARSITIES}
    for sparsity, (before, after) in masked.items():
        print(f"{sparsity:.0%} removed: {before:.2%}, fine-tuned {after:.2%}")
    starts = {start: squeeze_and_tune(out, start, tuning) for start in STARTS}
    for start, (before, after) in starts.items():
        print(f"q and k of {RANK} heads, start {start}: {before:.2%}, fine-tuned {after:.2%}")
    results = {"dense": accuracy, "masked": masked, "low_rank": starts}
    (out / "results.json").write_text(json.dumps(results, indent=1))
    curves = {"masked": {s: before for s, (before, _) in masked.items()}}
    curves["masked, then fine-tuned"] = {s: after for s, (_, after) in masked.items()}
    save_figure(draw_accuracy(curves, dense=accuracy), out / "accuracy.png")
    save_figure(draw_masks(load_masks(out / "masks-90.safetensors").keep), out / "masks-90.png")
    print(f"figures: {out / 'accuracy.png'}, {out / 'masks-90.png'}")
    return results


def mask_and_tune(out: Path, maps: Mapping[str, Tensor], sparsity: float, tuning: list[str]) -> tuple[float, float]:
    """Accuracy with the mask, before and after fine-tuning."""
    file = out / f"masks-{sparsity * 100:.0f}.safetensors"
    save_masks(file, make_masks(maps, rules["information"](), sparsity=sparsity))
    weights, pattern = f"model.weights={out / 'dense'}", f"attention.0.parts.0.file={file}"
    return tune(recipe("digits/masked", file.with_suffix(""), [weights, pattern, *tuning]))


def squeeze_and_tune(out: Path, start: str, tuning: list[str]) -> tuple[float, float]:
    """Accuracy with the auto-encoder, before and after fine-tuning; the released start has the released loss."""
    loss = ("released", 1e-4) if start == "released" else ("normalised", 0.1)
    settings = {"rank": RANK, "start": start, "reconstruction": loss[0]}
    parts = [f"attention.0.parts.0.{key}={value}" for key, value in settings.items()]
    weights = [f"model.weights={out / 'dense'}", f"task.penalty={loss[1]}"]
    return tune(recipe("digits/low_rank", out / f"low_rank-{start}", [*weights, *parts, *tuning]))


def tune(config: Config) -> tuple[float, float]:
    """Accuracy before and after fine-tuning; `train` calibrates by itself, here it is done to be seen."""
    begun = create_from_config(config.model, config.attention, seed=config.seed)
    if config.attention[0].parts[0].get("start") == "calibrated":
        images = train_loader(config.data, input_size=begun.data_config, seed=config.seed)
        calibrate_low_rank(begun, first_images(images, 512).split(64))
    return judge(begun, config), judge(load_model(train(config)), config)


def recipe(name: str, out: Path, overrides: list[str]) -> Config:
    return read_recipe(find_recipe(name), [f"out={out}", "model.kwargs.num_classes=10", *MODEL, *overrides])


def judge(model: PixelModel, config: Config) -> float:
    return evaluate(model.eval(), eval_loader(config.data, input_size=model.data_config))["clean"].accuracy


if __name__ == "__main__":
    main()
