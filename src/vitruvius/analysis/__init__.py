"""What attention does: one analysis per file, a function of Heads, over many images, beside its chance level."""

from vitruvius.analysis.analysing import analyse
from vitruvius.analysis.base import NULLS, Attended, analyses
from vitruvius.analysis.callback import AnalysisCallback, first_images, read_rows
from vitruvius.analysis.explanations import chance_map, explain, explanations, score
from vitruvius.analysis.recording import record_pictures
from vitruvius.analysis.table import Row, Table

__all__ = [
    "NULLS",
    "AnalysisCallback",
    "Attended",
    "Row",
    "Table",
    "analyse",
    "analyses",
    "chance_map",
    "explain",
    "explanations",
    "first_images",
    "read_rows",
    "record_pictures",
    "score",
]
