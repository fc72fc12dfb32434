"""Detection of images from outside: how well a score tells them from images of the classes a model knows.

Scores are high for images from outside: −max softmax (Hendrycks & Gimpel 2017, arXiv:1610.02136), −max logit
(Hendrycks et al. 2022, arXiv:1911.11132), −logsumexp of the logits, the energy (Liu et al. 2020, arXiv:2010.03759).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitruvius.evaluation.metrics._checks import checked

SCORES = {"max softmax": "confidence", "max logit": "max_logit", "energy": "energy"}  # score → column of a ledger


@dataclass(frozen=True, kw_only=True)
class Detection:
    """Shares in [0, 1]."""

    auroc: float
    aupr_out: float  # images from outside are what is looked for
    aupr_in: float  # images of known classes are
    fpr95: float  # known images taken for outside ones when 95 % of those are found


def detect(outside: Tensor, inside: Tensor) -> Detection:
    """From the scores of images from outside and of known ones; a higher score means outside.

    `outside` (n,) and `inside` (m,) are those scores.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score  # here: a second and more at every start

    truth, scores = _joined(outside, inside)
    return Detection(
        auroc=float(roc_auc_score(truth, scores)),
        aupr_out=float(average_precision_score(truth, scores)),
        aupr_in=float(average_precision_score(1 - truth, -scores)),
        fpr95=fpr_at_recall(outside, inside),
    )


def fpr_at_recall(outside: Tensor, inside: Tensor, *, recall: float = 0.95) -> float:
    """The least share of known images above a threshold that finds at least that share of the outside ones.

    `outside` (n,) and `inside` (m,) are scores, higher for outside; `recall` is that share, 0.95 by default.
    """
    fpr, tpr = _curve(outside, inside)
    return float(fpr[tpr >= recall - 1e-12].min())


def fpr_as_released(outside: Tensor, inside: Tensor, *, recall: float = 0.95) -> float:
    """The same as the papers' released code has it: at the lowest threshold whose recall is nearest, be it below.

    `outside` (n,), `inside` (m,) and `recall` are as for `fpr_at_recall`.
    """
    fpr, tpr = _curve(outside, inside)
    thresholds = slice(1, int((tpr == 1).argmax()) + 1)  # from the first image to the first that finds all
    distance = np.abs(tpr[thresholds] - recall)
    return float(fpr[thresholds][np.flatnonzero(distance == distance.min())[-1]])


def _curve(outside: Tensor, inside: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Shares of known and of outside images above every threshold, from the highest on."""
    from sklearn.metrics import roc_curve

    fpr, tpr, _ = roc_curve(*_joined(outside, inside), drop_intermediate=False)
    return fpr, tpr


def _joined(outside: Tensor, inside: Tensor) -> tuple[np.ndarray, np.ndarray]:
    (out,), (known,) = checked(outside=outside), checked(inside=inside)
    truth = np.concatenate([np.ones(len(out), int), np.zeros(len(known), int)])
    return truth, torch.cat([out, known]).numpy()
