"""What attention does: one analysis per file, a function of Heads, over many images, beside its chance level."""

from vitruvius.analysis._attended import Attended
from vitruvius.analysis._nulls import NULLS
from vitruvius.analysis._registry import Analysis, ModelAnalysis, Question, analyses, question
from vitruvius.analysis._run import analyse, ask_all
from vitruvius.analysis._table import Curve, Pictures, Row, Table
from vitruvius.analysis.callback import AnalysisCallback, first_images, read_rows, rows_with_analyses
from vitruvius.analysis.explaining import explain_images
from vitruvius.analysis.explanations import explain, explanations

__all__ = [
    "NULLS",
    "Analysis",
    "AnalysisCallback",
    "Attended",
    "Curve",
    "ModelAnalysis",
    "Pictures",
    "Question",
    "Row",
    "Table",
    "analyse",
    "analyses",
    "ask_all",
    "explain",
    "explain_images",
    "explanations",
    "first_images",
    "question",
    "read_rows",
    "rows_with_analyses",
]
