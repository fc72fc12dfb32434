"""Accuracy, clean, under threats and on shifted images, image by image."""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN|MODEL", help="a run folder or a model name")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.root=/imagenet")
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
    parser.add_argument("--sanity", metavar="EPS", help="also check for masked gradients at this strength, e.g. 8/255")
    parser.add_argument("--images", type=int, metavar="N", help="judge N images, a fixed random choice (default: all)")
    parser.add_argument("--out", help="folder for ledger and report (default: RUN/evaluation)")


def run(options: argparse.Namespace) -> None:
    from vitruvius._errors import ConfigError
    from vitruvius._yaml import parse_value
    from vitruvius.evaluation.command import EvaluateOptions, evaluate_target

    eps = None if options.sanity is None else parse_value(options.sanity)
    if eps is not None and not isinstance(eps, int | float):
        raise ConfigError(f"--sanity {options.sanity} is not a number; write a strength in pixels such as 8/255.")
    wanted = EvaluateOptions(
        threats=options.threat,
        shifts=options.shift,
        sanity=eps,
        calibrate=options.calibrate,
        images=options.images,
        baseline=options.baseline,
    )
    gap = ""

    def show(part: object) -> None:
        nonlocal gap
        print(f"{gap}{part}", flush=True)
        gap = "\n"

    evaluate_target(options.target, options.overrides, wanted, options.out, on_part=show)
