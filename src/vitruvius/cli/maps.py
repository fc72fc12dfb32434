"""Average attention maps over the training images, for masks and for looking at."""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN|MODEL", help="a run folder or a model name")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="e.g. data.root=/imagenet")
    parser.add_argument("--augment", action="store_true", help="augmented as for training, instead of as they are")
    parser.add_argument(
        "--out", help="a .safetensors file, or .npy for ViTCoD's layout (default: RUN/maps.safetensors)"
    )
    parser.add_argument("--figure", help="draw the grid of sites and heads: a .png, .pdf or .svg file")


def run(options: argparse.Namespace) -> None:
    from vitruvius.compression.command import maps_of_target
    from vitruvius.compression.files import load_maps
    from vitruvius.report.sections.maps import draw_maps
    from vitruvius.report.style import save_figure

    path = maps_of_target(options.target, options.overrides, options.out, augment=options.augment)
    if options.figure:
        save_figure(draw_maps({name: map_.numpy() for name, map_ in load_maps(path)[0].items()}), options.figure)
    print(path)
