"""Read a checkpoint of another code base as a run folder, or its settings as a recipe; every key is used or named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitruvius._errors import CheckpointError

logger = logging.getLogger(__name__)


def convert(
    checkpoint: Path,
    /,
    *settings: str,
    source: Annotated[str, Parameter(name="--from")],
    out: Path,
    model: str | None = None,
    ema: bool = False,
    lenient: bool = False,
) -> Path:
    """Read a checkpoint of another code base as a run folder, or its settings as a recipe; no key is lost.

    Args:
        checkpoint: a .pth or .safetensors file, an args.yaml, or the folder of a training with its
            checkpoint-EPOCH.pth.tar, whose epochs are kept; pickled code is never run.
        settings: of the converter, key=value, e.g. layer=0.
        source: its layout; `vitruvius list converters` names them.
        out: the run folder to write, the recipe (--from timm-args), or the masks (--from vitcod-masks).
        model: the model's name, where the checkpoint does not say it.
        ema: take the averaged weights.
        lenient: settings that cannot be expressed here: leave them out, with a note.
    """
    from vitruvius._files import check_out
    from vitruvius._registry import parse_spec

    check_out(out, checkpoint)
    if not checkpoint.exists():  # before anything slow is imported
        raise CheckpointError(f"there is no checkpoint at {checkpoint}.")
    from vitruvius.compression.steps import masks_of_arrays
    from vitruvius.converters import convert as read_checkpoint
    from vitruvius.converters.arguments import read_arguments
    from vitruvius.converters.base import MASKS, SETTINGS, epoch_checkpoints, write_run
    from vitruvius.training import read_recipe

    if source == MASKS:
        _, text = masks_of_arrays(str(checkpoint), out)
        print(text)
        return out
    if source == SETTINGS:
        recipe = read_arguments(str(checkpoint), lenient=lenient)
        notes = recipe.notes
        path = recipe.write(out, origin=str(checkpoint))
        read_recipe(path)  # what the options cannot mean is said at once
    else:
        _, given = parse_spec("settings:" + ",".join(settings))
        given["weights"] = "ema" if ema else "model"
        best, epochs = epoch_checkpoints(checkpoint) if checkpoint.is_dir() else (checkpoint, {})
        converted = read_checkpoint(str(best), source, model_name=model, **given)
        notes = converted.notes
        kept = ((n, read_checkpoint(str(file), source, model_name=model, **given)) for n, file in epochs.items())
        path = write_run(converted, out, origin=f"{best}, read as {source}", kept=kept)
    for note in notes:
        logger.info("note: %s", note)
    print(path)
    return path
