"""Who disturbs, worst case: one file per attack, (model, x, y) → x'."""

from vitruvius._dice import Dice, image_ids
from vitruvius._registry import load_room
from vitruvius.attacks._base import Attack, Threat, attacks, disturb
from vitruvius.attacks._checks import check_eps, check_inputs, check_logits, check_mode
from vitruvius.attacks._losses import CE, DLR, KL, LOSSES, MARGIN, Loss
from vitruvius.attacks._norms import L1, L2, LINF, NORMS, L1Norm, L2Norm, LinfNorm, Norm, as_norm

__all__ = [
    "CE",
    "DLR",
    "KL",
    "L1",
    "L2",
    "LINF",
    "LOSSES",
    "MARGIN",
    "NORMS",
    "Attack",
    "Dice",
    "L1Norm",
    "L2Norm",
    "LinfNorm",
    "Loss",
    "Norm",
    "Threat",
    "as_norm",
    "attacks",
    "check_eps",
    "check_inputs",
    "check_logits",
    "check_mode",
    "disturb",
    "image_ids",
]

load_room(__name__, __path__)
