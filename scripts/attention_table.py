"""Run every attention variant on a tiny model of every family and write the table of docs/attention.md.

    python scripts/attention_table.py [--check | --missing]

Each cell is run: the variant is plugged into all sites that accept it, then a training step with finite gradients for
every new parameter (trains), the same with torch.compile(fullgraph=True) and equal results (compiles), a step with a
random mask before it, and a step with low rank before it. `--check` writes nothing and fails if the table has changed;
`--missing` runs only the cells that the table does not have yet.
"""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from families import FAMILIES, Family  # noqa: E402
from vitruvius._errors import SurgeryError  # noqa: E402
from vitruvius.attention import part  # noqa: E402
from vitruvius.attention.base import Part, build_core  # noqa: E402
from vitruvius.attention.mask import Mask  # noqa: E402
from vitruvius.heads import Site  # noqa: E402
from vitruvius.surgery import restore, rewire, survey  # noqa: E402

PAGE = ROOT / "docs" / "attention.md"
BEGIN, END = "<!-- table: scripts/attention_table.py -->", "<!-- end of table -->"
ROWS = (
    "vit",
    "differential",
    "rope",
    "eva",
    "beit",
    "relpos",
    "swin",
    "swin_v2",
    "xcit",
    "cait",
    "levit",
    "crossvit",
    "maxvit",
    "coatnet",
)
VARIANTS: dict[str, Part] = {
    "softmax": part("softmax"),
    "symmetric": part("symmetric"),
    "rpc": part("rpc", iterations=2),
    "rpc, asymmetric": part("rpc", iterations=2, asymmetric=True),
    "scaled, matrix": part("scaled"),
    "scaled, alpha": part("scaled", form="alpha"),
    "standardised": part("standardised"),
    "truncated": part("truncated", mode="mix_head"),
    "low_rank": part("low_rank", tensors="q"),
    "mask": lambda site: half_mask(site),
    "differential": part("differential"),
    "sigmoid": part("sigmoid"),
    "softpick": part("softpick"),
    "twicing": part("twicing"),
    "pro": part("pro"),
    "l2": part("l2"),
    "l2, free": part("l2", tied=False),
    "linear": part("linear"),
    "sink": part("sink"),
    "top_k": part("top_k"),
    "entmax": part("entmax"),
    "gated": part("gated"),
    "elliptical": part("elliptical"),
    "value_residual": part("value_residual"),
    "tome": part("tome", r=2),
}


def half_mask(site: Site) -> nn.Module:
    """A random mask that keeps about half of the keys, and the first one always."""
    generator = torch.Generator().manual_seed(0)
    keep = torch.rand(site.num_heads, site.num_queries, site.num_keys, generator=generator) < 0.5
    keep[..., 0] = True
    return Mask(site, keep=keep)


@functools.cache
def sites_of(family: Family) -> dict[str, Site]:
    return survey(family.randomised()[0], input_size=(3, family.size, family.size))


def accepting(family: Family, *parts: Part) -> list[str]:
    """The sites of the family's model that accept the chain."""
    accepted = []
    for name, site in sites_of(family).items():
        try:
            build_core(parts, site)
        except SurgeryError:
            continue
        accepted.append(name)
    return accepted


def train_step(family: Family, parts: Sequence[Part], where: Sequence[str], compiled: bool) -> dict[str, Tensor]:
    """One forward and backward pass; the output and the gradients of the new parameters."""
    model, x = family.randomised()
    rewire(model, *parts, where=list(where), input_size=(3, family.size, family.size))
    run: Callable[[Tensor], Tensor] = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    out = run(x)
    out.square().sum().backward()
    found = {"out": out.detach()}
    for name, parameter in model.named_parameters():
        if ".core." in name:
            assert parameter.grad is not None, name
            found[name] = parameter.grad
    assert all(value.isfinite().all() for value in found.values())
    restore(model)
    return found


def cell(family: Family, variant: str) -> str:
    piece = VARIANTS[variant]
    where = accepting(family, piece)
    if not where:
        return "–"
    torch.compiler.reset()
    eager, compiled = (train_step(family, [piece], where, compiled=c) for c in (False, True))
    for name, value in eager.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-3, atol=1e-3)
    marks = ["t", "c"]
    for mark, other in (("m", "mask"), ("l", "low_rank")):
        chain = companions(family, variant, other)
        if chain and (sites := accepting(family, *chain)):
            train_step(family, chain, sites, compiled=False)
            marks.append(mark)
    return " ".join(marks) + ("" if len(where) == len(accepting(family)) else f" ({kinds(family, where)})")


def companions(family: Family, variant: str, other: str) -> list[Part]:
    """The chain of the other part and this variant; nothing where they do not go together."""
    if variant == other:
        return []
    if other == "mask" and variant in ("linear", "tome"):  # the one refuses a bias, the other changes its size
        return []
    if other == "mask":
        return [VARIANTS["mask"], VARIANTS[variant]]
    tensors = "k" if variant in ("symmetric", "rpc", "l2") else "q" if family.name == "cait" else "qk"
    return [part("low_rank", tensors=tensors), VARIANTS[variant]]


def kinds(family: Family, where: Sequence[str]) -> str:
    sites = sites_of(family)
    return ", ".join(sorted({sites[name].attends for name in where}))


def written(page: str) -> dict[tuple[str, str], str]:
    """The cells of the table as it is, by variant and family."""
    lines = page.split(BEGIN)[1].split(END)[0].strip().splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {(row[0], family): each for row in rows for family, each in zip(head[1:], row[1:], strict=True)}


def table(known: dict[tuple[str, str], str]) -> list[str]:
    chosen = [family for family in FAMILIES if family.name in ROWS]
    lines = ["| variant | " + " | ".join(map(str, chosen)) + " |", "|---" * (len(chosen) + 1) + "|"]
    for variant in VARIANTS:
        cells = []
        for family in chosen:
            cells.append(known.get((variant, family.name)) or cell(family, variant))
            print(f"{variant:16s}{family.name:12s}{cells[-1]}", flush=True)
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the table has changed")
    parser.add_argument("--missing", action="store_true", help="run only the cells that are not in the table")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    text = PAGE.read_text()
    known = written(text) if options.missing else {}
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    fresh = "\n".join([head + BEGIN, "", *table(known), "", END + tail])
    if options.check and fresh != text:
        sys.exit(f"{PAGE} is out of date: run python scripts/attention_table.py")
    if not options.check:
        PAGE.write_text(fresh)


if __name__ == "__main__":
    main()
