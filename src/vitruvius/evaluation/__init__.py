"""Evaluate: how a model answers, on images as they are and under threats, image by image."""

from vitruvius.evaluation._evaluate import Progress, clean, evaluate, numbered
from vitruvius.evaluation._names import Threat, describe
from vitruvius.evaluation._subject import data_settings, fingerprint
from vitruvius.evaluation._target import TargetConfig, open_target, parse_threat
from vitruvius.evaluation.intervals import wilson
from vitruvius.evaluation.ledger import Ledger, load_ledger
from vitruvius.evaluation.result import Report, Score

__all__ = [
    "Ledger",
    "Progress",
    "Report",
    "Score",
    "TargetConfig",
    "Threat",
    "clean",
    "data_settings",
    "describe",
    "evaluate",
    "fingerprint",
    "load_ledger",
    "numbered",
    "open_target",
    "parse_threat",
    "wilson",
]
