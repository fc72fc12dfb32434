"""Accuracy, clean and under threats, image by image."""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN|MODEL", help="a run folder or a model name")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.root=/imagenet")
    parser.add_argument(
        "--threat", action="append", default=[], metavar="NAME:key=value,…", help="e.g. pgd:eps=4/255,steps=10"
    )
    parser.add_argument("--sanity", metavar="EPS", help="also check for masked gradients at this strength, e.g. 8/255")
    parser.add_argument("--out", help="folder for ledger and report (default: RUN/evaluation)")


def run(options: argparse.Namespace) -> None:
    from vitruvius._errors import ConfigError
    from vitruvius._yaml import parse_value
    from vitruvius.evaluation.command import evaluate_target

    eps = None if options.sanity is None else parse_value(options.sanity)
    if eps is not None and not isinstance(eps, int | float):
        raise ConfigError(f"--sanity {options.sanity} is no strength; write a number of pixels such as 8/255.")
    report, findings = evaluate_target(options.target, options.overrides, options.threat, options.out, eps)
    print(report)
    for finding in findings:
        print(finding)
