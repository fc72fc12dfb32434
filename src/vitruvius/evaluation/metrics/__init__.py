"""Numbers from ledgers: corruption errors, calibration, detection, temperature; one idea per file."""

from vitruvius.evaluation.metrics.calibration import EqualWidth, aurra, expected_error
from vitruvius.evaluation.metrics.corruption import Baseline, alexnet, corruption_errors
from vitruvius.evaluation.metrics.detection import detect
from vitruvius.evaluation.metrics.temperature import fit_temperature

__all__ = [
    "Baseline",
    "EqualWidth",
    "alexnet",
    "aurra",
    "corruption_errors",
    "detect",
    "expected_error",
    "fit_temperature",
]
