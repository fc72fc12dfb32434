"""Evaluate: how a model answers, on images as they are and under threats, image by image."""

from vitruvius.evaluation._evaluate import Progress, clean, evaluate, numbered
from vitruvius.evaluation._names import Threat, describe
from vitruvius.evaluation._subject import data_settings, fingerprint
from vitruvius.evaluation._target import (
    TargetConfig,
    check_head,
    check_numbering,
    open_target,
    parse_threat,
    save_target,
)
from vitruvius.evaluation.intervals import wilson
from vitruvius.evaluation.ledger import Ledger, load_ledger
from vitruvius.evaluation.result import Report, Score
from vitruvius.evaluation.shift import evaluate_shift
from vitruvius.evaluation.shift_report import PartScore, ShiftReport, corruption_report, load_shift_report

__all__ = [
    "Ledger",
    "PartScore",
    "Progress",
    "Report",
    "Score",
    "ShiftReport",
    "TargetConfig",
    "Threat",
    "check_head",
    "check_numbering",
    "clean",
    "corruption_report",
    "data_settings",
    "describe",
    "evaluate",
    "evaluate_shift",
    "fingerprint",
    "load_ledger",
    "load_shift_report",
    "numbered",
    "open_target",
    "parse_threat",
    "save_target",
    "wilson",
]
