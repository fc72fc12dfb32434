"""Look inside attention: kernel PCA, norms, entropy and more, chance beside every number."""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN|MODEL", help="a run folder or a model name")
    parser.add_argument(
        "what", nargs="*", metavar="ANALYSIS|section.key=value", help="e.g. norms gammas:variant=released data.root=…"
    )
    parser.add_argument("--images", type=int, help="so many random images of the validation split (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the images and chance (default: %(default)s)")
    parser.add_argument("--out", help="folder for table and figures (default: RUN/analysis; a model by name: none)")


def run(options: argparse.Namespace) -> None:
    from vitruvius.analysis.command import analyse_target, split_arguments
    from vitruvius.report.sections.analyses_gallery import save_figures

    names, overrides = split_arguments(options.what)
    images, seed = options.images, options.seed
    print(analyse_target(options.target, overrides, names, images, seed, options.out, draw=save_figures))
