"""Evaluation: how a model classifies clean images and images under threats, image by image."""

import warnings
from importlib import import_module
from typing import Any

from vitruvius.evaluation._evaluate import clean, evaluate, numbered
from vitruvius.evaluation._subject import data_settings, fingerprint, settings_fingerprint
from vitruvius.evaluation.ledger import Ledger, load_ledger
from vitruvius.evaluation.patch_fool import PatchFool  # registers itself among the attacks, and so does the next
from vitruvius.evaluation.result import Report, Score, wilson
from vitruvius.evaluation.shift import evaluate_shift
from vitruvius.evaluation.shift_report import PartScore, ShiftReport, corruption_report, load_shift_report
from vitruvius.evaluation.threats import Threat, describe, make_threat, make_threats
from vitruvius.evaluation.transfer import Transfer

__all__ = [
    "Ledger",
    "PartScore",
    "PatchFool",
    "Report",
    "Score",
    "ShiftReport",
    "Threat",
    "Transfer",
    "clean",
    "corruption_report",
    "data_settings",
    "describe",
    "evaluate",
    "evaluate_shift",
    "fingerprint",
    "load_ledger",
    "load_shift_report",
    "make_threat",
    "make_threats",
    "numbered",
    "settings_fingerprint",
    "wilson",
]

_MOVED = {
    "Progress": "vitruvius._checks.Progress",
    "TargetConfig": "vitruvius.targets.TargetConfig",
    "check_head": "vitruvius.targets.check_head",
    "check_numbering": "vitruvius.targets.check_numbering",
    "open_target": "vitruvius.targets.open_target",
    "parse_threat": "vitruvius.evaluation.threats.make_threat",
    "save_target": "vitruvius.targets.save_target",
}


def __getattr__(name: str) -> Any:
    """Names that have moved work for one more release."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, _, new = _MOVED[name].rpartition(".")
    warnings.warn(f"{__name__}.{name} is now {_MOVED[name]}.", DeprecationWarning, stacklevel=2)
    return getattr(import_module(home), new)
