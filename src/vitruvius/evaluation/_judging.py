"""Judge: one threat, some images, and what the model answers, as rows of a ledger.

B images, K classes.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius._checks import check_labels, check_logits
from vitruvius._dice import image_ids
from vitruvius._errors import ConfigError
from vitruvius.attacks import Ensemble, StageEvent, disturb
from vitruvius.evaluation._journal import LedgerJournal
from vitruvius.evaluation.ledger import AFTER, DRAWS_RIGHT, PIXELS, Columns, Ledger

Batch = tuple[Tensor, Tensor, Tensor]  # images (B, C, height, width) in [0, 1], labels (B), ids (B)
OnEvent = Callable[[StageEvent], object]


def judge(
    model: nn.Module,
    spec: str,
    threat: Any,
    batch: Batch,
    ledger: Ledger,
    batch_size: int,
    on_event: OnEvent | None = None,
    draws: int = 1,
) -> None:
    """Run one threat on the images it has not seen, and write down what the model answers.

    `batch`: images (B, C, height, width), labels (B,), ids (B,); of an ensemble, of several batches. `on_event` is told
    how far an ensemble is. `draws`: how often the model is asked about each x' of an ensemble; see `answer_draws`.
    """
    x, y, ids = batch
    new = ~torch.isin(ids, ledger.done(spec))
    if not new.any():
        return
    keep = new.to(x.device)
    fresh = (x[keep], y[keep], ids[new])
    if isinstance(threat, Ensemble):
        _judge_ensemble(model, spec, threat, fresh, ledger, batch_size, on_event, draws, pool=ids)
        return
    x, y, ids = fresh
    begun = time.perf_counter()
    moved = disturb(threat, model, x, y, ids)
    rows = answer_all(model, moved, y, batch_size)
    if spec == "clean":
        rows[PIXELS] = image_ids(x)
    _add(ledger, spec, ids, y, begun, rows)


def _judge_ensemble(
    model: nn.Module,
    spec: str,
    ensemble: Ensemble,
    batch: Batch,
    ledger: Ledger,
    batch_size: int,
    on_event: OnEvent | None,
    draws: int,
    pool: Tensor,
) -> None:
    """Rows are written as stages decide, where the ensemble keeps a journal; those that are left, at the end.

    `batch` is what the ensemble has not yet decided about, of all images of the `pool` (n,).
    """
    x, y, ids = batch
    size = ensemble.batch_size or batch_size

    def answers(x: Tensor, y: Tensor) -> Columns:
        return answer_draws(model, x, y, batch_size, draws)

    begun = time.perf_counter()
    taken = inspect.signature(ensemble.run).parameters
    extras: dict[str, Any] = {}
    if "on_event" in taken:
        extras["on_event"] = on_event
    journal = None
    if "journal" in taken and hasattr(ensemble, "stage_labels"):
        journal = LedgerJournal(ledger, spec, ensemble.stage_labels(), answers, size, pool)
        extras["journal"] = journal
    outcome = ensemble.run(model, x, y, ids=ids, batch_size=size, **extras)
    if journal is not None:
        journal.finish(ids)
    left = ~torch.isin(ids, ledger.done(spec))
    if left.any():
        rows = answers(outcome.x[left.to(x.device)], y[left.to(x.device)])
        if draws > 1:
            rows["correct"] = rows["correct"].cpu() & outcome.robust.cpu()[left]
        for name, robust in outcome.robust_by_stage().items():
            rows[f"{AFTER}{name}"] = robust.cpu()[left]
        _add(ledger, spec, ids[left], y[left.to(x.device)], begun, rows)


def _add(ledger: Ledger, spec: str, ids: Tensor, y: Tensor, begun: float, rows: Columns) -> None:
    seconds = torch.full_like(rows["loss"], (time.perf_counter() - begun) / len(y))
    ledger.add(spec, {"id": ids, "label": y, "seconds": seconds, **rows})


def answer_all(model: nn.Module, x: Tensor, y: Tensor, batch_size: int) -> Columns:
    """`answer`, a batch at a time."""
    parts = [answer(model, *batch) for batch in zip(x.split(batch_size), y.split(batch_size), strict=True)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def answer_draws(model: nn.Module, x: Tensor, y: Tensor, batch_size: int, draws: int) -> Columns:
    """`answer_all`; of several draws of a random model `correct` means in all, and the share that are right is kept."""
    rows = answer_all(model, x, y, batch_size)
    if draws == 1:
        return rows
    others = [answer_all(model, x, y, batch_size)["correct"] for _ in range(draws - 1)]
    right = torch.stack([rows["correct"], *others])  # (draws, B)
    return {**rows, "correct": right.all(0), DRAWS_RIGHT: right.float().mean(0)}


@torch.no_grad()
def answer(model: nn.Module, x: Tensor, y: Tensor) -> Columns:
    """What the model says of a batch."""
    logits = as_floats(model(x))  # (B, K)
    check_logits(logits, len(y))
    check_labels(y, logits.shape[1])
    return read_logits(logits, y)


def as_floats(logits: object) -> Tensor:
    """Logits in float32; in float64 where the model computes in it, as attacks take them."""
    if not isinstance(logits, Tensor):
        raise ConfigError(
            f"the model returned {type(logits).__name__}; expected one tensor of logits (images, classes). Wrap it in "
            "a module that returns them alone."
        )
    if logits.dtype == torch.float64:
        return logits
    return logits.float()


def read_logits(logits: Tensor, y: Tensor) -> Columns:
    """Columns of a ledger from logits (B, K); `top5`: whether the label is among the five best guesses.

    Classes are ranked by logits, whose small differences a softmax rounds away, and equal ones in their order.
    """
    log_p = logits.log_softmax(-1)  # (B, K)
    guesses = logits.argsort(dim=-1, descending=True, stable=True)[:, :5]  # (B, 5), or all K where they are fewer
    prediction = guesses[:, 0]
    return {
        "prediction": prediction.int(),
        "confidence": logits.softmax(-1).amax(-1),
        "correct": prediction == y,
        "loss": F.cross_entropy(logits, y, reduction="none"),
        "top5": (guesses == y[:, None]).any(-1),
        "max_logit": logits.amax(-1),
        "energy": logits.logsumexp(-1),
        "entropy": -(log_p.exp() * log_p).sum(-1),
    }
