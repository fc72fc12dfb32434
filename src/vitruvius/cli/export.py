"""Export a run for inference elsewhere; the file is read back and must answer the same."""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument(
        "--format",
        default="torch-export",
        choices=("torch-export", "onnx", "safetensors"),
        help="(default: %(default)s)",
    )
    parser.add_argument("--sparse", action="store_true", help="compute only what masks keep; pays with many tokens")
    parser.add_argument("--out", help="the file (default: RUN/export.pt2, .onnx or .safetensors)")


def run(options: argparse.Namespace) -> None:
    from vitruvius.compression.command import export_target

    print(export_target(options.run, options.out, format=options.format, sparse=options.sparse))
