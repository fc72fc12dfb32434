"""Results of campaigns: bring them home, keep what a table needs of every run, make the pages docs/results/*.md.

python -m experiments pack runs/campaigns/attention_pgd out     # → out/attention_pgd.tar.gz.00, .01, …
python -m experiments unpack out/attention_pgd.tar.gz.00 runs/campaigns
python -m experiments collect runs/campaigns/attention_pgd      # → experiments/results/attention_pgd/*.json
python -m experiments tables                                    # results → docs/results/*.md and their figures
python -m experiments heads                                     # results → heads of campaigns and recipes
python -m experiments clipped RUN data.root=cifar10.npz         # the share of key entries that rpc clips
python -m experiments milliseconds runs/campaigns/NAME          # inference without the pairs that masks remove
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.collected import collect, write_heads
from experiments.packs import PIECE, pack, unpack
from experiments.tables import RESULTS, ROOT, print_table, with_tables

PAGES = ROOT / "docs" / "results"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack", help="a campaign's files but its weights, in pieces")
    packing.add_argument("folder", type=Path)
    packing.add_argument("out", type=Path)
    packing.add_argument("--weights", nargs="*", default=[], metavar="RUN", help="runs whose weights come along")
    packing.add_argument(
        "--piece", type=int, default=PIECE, metavar="MIB", help="size of a piece (default %(default)s)"
    )
    packing.set_defaults(run=lambda o: print(*pack(o.folder, o.out, weights=o.weights, piece=o.piece), sep="\n"))
    unpacking = verbs.add_parser("unpack", help="the campaign's folder again")
    unpacking.add_argument("piece", type=Path, help="the first piece of a pack; the others lie beside it")
    unpacking.add_argument("folder", type=Path, help="where the folder of the campaign goes")
    unpacking.set_defaults(run=lambda o: print(unpack(o.piece, o.folder)))
    collecting = verbs.add_parser("collect", help="one small file per run")
    collecting.add_argument("folder", type=Path)
    collecting.add_argument(
        "--results", type=Path, default=RESULTS, help="where they go (default: experiments/results)"
    )
    collecting.set_defaults(run=lambda o: print(*collect(o.folder, o.results), sep="\n"))
    tables = verbs.add_parser("tables", help="make every table and figure of docs/results again, or print one")
    tables.add_argument("campaign", nargs="?")
    tables.add_argument("--results", type=Path, default=RESULTS)
    tables.set_defaults(run=make_tables)
    heads = verbs.add_parser("heads", help="say in the heads of campaigns and recipes what was measured")
    heads.set_defaults(run=lambda _: write_heads())
    timing = verbs.add_parser("milliseconds", help="inference of masked runs, before `collect`")
    timing.add_argument("folder", type=Path)
    timing.set_defaults(run=print_milliseconds)
    clipped = verbs.add_parser("clipped", help="the share of key entries that a run's rpc clips, by layer")
    clipped.add_argument("target")
    clipped.add_argument("overrides", nargs="*")
    clipped.add_argument("--images", type=int, default=256)
    clipped.add_argument("--match", action="store_true", help="print the λ of the paper's form that clips as many")
    clipped.set_defaults(run=print_shares)
    return parser


def print_shares(options: argparse.Namespace) -> None:
    from experiments.clipped import print_clipped

    print_clipped(options.target, options.overrides, options.images, match=options.match)


def print_milliseconds(options: argparse.Namespace) -> None:
    from experiments.milliseconds import measure

    print(*measure(options.folder), sep="\n")


def make_tables(options: argparse.Namespace) -> None:
    if options.campaign:
        print(print_table(options.campaign, options.results))
        return
    from experiments.figures import write_figures

    pages = sorted(PAGES.glob("*.md"))
    for page in pages:
        page.write_text(with_tables(page.read_text()))
    print(*pages, *write_figures(), sep="\n")


if __name__ == "__main__":
    options = make_parser().parse_args()
    options.run(options)
