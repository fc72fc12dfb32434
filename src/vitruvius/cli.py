"""The command line: verbs to functions, nothing else. Options are config keys, `section.key=value`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vitruvius._errors import VitruviusError
from vitruvius._version import __version__

EXAMPLES = """\
examples:
  vitruvius demo                                            everything on the embedded digits, ends with a page
  vitruvius train digits/rpc train.epochs=20                a recipe by name or path, with overrides
  vitruvius evaluate runs/rpc --threat pgd:eps=8/255        a run folder is a model everywhere
  vitruvius evaluate deit_tiny_patch16_224 data.dataset=folder data.root=/imagenet
  vitruvius report runs/softmax runs/rpc --out page.html
  vitruvius list attentions
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; 0 if it worked, 1 after an error of the user's or the data's, 130 when interrupted."""
    options = make_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s")
    verb: Callable[[argparse.Namespace], None] = options.verb
    try:
        verb(options)
    except VitruviusError as error:
        if options.verbose:
            raise
        print(f"vitruvius: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vitruvius: interrupted; the same command goes on where this one stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `vitruvius list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vitruvius",
        description="Study and harden vision transformers: change their attention, train, attack, look inside.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vitruvius {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-v", "--verbose", action="store_true", help="log more, and show where an error came from")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    demo = verbs.add_parser("demo", parents=[common], help="train, attack and look inside on the embedded digits")
    demo.add_argument("--out", default="runs/demo", help="folder for runs and page (default: %(default)s)")
    demo.set_defaults(verb=run_demo)

    train = verbs.add_parser("train", parents=[common], help="train as a recipe says; writes a run folder")
    train.add_argument("recipe", help="a YAML file, or the name of a recipe from `vitruvius list recipes`")
    train.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. train.epochs=20 out=runs/mine")
    train.add_argument("--quiet", action="store_true", help="show no progress")
    train.set_defaults(verb=run_train)

    evaluate = verbs.add_parser("evaluate", parents=[common], help="accuracy, clean and under threats, image by image")
    evaluate.add_argument("target", metavar="RUN|MODEL", help="a run folder or a model name")
    evaluate.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.root=/imagenet")
    evaluate.add_argument(
        "--threat", action="append", default=[], metavar="NAME:key=value,…", help="e.g. pgd:eps=4/255,steps=10"
    )
    evaluate.add_argument("--out", help="folder for ledger and report (default: RUN/evaluation)")
    evaluate.set_defaults(verb=run_evaluate)

    report = verbs.add_parser("report", parents=[common], help="one self-contained page about one or several runs")
    report.add_argument("runs", nargs="+", metavar="RUN")
    report.add_argument("--out", default="report.html", help="the page (default: %(default)s)")
    report.add_argument("--title", help="its title")
    report.set_defaults(verb=run_report)

    listing = verbs.add_parser("list", parents=[common], help="what there is: names, settings, one line each")
    listing.add_argument("kind", nargs="?", help="attentions, attacks, inits, models, recipes, sockets, tasks, …")
    listing.set_defaults(verb=run_list)
    return parser


def run_demo(options: argparse.Namespace) -> None:
    from vitruvius.demo import demo

    print(demo(Path(options.out)))


def run_train(options: argparse.Namespace) -> None:
    from vitruvius.listing import find_recipe
    from vitruvius.training import read_recipe, train

    print(train(read_recipe(find_recipe(options.recipe), options.overrides), quiet=options.quiet))


def run_evaluate(options: argparse.Namespace) -> None:
    from vitruvius.evaluation.command import evaluate_target

    print(evaluate_target(options.target, options.overrides, options.threat, options.out))


def run_report(options: argparse.Namespace) -> None:
    from vitruvius.report import write_page

    title = {"title": options.title} if options.title else {}
    print(write_page([Path(run) for run in options.runs], Path(options.out), **title))


def run_list(options: argparse.Namespace) -> None:
    from vitruvius.listing import listing

    print(listing(options.kind))


if __name__ == "__main__":
    sys.exit(main())
