"""Compress attention: average its maps, make masks from them, export the result."""

from __future__ import annotations

import argparse

from vitruvius.cli._verb import Verb, add_images, add_target, add_trust, trust_plugins


def maps_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the target, the images and the file to `parser`, that of the verb."""
    add_target(parser)
    parser.add_argument("--augment", action="store_true", help="augmented as for training, instead of as they are")
    add_images(parser, "average over")
    parser.add_argument(
        "--out", help="a .safetensors file, or .npy for ViTCoD's layout (default: RUN/maps.safetensors)"
    )
    parser.add_argument("--figure", help="draw the grid of sites and heads: a .png, .pdf or .svg file")


def run_maps(options: argparse.Namespace) -> None:
    """Average attention maps over the training images, for masks and for looking at.

    `options` hold what `maps_arguments` adds.
    """
    from vitruvius.compression.command import maps_of_target
    from vitruvius.compression.files import load_maps
    from vitruvius.report.sections.maps import draw_maps
    from vitruvius.report.style import save_figure

    trust_plugins(options, options.target)
    path = maps_of_target(
        options.target, options.overrides, options.out, augment=options.augment, images=options.images
    )
    if options.figure:
        save_figure(draw_maps({name: map_.numpy() for name, map_ in load_maps(path)[0].items()}), options.figure)
    print(path)


def masks_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the maps, the rules and the file to `parser`, that of the verb."""
    parser.add_argument("maps", metavar="MAPS", help="from `vitruvius maps`, or ViTCoD's .npy")
    parser.add_argument(
        "--rule",
        action="append",
        metavar="[SITES=]NAME:key=value,…",
        help="e.g. information:mass=0.9; several for patterns of sites, 'stages.0.*=information:mass=0.46' "
        "(default: information)",
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
    parser.add_argument(
        "--tiles",
        type=int,
        metavar="SIZE",
        help="choose whole tiles of this many queries and keys, e.g. 16: kernels skip them",
    )
    parser.add_argument("--threshold", type=int, help="queries that make a token global (default: a quarter of them)")
    parser.add_argument("--of", metavar="RUN", help="refuse maps that are not of this run's model")
    add_trust(parser)
    parser.add_argument(
        "--out", help="a .safetensors file, or .npy for ViTCoD's (default: masks.safetensors beside it)"
    )
    parser.add_argument("--figure", help="draw the grid of sites and heads: a .png, .pdf or .svg file")


def run_masks(options: argparse.Namespace) -> None:
    """Masks from average maps: by a rule's own limit, or removing exactly the share asked for.

    `options` hold what `masks_arguments` adds.
    """
    from vitruvius.compression.command import masks_of_maps
    from vitruvius.report.sections.masks import draw_masks
    from vitruvius.report.style import save_figure

    if options.of is not None:
        trust_plugins(options, options.of)
    masks, text = masks_of_maps(
        options.maps,
        options.rule or "information",
        options.out,
        sparsity=options.sparsity,
        budget=options.budget,
        protect=options.protect,
        of=options.of,
        threshold=options.threshold,
        tiles=options.tiles,
    )
    if options.figure:
        save_figure(draw_masks(masks.keep), options.figure)
    print(text)


def cycles_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the masks and what the chip must know of the model to `parser`, that of the verb."""
    parser.add_argument("target", metavar="MASKS|RUN", help="a file of masks, ViTCoD's .npy or folder, or a run folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings of the run")
    add_trust(parser)
    parser.add_argument("--head-dim", type=int, help="channels of a head (default: what the masks' sites say, else 64)")
    parser.add_argument("--threshold", type=int, help="queries that make a token global (default: a quarter of them)")


def run_cycles(options: argparse.Namespace) -> None:
    """Cycles of ViTCoD's accelerator for the masks of a file or run, beside the dense ones; a model, no measurement.

    `options` hold what `cycles_arguments` adds.
    """
    from vitruvius.compression.command import cycles_of

    trust_plugins(options, options.target)
    table, path = cycles_of(
        options.target, head_dim=options.head_dim, threshold=options.threshold, overrides=options.overrides
    )
    print(f"{table}\n\n{path}")


def export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, the format and the file to `parser`, that of the verb."""
    parser.add_argument("run", metavar="RUN", help="a run folder")
    add_trust(parser)
    parser.add_argument(
        "--format",
        default="torch-export",
        choices=("torch-export", "onnx", "safetensors"),
        help="(default: %(default)s)",
    )
    parser.add_argument("--sparse", action="store_true", help="compute only what masks keep; pays with many tokens")
    parser.add_argument("--out", help="the file (default: RUN/export.pt2, .onnx or .safetensors)")


def run_export(options: argparse.Namespace) -> None:
    """Export a run for inference elsewhere; the file is read back and must answer the same.

    `options` hold what `export_arguments` adds.
    """
    from vitruvius.compression.command import export_target

    trust_plugins(options, options.run)
    print(export_target(options.run, options.out, format=options.format, sparse=options.sparse))


def compress_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, settings of each step and the folder to `parser`, that of the verb."""
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of fine-tuning, e.g. train.epochs=5")
    add_trust(parser)
    parser.add_argument("--sparsity", type=float, default=0.9, help="share of pairs to remove (default: %(default)s)")
    parser.add_argument("--rank", type=int, help="also squeeze q and k through this many heads (default: all)")
    parser.add_argument("--rule", default="information", help="which pairs go first (default: %(default)s)")
    parser.add_argument("--epochs", type=int, help="of fine-tuning (default: a third of the run's)")
    parser.add_argument(
        "--threat", action="append", default=[], metavar="NAME:key=value,…", help="judged besides clean"
    )
    add_images(parser, "average maps over, and judge,")
    parser.add_argument("--out", help="folder of all artefacts (default: RUN_compressed)")


def run_compress(options: argparse.Namespace) -> None:
    """Maps, masks, fine-tuning, evaluation, export and cycles of a run in one go; ends with a page.

    `options` hold what `compress_arguments` adds.
    """
    from vitruvius.report import write_page
    from vitruvius.training.compress import Compression, compress

    trust_plugins(options, options.run)
    asked = Compression(
        sparsity=options.sparsity,
        rank=options.rank,
        rule=options.rule,
        epochs=options.epochs,
        threats=tuple(options.threat),
        images=options.images,
    )
    folder = compress(
        options.run, asked, options.overrides, out=options.out, tell=lambda text: print(f"{text}\n", flush=True)
    )
    print(write_page([options.run, folder / "tuned"], folder / "page.html", title="Before and after compression"))


VERBS = (
    Verb(name="maps", arguments=maps_arguments, run=run_maps),
    Verb(name="masks", arguments=masks_arguments, run=run_masks),
    Verb(name="compress", arguments=compress_arguments, run=run_compress),
    Verb(name="cycles", arguments=cycles_arguments, run=run_cycles),
    Verb(name="export", arguments=export_arguments, run=run_export),
)
