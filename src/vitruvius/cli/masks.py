"""Masks from average maps: by a rule's own limit, or removing exactly the share asked for."""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("maps", metavar="MAPS", help="from `vitruvius maps`, or ViTCoD's .npy")
    parser.add_argument(
        "--rule", default="information", metavar="NAME:key=value,…", help="e.g. information:mass=0.9, ratio:ratio=0.8"
    )
    parser.add_argument("--sparsity", type=float, help="share of all pairs to remove, exactly, e.g. 0.9")
    parser.add_argument(
        "--budget",
        default="global",
        choices=("global", "layer", "head"),
        help="what shares the limit (default: %(default)s)",
    )
    parser.add_argument(
        "--protect", type=int, nargs="*", help="tokens whose rows and columns stay (default: class and registers)"
    )
    parser.add_argument("--threshold", type=int, help="queries that make a token global (default: a quarter of them)")
    parser.add_argument("--of", metavar="RUN", help="refuse maps that are not of this run's model")
    parser.add_argument(
        "--out", help="a .safetensors file, or .npy for ViTCoD's (default: masks.safetensors beside it)"
    )
    parser.add_argument("--figure", help="draw the grid of sites and heads: a .png, .pdf or .svg file")


def run(options: argparse.Namespace) -> None:
    from vitruvius.compression.command import masks_of_maps
    from vitruvius.report.sections.masks import draw_masks
    from vitruvius.report.style import save_figure

    masks, text = masks_of_maps(
        options.maps,
        options.rule,
        options.out,
        sparsity=options.sparsity,
        budget=options.budget,
        protect=options.protect,
        of=options.of,
        threshold=options.threshold,
    )
    if options.figure:
        save_figure(draw_masks(masks.keep), options.figure)
    print(text)
