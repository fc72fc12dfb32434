"""Figures in one style, and one self-contained HTML page about one or several runs."""

from vitruvius.report import sections as sections  # the room registers itself
from vitruvius.report._examples import save_examples
from vitruvius.report._markup import write_csv
from vitruvius.report._record import record_examples, save_model_facts
from vitruvius.report._section import section
from vitruvius.report.page import write_page
from vitruvius.report.style import save_figure

__all__ = ["record_examples", "save_examples", "save_figure", "save_model_facts", "section", "write_csv", "write_page"]
