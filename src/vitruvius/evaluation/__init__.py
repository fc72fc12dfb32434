"""Evaluation: how a model classifies clean images and images under threats, image by image."""

from typing import TYPE_CHECKING

from vitruvius._lazy import exports

if TYPE_CHECKING:
    from vitruvius.evaluation._evaluate import evaluate as evaluate
    from vitruvius.evaluation.ledger import load_ledger as load_ledger
    from vitruvius.evaluation.result import Report as Report
    from vitruvius.evaluation.robustbench import benchmark as benchmark
    from vitruvius.evaluation.sanity import examine as examine
    from vitruvius.evaluation.shift import evaluate_shift as evaluate_shift
    from vitruvius.evaluation.speed import measure_speed as measure_speed
    from vitruvius.evaluation.threats import describe as describe
    from vitruvius.evaluation.threats import make_threat as make_threat
else:
    __getattr__, __dir__, __all__ = exports(__name__)
