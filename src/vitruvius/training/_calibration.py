"""Auto-encoders with `start: calibrated` begin a new run fitted to the dense model's maps on training images."""

from __future__ import annotations

from torch import Tensor

from vitruvius._processes import Process
from vitruvius.analysis import first_images
from vitruvius.attention.low_rank import LowRank
from vitruvius.data import Loader
from vitruvius.models import PixelModel
from vitruvius.surgery.calibrating import calibrate_low_rank

IMAGES, BATCH = 512, 64


def calibrate(model: PixelModel, loader: Loader, process: Process) -> None:
    """Fit the auto-encoders that ask for it; the first process does, the others take its weights."""
    if not any(isinstance(part, LowRank) and part.start == "calibrated" for part in model.modules()):
        return
    weights: dict[str, Tensor] = process.once(lambda: _fitted(model, loader))
    model.load_state_dict(weights)


def _fitted(model: PixelModel, loader: Loader) -> dict[str, Tensor]:
    images = first_images(loader, IMAGES)
    calibrate_low_rank(model, images.to(next(model.parameters()).device).split(BATCH))
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}
