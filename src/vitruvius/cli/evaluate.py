"""Evaluate and attack: accuracy image by image, and adversarial examples as a data set."""

from __future__ import annotations

import argparse

from vitruvius.cli._verb import Verb, add_images, add_target, trust_plugins


def evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the target, threats, shifts and where results go to `parser`, that of the verb."""
    add_target(parser)
    parser.add_argument(
        "--threat", action="append", default=[], metavar="NAME:key=value,…", help="e.g. pgd:eps=4/255,steps=10"
    )
    parser.add_argument(
        "--shift", action="append", default=[], metavar="NAME:FOLDER", help="e.g. imagenet-c:/data/imagenet-c"
    )
    parser.add_argument("--baseline", metavar="RUN", help="mCE against this run, evaluated under the same shifts")
    parser.add_argument(
        "--calibrate", metavar="SPLIT", help="fit a temperature for shifts on this split; held-out: what a run held out"
    )
    parser.add_argument(
        "--sanity", metavar="[NORM:]EPS", help="also check for masked gradients at this strength, e.g. 8/255 or l2:0.5"
    )
    add_images(parser, "judge")
    parser.add_argument("--out", help="folder for ledger and report (default: RUN/evaluation)")
    parser.add_argument("--fresh", action="store_true", help="delete the ledger in that folder and begin anew")


def run_evaluate(options: argparse.Namespace) -> None:
    """Accuracy, clean, under threats and on shifted images, image by image.

    `options` hold what `evaluate_arguments` adds.
    """
    from vitruvius.evaluation.command import EvaluateOptions, evaluate_target

    trust_plugins(options, options.target)
    wanted = EvaluateOptions(
        threats=options.threat,
        shifts=options.shift,
        sanity=options.sanity,
        calibrate=options.calibrate,
        baseline=options.baseline,
        images=options.images,
        fresh=options.fresh,
    )
    gap = ""

    def show(part: object) -> None:
        nonlocal gap
        print(f"{gap}{part}", flush=True)
        gap = "\n"

    evaluate_target(options.target, options.overrides, wanted, options.out, on_part=show)


def attack_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the target, the threat and the file to `parser`, that of the verb."""
    add_target(parser)
    parser.add_argument("--threat", required=True, metavar="NAME:key=value,…", help="e.g. pgd:eps=4/255,steps=10")
    parser.add_argument("--what", choices=("images", "perturbations"), default="images", help="default: %(default)s")
    add_images(parser, "attack")
    parser.add_argument("--out", required=True, help="a file *.safetensors (lossless), or a folder of 8-bit pictures")


def run_attack(options: argparse.Namespace) -> None:
    """Make adversarial examples once and keep them as a data set: a safetensors file, or a folder of pictures.

    `options` hold what `attack_arguments` adds.
    """
    from vitruvius.evaluation.examples import attack_target

    trust_plugins(options, options.target)
    examples, path = attack_target(
        options.target,
        options.overrides,
        options.threat,
        options.out,
        what=options.what,
        images=options.images,
    )
    print(f"{examples.spec}: accuracy {examples.accuracy:.4f}, after rounding to 8 bits {examples.accuracy_8bit:.4f}")
    print(path)


VERBS = (
    Verb(name="evaluate", arguments=evaluate_arguments, run=run_evaluate, aliases=("eval",)),
    Verb(name="attack", arguments=attack_arguments, run=run_attack),
)
