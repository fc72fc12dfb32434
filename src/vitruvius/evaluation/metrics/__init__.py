"""Numbers from ledgers: corruption errors, calibration, detection, temperature; one idea per file."""

from vitruvius.evaluation.metrics.bootstrap import Interval, bootstrap
from vitruvius.evaluation.metrics.calibration import (
    Bins,
    EqualMass,
    EqualWidth,
    as_released,
    aurra,
    expected_error,
    largest_error,
    rms_error,
    soft_f1,
)
from vitruvius.evaluation.metrics.corruption import (
    Baseline,
    CorruptionErrors,
    Errors,
    alexnet,
    corruption_errors,
    mean_error,
)
from vitruvius.evaluation.metrics.detection import Detection, detect, fpr_as_released, fpr_at_recall
from vitruvius.evaluation.metrics.redetection import detection_intervals
from vitruvius.evaluation.metrics.temperature import Tempered, collect_logits, fit_temperature

__all__ = [
    "Baseline",
    "Bins",
    "CorruptionErrors",
    "Detection",
    "EqualMass",
    "EqualWidth",
    "Errors",
    "Interval",
    "Tempered",
    "alexnet",
    "as_released",
    "aurra",
    "bootstrap",
    "collect_logits",
    "corruption_errors",
    "detect",
    "detection_intervals",
    "expected_error",
    "fit_temperature",
    "fpr_as_released",
    "fpr_at_recall",
    "largest_error",
    "mean_error",
    "rms_error",
    "soft_f1",
]
