"""Inference of masked runs: CPU milliseconds an image without the pairs that a mask removes, beside dense attention.

python -m experiments milliseconds runs/campaigns/NAME     # writes milliseconds.json into each run's folder

One thread, one image at a time, both ways by turns, in CPU time, so that other work on the machine counts little.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from vitruvius.attention.mask import Mask
from vitruvius.compression.sparse import use_sparse
from vitruvius.models import load_model
from vitruvius.surgery import restore


def measure(folder: Path, *, repeats: int = 40) -> list[str]:
    """Each finished run of a campaign; what was written."""
    torch.set_num_threads(1)
    said = []
    for weights in sorted(folder.glob("*/best.safetensors")):
        run = weights.parent
        model = load_model(run)
        masked = any(isinstance(part, Mask) for part in model.modules())
        sparse = use_sparse(copy.deepcopy(model)) if masked else model
        dense, own = milliseconds([restore(model), sparse], repeats=repeats)
        found = {"dense": dense, "sparse": own, "sparse_share": own / dense, "repeats": repeats}
        (run / "milliseconds.json").write_text(json.dumps(found, indent=1) + "\n")
        said.append(f"{run.name}: {own:.1f} ms, {own / dense:.2f} of dense")
    return said


@torch.no_grad()
def milliseconds(models: list[nn.Module], *, repeats: int) -> list[float]:
    """Median CPU time of one image through each model, by turns, after one pass of each that does not count."""
    x = torch.rand(1, *models[0].data_config["input_size"], generator=torch.Generator().manual_seed(0))
    taken: list[list[float]] = [[] for _ in models]
    for turn in range(repeats + 1):
        for model, known in zip(models, taken, strict=True):
            start = time.process_time()
            model(x)
            if turn:
                known.append(1000 * (time.process_time() - start))
    return [statistics.median(known) for known in taken]
