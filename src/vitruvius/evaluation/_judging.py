"""Judge: one threat, some images, and what the model answers, as rows of a ledger.

B images, K classes.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius._checks import check_labels, check_logits
from vitruvius.attacks import Ensemble, disturb
from vitruvius.evaluation.ledger import AFTER, Columns, Ledger
from vitruvius.evaluation.threats import Threat


def judge(
    model: nn.Module, spec: str, threat: Threat, x: Tensor, y: Tensor, ids: Tensor, ledger: Ledger, batch_size: int
) -> None:
    """Run one threat on the images it has not seen, and write down what the model answers."""
    new = ~torch.isin(ids, ledger.done(spec))
    if not new.any():
        return
    keep = new.to(x.device)
    x, y, ids = x[keep], y[keep], ids[new]
    begun = time.perf_counter()
    moved, record = run_threat(model, threat, x, y, ids, batch_size)
    rows = answer_all(model, moved, y, batch_size)
    elapsed = (time.perf_counter() - begun) / len(y)
    ledger.add(spec, {"id": ids, "label": y, "seconds": torch.full_like(rows["loss"], elapsed), **rows, **record})


def run_threat(
    model: nn.Module, threat: Any, x: Tensor, y: Tensor, ids: Tensor, batch_size: int
) -> tuple[Tensor, Columns]:
    """x', and what the threat itself recorded: for an ensemble, which images were robust after each stage."""
    if isinstance(threat, Ensemble):
        outcome = threat.run(model, x, y, ids=ids, batch_size=threat.batch_size or batch_size)
        record = {f"{AFTER}{name}": robust for name, robust in outcome.robust_by_stage().items()}
        return outcome.x, record
    return disturb(threat, model, x, y, ids), {}


def answer_all(model: nn.Module, x: Tensor, y: Tensor, batch_size: int) -> Columns:
    """`answer`, a batch at a time."""
    parts = [answer(model, *batch) for batch in zip(x.split(batch_size), y.split(batch_size), strict=True)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@torch.no_grad()
def answer(model: nn.Module, x: Tensor, y: Tensor) -> Columns:
    """What the model says of a batch."""
    logits = model(x).float()  # (B, K)
    check_logits(logits, len(y))
    check_labels(y, logits.shape[1])
    return read_logits(logits, y)


def read_logits(logits: Tensor, y: Tensor) -> Columns:
    """Columns of a ledger from logits (B, K); `top5`: whether the label is among the five best guesses."""
    log_p = logits.log_softmax(-1)  # (B, K)
    confidence, prediction = logits.softmax(-1).max(-1)
    top = logits.topk(min(5, logits.shape[1])).indices
    return {
        "prediction": prediction.int(),
        "confidence": confidence,
        "correct": prediction == y,
        "loss": F.cross_entropy(logits, y, reduction="none"),
        "top5": (top == y[:, None]).any(-1),
        "max_logit": logits.amax(-1),
        "energy": logits.logsumexp(-1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
    }
