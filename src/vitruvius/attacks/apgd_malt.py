"""Auto-PGD toward the wrong classes that are nearest by the model's gradient, not those of the largest logits (MALT).

Melamed et al. 2024, arXiv:2407.02240: mesoscopic almost linearity targeting. Over the radii of attacks, networks are
almost linear, so the distance (z_label − z_k) / ‖∇z_label − ∇z_k‖ to the linearised boundary says which class an ascent
can reach; the norm is the dual one of the ball. B images, C candidates, T targets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitruvius.attacks._models import logits_in_batches
from vitruvius.attacks.apgd_targeted import APGDTargeted
from vitruvius.attacks.base import Model, attacks
from vitruvius.attacks.fab import boundaries, dual_length
from vitruvius.attacks.losses import likeliest_classes


@attacks.register("apgd_malt")
@dataclass(frozen=True, kw_only=True)
class APGDMalt(APGDTargeted):
    """Auto-PGD toward the wrong classes nearest by the gradient (MALT); dlr or margin loss.

    Worth its gradients where there are many classes: with ten, all of them are tried anyway.

    Settings: those of apgd_targeted, and
    `candidates`: wrong classes whose distance is computed, those of largest logit; a gradient for each of them.
    """

    candidates: int = 100

    def targets_of(self, model: Model, x: Tensor, y: Tensor) -> Iterable[Tensor]:
        likeliest = likeliest_classes(logits_in_batches(model, x, self.batch_size), y, self.candidates)  # (B, C)
        size = self.batch_size or len(x)
        parts = zip(x.split(size), y.split(size), likeliest.split(size), strict=True)
        distances = torch.cat([self._distances(model, *part) for part in parts])  # (B, C)
        order = distances.argsort(dim=1, stable=True)[:, : self.targets]
        return likeliest.gather(1, order).T

    def _distances(self, model: Model, x: Tensor, y: Tensor, candidates: Tensor) -> Tensor:
        """(B, C) to the linearised boundaries; negative where the model is wrong already."""
        planes = boundaries(model, x, y, candidates)
        return torch.stack([-plane.height / (dual_length(self.norm, plane.normal) + 1e-12) for plane in planes], 1)

    def _name_of_dice(self) -> str:
        return f"apgd-malt-{self.loss}"
