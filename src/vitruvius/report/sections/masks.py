"""Masks: a row for each site, a picture for each head; what is kept is dark. And accuracy, cycles by sparsity.

H heads, N queries, M keys; True = kept
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitruvius._errors import RunError
from vitruvius._files import read_text
from vitruvius.compression.masks import Masks
from vitruvius.compression.sites import guess_sites
from vitruvius.report.blocks import Block, Maps, Note, grey_png, section
from vitruvius.report.run import Run, natural
from vitruvius.report.sections.maps import MAX_CELLS, draw_grid, shrink
from vitruvius.report.style import figure_style, legend_below, new_axes, series

KEYS = (".core.mask.keep", ".core.sparse_softmax.keep")


@section("masks", title="Attention masks", order=52)
def masks(runs: Sequence[Run]) -> Sequence[Block]:
    """The pairs of query and key that a run's mask keeps, and how much it removes."""
    blocks = [block for run in runs for block in _mask_grid(run)]
    if not blocks:
        return []
    text = "Each picture is one head, queries down, keys across; what the mask keeps is dark."
    return [Note(text=text), *blocks, *(Note(text=line) for run in runs for line in cycle_lines(run))]


def _mask_grid(run: Run) -> list[Block]:
    masks = read_masks(run)
    if masks is None:
        return []
    small, side = shrink({name: keep.float().numpy() for name, keep in masks.keep.items()}, MAX_CELLS)
    sites = []
    for name, heads in small.items():
        kept = [f"{keep.float().mean():.0%} kept" for keep in masks.keep[name]]
        sites.append((name, [(grey_png(head), words) for head, words in zip(heads, kept, strict=True)]))
    rows = [
        {"run": run.name, "site": site, "head": head, "kept": share.kept, "pairs": share.pairs}
        | {"sparsity": f"{share.sparsity:.6f}", "sparsity_unprotected": f"{share.sparsity_inside:.6f}"}
        for site, shares in masks.sparsity.heads.items()
        for head, share in enumerate(shares)
    ]
    grid = Maps(
        name=f"masks-{run.index}",
        title=run.name,
        colour=run.look.name,
        sites=sites,
        rows=rows,
        low="removed",
        high="kept.",
    )
    total = masks.sparsity.total
    text = (
        f"{run.name}: {total.sparsity:.2%} of all pairs removed, {total.sparsity_inside:.2%} without protected tokens"
    )
    pooled = f"; neighbouring tokens are averaged into at most {side} × {side} bins." if side else "."
    return [grid, Note(text=text + pooled)]


def read_masks(run: Run) -> Masks | None:
    """The masks in the checkpoint of a run: what the model really does; none of a damaged one, remarked elsewhere."""
    files = [run.folder / name for name in ("best.safetensors", "last.safetensors")]
    path = next(filter(Path.is_file, files), None)
    keep: dict[str, Tensor] = {}
    with contextlib.suppress(SafetensorError, OSError):
        if path is not None:
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if name.endswith(KEYS)]  # noqa: SIM118 (not a dict)
                keep = {name.partition(".core.")[0]: file.get_tensor(name) for name in sorted(names, key=natural)}
    if not keep:
        return None
    sites = guess_sites(keep)
    protected = {name: tuple(range(site.num_prefix_tokens)) for name, site in sites.items()}
    return Masks(keep=keep, sites=sites, protected=protected)


def cycle_lines(run: Run) -> list[str]:
    """What `vitruvius cycles` left in a run, as one sentence; nothing where it has not been asked."""
    try:
        rows = json.loads(read_text(run.folder / "cycles.json"))["rows"]
        before, cycles = int(rows[0]["total"]), int(rows[-1]["total"])
    except (RunError, ValueError, KeyError, IndexError, TypeError):
        return []
    return [
        f"{run.name}: {cycles:,} cycles of attention on ViTCoD's accelerator, {before:,} without masks "
        f"({before / max(cycles, 1):.2f}× faster; a model of that chip, no measurement)."
    ]


def draw_masks(keep: Mapping[str, Tensor]) -> Figure:
    """The same grid as a figure to save: sites down, heads across. `keep` are masks (H, N, M) by site, True = kept."""
    patterns = {name: [pattern.float().numpy() for pattern in heads] for name, heads in keep.items()}
    return draw_grid(patterns, label=lambda pattern: f"{1 - pattern.mean():.0%} removed")


def draw_accuracy(curves: Mapping[str, Mapping[float, float]], *, dense: float) -> Figure:
    """Accuracy against the share of pairs removed, one line per way (by its name); the dense accuracy beside them."""
    with figure_style():
        figure, axes = new_axes()
        axes.axhline(100 * dense, color="0.5", linewidth=1, linestyle=(0, (4, 3)), label="dense")
        for index, (name, points) in enumerate(curves.items()):
            look = series(index)
            shares, values = [100 * s for s in points], [100 * a for a in points.values()]
            axes.plot(shares, values, color=look.colour, marker=look.marker, label=name)
        axes.set(xlabel="pairs removed, %", ylabel="accuracy, %", title="Accuracy against sparsity")
        legend_below(figure)
    return figure


def draw_cycles(points: Mapping[str, Mapping[float, float]]) -> Figure:
    """Cycles of the accelerator against the share of pairs removed, one line per part (by its name)."""
    with figure_style():
        figure, axes = new_axes()
        for index, (name, cycles) in enumerate(points.items()):
            look = series(index)
            shares = [100 * share for share in cycles]
            axes.plot(shares, list(cycles.values()), color=look.colour, marker=look.marker, label=name)
        axes.set(xlabel="pairs removed, %", ylabel="cycles", title="Cycles against sparsity", yscale="log")
        legend_below(figure)
    return figure
