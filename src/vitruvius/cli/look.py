"""Look at models and runs: analyses of attention, studies over runs, the page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from vitruvius.cli._verb import Verb, add_images, add_trust, trust_plugins, warn_deprecated


def analyse_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the target, the analyses and the images to `parser`, that of the verb."""
    parser.add_argument("target", metavar="RUN|MODEL", help="a run folder or a model name")
    parser.add_argument(
        "what",
        nargs="*",
        metavar="ANALYSIS|EXPLANATION|section.key=value",
        help="e.g. norms gammas:variant=released relevance data.root=…",
    )
    add_trust(parser)
    add_images(parser, "look at", default="all of the validation split")
    parser.add_argument("--seed", type=int, default=0, help="chooses the images and chance (default: %(default)s)")
    parser.add_argument(
        "--attack",
        default="pgd:eps=4/255",
        help="explanations also of the images after this attack; none: of clean ones alone (default: %(default)s)",
    )
    parser.add_argument("--out", help="folder for table and figures (default: RUN/analysis; a model by name: none)")


def run_analyse(options: argparse.Namespace) -> None:
    """Look inside attention: kernel PCA, norms, explanations and more, chance beside every number.

    `options` hold what `analyse_arguments` adds.
    """
    from vitruvius.analysis.command import analyse_target, split_arguments
    from vitruvius.report import save_figures

    names, overrides = split_arguments(options.what)
    trust_plugins(options, options.target)
    attack = options.attack
    if attack == "none":
        attack = None
    table = analyse_target(
        options.target,
        overrides,
        names,
        options.images,
        options.seed,
        options.out,
        attack=attack,
        draw=save_figures,
    )
    print(table)


def study_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study, its subjects and the images to `parser`, that of the verb."""
    parser.add_argument(
        "name", metavar="STUDY", help="attack-effectiveness, attack-convergence, eps-sweep, kpca, released-protocol"
    )
    parser.add_argument(
        "words", nargs="+", metavar="RUN|MODEL|key=value", help="subjects, and settings such as steps=20"
    )
    add_trust(parser)
    add_images(parser, "study", default="512; kpca: 100")
    parser.add_argument("--out", help="folder for table and figure (default: runs/STUDY)")


def run_study(options: argparse.Namespace) -> None:
    """An experiment over several runs: a table and a figure; `vitruvius list studies` names them.

    `options` hold what `study_arguments` adds.
    """
    from vitruvius.studies import split_words, study

    targets, settings = split_words(options.words)
    trust_plugins(options, *targets)
    if "images" in settings:
        warn_deprecated("images=N", "--images N")
    if options.images is not None:
        settings["images"] = options.images
    out = options.out or f"runs/{options.name}"
    print(study(options.name, targets, settings, out, on_row=show_row))


def show_row(row: Mapping[str, object]) -> None:
    """One line on stderr for every `row` of a study, as soon as it is known."""
    words = [f"{key} {_short(value)}" for key, value in row.items() if key != "key"]
    print(", ".join(words), file=sys.stderr, flush=True)


def _short(value: object) -> object:
    """A measured number with four digits, which is what a line can show; the table has all of them."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the runs, the viewer's images and the page to `parser`, that of the verb."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN|data.key=value", help="runs, sweeps or studies, and where images are"
    )
    add_images(parser, "show attention on", default="8 where the data can be opened; 0: only what is recorded")
    parser.add_argument(
        "--threat", default="pgd:eps=8/255,steps=10", metavar="SPEC", help="attacks those images (default: %(default)s)"
    )
    parser.add_argument("--out", default="report.html", help="the page (default: %(default)s)")
    parser.add_argument("--title", default="A vitruvius report", help="its title (default: %(default)s)")
    add_trust(parser)


def run_report(options: argparse.Namespace) -> None:
    """One self-contained page about runs, a sweep or a study.

    `options` hold what `report_arguments` adds.
    """
    from vitruvius.report.command import ReportOptions, report_runs

    runs = [word for word in options.runs if not is_setting(word)]
    overrides = [word for word in options.runs if is_setting(word)]
    trust_plugins(options, *runs)
    wanted = ReportOptions(title=options.title, images=options.images, threat=options.threat)
    print(report_runs(runs, overrides, options.out, wanted, on_news=show_news))


def is_setting(word: str) -> bool:
    """Whether `word` is `section.key=value` and not a folder."""
    return "=" in word and not Path(word).exists()


def show_news(words: str) -> None:
    """Print `words` as one line on stderr."""
    print(words, file=sys.stderr, flush=True)


VERBS = (
    Verb(name="analyse", arguments=analyse_arguments, run=run_analyse, aliases=("analyze",)),
    Verb(name="study", arguments=study_arguments, run=run_study),
    Verb(name="report", arguments=report_arguments, run=run_report),
)
