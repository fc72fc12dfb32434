"""The demo: on the embedded digits, train a ViT and one with robust attention, attack and corrupt both, look inside.

Minutes on a laptop; ends with one page.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from vitruvius._recipes import find_recipe
from vitruvius.analysis.recording import record_pictures
from vitruvius.attacks.pgd import PGD
from vitruvius.compression import average_maps, save_maps
from vitruvius.corruptions.base import corruption_grid
from vitruvius.data import eval_loader
from vitruvius.data.base import class_words
from vitruvius.evaluation import evaluate
from vitruvius.evaluation.base import data_settings
from vitruvius.evaluation.threats import Threat
from vitruvius.models import load_model
from vitruvius.report import write_page
from vitruvius.training import Config, read_recipe, train

ROBUST = "zoo/vit_cifar10_robust"  # looked at first, on pictures that come with it
RECIPES = {"softmax": "digits/softmax", "rpc": "digits/rpc"}
STRENGTHS = [4, 8, 16, 32]  # of attacks, in 1/255
SEVERITIES = [1, 3, 5]  # of corruptions
PICTURES = 10  # in the viewer
logger = logging.getLogger(__name__)


def demo(out: Path, *, overrides: tuple[str, ...] = ()) -> Path:
    """Train, evaluate and show; the path of the page. Called again, it resumes where it stopped."""
    runs = []
    for name, recipe in RECIPES.items():
        logger.info("\n%s: training on the embedded digits", name)
        config = read_recipe(find_recipe(recipe), [f"out={out / name}", *overrides])
        runs.append(train(config))
        logger.info("%s", look(config, runs[-1]))
    page = write_page(runs, out / "report.html", title="Two ways to attend, on digits")
    logger.info("\nOpen this page in a browser:")
    return page


def look(config: Config, run: Path) -> str:
    """Evaluate one run under growing attacks and corruptions, and keep its attention on a few images for the page."""
    model = load_model(run)
    loader = eval_loader(config.data, input_size=model.data_config)
    attacks = [PGD(eps=strength / 255, steps=10) for strength in STRENGTHS]
    threats: list[Threat] = [*attacks, *corruption_grid(severities=SEVERITIES)]
    report = evaluate(model, loader, threats, folder=run / "evaluation", signature=data_settings(config.data))
    save_maps(run / "maps.safetensors", average_maps(model, loader), data=loader.name)
    few = eval_loader(replace(config.data, val_num_samples=PICTURES), input_size=model.data_config)
    record_pictures(run, model, few, attacks[-1], names=class_words(config.data))
    return str(report)
