"""From attention maps to masks, and what they save: average maps, masks, cycles of an accelerator, exports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from vitruvius._errors import RunError

FIGURES = (".png", ".pdf", ".svg", "")


def maps(
    target: str,
    /,
    *overrides: str,
    augment: bool = False,
    images: int | None = None,
    out: Path | None = None,
    figure: Path | None = None,
    trust_plugins: bool = False,
) -> Path:
    """Average attention maps over the training images, for masks and for looking at.

    Args:
        target: a run folder or a model name.
        overrides: settings such as data.root=/imagenet.
        augment: augmented as for training, instead of as they are.
        images: average over N images of the training split, a fixed random choice (default: all).
        out: a .safetensors file, or .npy for ViTCoD's layout (default: RUN/maps.safetensors).
        figure: draw the grid of sites and heads: a .png, .pdf or .svg file.
        trust_plugins: import the modules a run names under plugins:, which runs code.
    """
    from vitruvius._files import check_out
    from vitruvius.request import open_request

    if figure is not None:
        check_out(figure, out, example="maps.png", endings=FIGURES)
    with open_request(
        target,
        overrides,
        images=images,
        out=out,
        writes="maps.safetensors",
        split="augmented" if augment else "training",
        labels=False,
        trust_plugins=trust_plugins,
    ) as request:
        from vitruvius.compression.steps import write_maps

        path = write_maps(request)
    if figure is not None:
        from vitruvius._style import save_figure
        from vitruvius.compression.files import load_maps
        from vitruvius.report.sections.maps import draw_maps

        save_figure(draw_maps({name: map_.numpy() for name, map_ in load_maps(path)[0].items()}), figure)
    print(path)
    return path


def masks(
    maps: Path,
    /,
    *,
    rule: Sequence[str] = ("information",),
    sparsity: float | None = None,
    budget: Literal["global", "layer", "head"] = "global",
    protect: Annotated[list[int] | None, Parameter(consume_multiple=True)] = None,
    tiles: int | None = None,
    threshold: int | None = None,
    of: str | None = None,
    out: Path | None = None,
    figure: Path | None = None,
    trust_plugins: bool = False,
) -> None:
    """Masks from average maps: by a rule's own limit, or removing exactly the share asked for.

    Args:
        maps: the file from `vitruvius maps`, or ViTCoD's .npy.
        rule: which pairs stay, e.g. information:mass=0.9; several for patterns of sites, as
            'stages.0.*=information:mass=0.46' (default: information).
        sparsity: share of all pairs to remove, exactly, e.g. 0.9.
        budget: what shares the limit (default: global).
        protect: tokens whose rows and columns stay (default: class and registers).
        tiles: choose whole tiles of this many queries and keys, e.g. 16: kernels skip them.
        threshold: queries that make a token global (default: a quarter of them).
        of: refuse maps that are not of this run's model.
        out: a .safetensors file, or .npy for ViTCoD's (default: masks.safetensors beside the maps).
        figure: draw the grid of sites and heads: a .png, .pdf or .svg file.
        trust_plugins: import the modules a run names under plugins:, which runs code.
    """
    from vitruvius._files import check_out

    if out is not None:
        check_out(out, maps, of, example="masks.safetensors")
    if figure is not None:
        check_out(figure, maps, out, example="masks.png", endings=FIGURES)
    if not maps.exists():  # before anything slow is imported
        raise RunError(f"cannot read {maps}: there is no such file.")
    from vitruvius.compression.steps import write_masks
    from vitruvius.surgery import survey
    from vitruvius.targets.base import open_target

    model = None if of is None else open_target(of, data_needed=False, trust_plugins=trust_plugins).model
    limits: dict[str, Any] = {"sparsity": sparsity, "budget": budget, "protect": protect, "tiles": tiles}
    sites = None if model is None else survey(model)
    made, text = write_masks(maps, rule, out, sites=sites, threshold=threshold, **limits)
    if figure is not None:
        from vitruvius._style import save_figure
        from vitruvius.report.sections.maps import draw_masks

        save_figure(draw_masks(made.keep), figure)
    print(text)


def cycles(
    target: str,
    /,
    *overrides: str,
    head_dim: int | None = None,
    threshold: int | None = None,
    trust_plugins: bool = False,
) -> None:
    """Cycles of ViTCoD's accelerator for the masks of a file or run, beside the dense ones; a model, no measurement.

    Args:
        target: a file of masks, ViTCoD's .npy or folder, or a run folder.
        overrides: settings of the run.
        head_dim: channels of a head (default: what the masks' sites say, else 64).
        threshold: queries that make a token global (default: a quarter of them).
        trust_plugins: import the modules a run names under plugins:, which runs code.
    """
    from vitruvius.targets.base import kind_of

    if not Path(target).exists():
        kind_of(target)  # before anything slow is imported
    from vitruvius.compression.steps import cycles_of

    table, path = cycles_of(target, overrides, head_dim=head_dim, threshold=threshold, trust_plugins=trust_plugins)
    print(f"{table}\n\n{path}")


def export(
    target: str,
    /,
    *overrides: str,
    masks: Path | None = None,
    format: Literal["torch-export", "onnx", "safetensors", "timm-hub"] = "torch-export",
    sparse: bool = False,
    out: Path | None = None,
    trust_plugins: bool = False,
) -> Path:
    """Export a model for inference elsewhere; what is written is read back and must answer the same.

    Args:
        target: a run folder or a model name.
        overrides: settings of a model by name such as model.weights=weights.safetensors.
        masks: prune the model by this file of masks first, without training.
        format: torch-export, onnx, safetensors, or timm-hub, a folder for timm's local-dir: (default: torch-export).
        sparse: compute only what masks keep; pays with many tokens.
        out: the file or folder (default: RUN/export.pt2, .onnx, .safetensors or RUN/export_timm_hub).
        trust_plugins: import the modules a run names under plugins:, which runs code.
    """
    from vitruvius._yaml import to_plain
    from vitruvius.targets.base import kind_of

    kind_of(target)  # before anything slow is imported
    from vitruvius.compression.export import NAMES
    from vitruvius.compression.export import export as write_export
    from vitruvius.compression.steps import masked_rules, pruned
    from vitruvius.request import open_request

    with open_request(
        target,
        overrides,
        out=out,
        writes=NAMES[format],
        labels=False,
        data_needed=False,
        trust_plugins=trust_plugins,
        alone=True,
    ) as request:
        recipe = request.target.recipe if request.target.is_run else to_plain(request.config)
        model = request.model
        if masks is not None:
            recipe = {**recipe, "attention": masked_rules(recipe.get("attention") or (), masks)}
            model = pruned(model, recipe["attention"])
        path = write_export(model, request.folder, format=format, sparse=sparse, recipe=recipe)
    print(path)
    return path
