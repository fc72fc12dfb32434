"""RobustBench's protocol without its package: the same images, the same attack, the same kind of result file.

Croce et al. 2021, arXiv:2010.09670. ImageNet: `data.subset=robustbench-imagenet` on the validation folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vitruvius._files import atomic_write_text
from vitruvius.attacks.autoattack import AutoAttack
from vitruvius.attacks.base import LINF
from vitruvius.evaluation._evaluate import evaluate
from vitruvius.evaluation.result import Report
from vitruvius.evaluation.threats import describe


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What RobustBench's model_info files say of a model."""

    name: str
    dataset: str  # cifar10, cifar100, imagenet
    architecture: str
    eps: str  # "4/255"
    clean_acc: str  # in per cent
    autoattack_acc: str
    reported: str  # robust accuracy that the authors report, in per cent
    link: str = ""
    authors: str = ""
    venue: str = ""
    additional_data: bool = False
    number_forward_passes: str = "1"
    remarks: str = ""  # what speaks against believing the figures; empty if nothing does

    def save(self, path: str | Path) -> None:
        """As RobustBench writes it: one flat JSON object of texts."""
        atomic_write_text(path, json.dumps(self.__dict__, indent=2) + "\n")


def benchmark(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    dataset: str,
    name: str,
    eps: float,
    norm: str = "linf",
    architecture: str = "",
    seed: int = 0,
    folder: str | Path | None = None,
    **facts: Any,
) -> tuple[Report, Entry]:
    """Clean accuracy and accuracy under standard AutoAttack, image by image, and the entry to publish.

    model: in eval mode; takes pixels in [0, 1]. loader: its images, as RobustBench chooses them.
    dataset: cifar10, cifar100 or imagenet. name: of the model, as it will be listed.
    eps: radius in pixels of [0, 1]. norm: linf, l2 or l1, in any case (`Linf`). seed: of the attack.
    architecture: default: the class of the model.
    folder: where the ledger is kept, so that an interrupted benchmark goes on; default: nothing is written.
    facts: other fields of the `Entry`: link, authors, venue, … and `reported`, the robust accuracy that the authors
        report where it is not the one measured here.

    What the checks of `vitruvius.evaluation.masking` find is among the remarks of both.
    """
    attack = AutoAttack(eps=eps, norm=norm, seed=seed)  # type: ignore[arg-type]
    report = evaluate(model, loader, [attack], folder=folder)
    clean, robust = report["clean"], report[describe(attack)]  # a folder may hold other threats too
    entry = Entry(
        name=name,
        dataset=dataset,
        architecture=architecture or type(getattr(model, "model", model)).__name__,
        eps=f"{eps * 255:g}/255" if attack.norm == LINF else f"{eps:g}",  # as RobustBench writes it
        clean_acc=f"{100 * clean.accuracy:.2f}",
        autoattack_acc=f"{100 * robust.accuracy:.2f}",
        remarks=" ".join(report.remarks),
        **{"reported": f"{100 * robust.accuracy:.2f}", **facts},
    )
    return report, entry
