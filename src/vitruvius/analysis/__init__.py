"""What attention does: one analysis per file, a function of Heads, over many images, beside its chance level."""

from vitruvius.analysis.analysing import analyse
from vitruvius.analysis.base import analyses
from vitruvius.analysis.explanations import explain, explanations
from vitruvius.analysis.table import Table

__all__ = [
    "Table",
    "analyse",
    "analyses",
    "explain",
    "explanations",
]
