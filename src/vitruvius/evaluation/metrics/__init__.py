"""Numbers from ledgers: corruption errors, calibration, detection, temperature; one idea per file."""

from vitruvius.evaluation.metrics.calibration import EqualWidth, aurra, expected_error
from vitruvius.evaluation.metrics.corruption import alexnet
from vitruvius.evaluation.metrics.detection import detect
from vitruvius.evaluation.metrics.temperature import fit_temperature

__all__ = ["EqualWidth", "alexnet", "aurra", "detect", "expected_error", "fit_temperature"]
