"""Figures in one style, and one self-contained HTML page about one or several runs."""

from vitruvius.report.analysis_figures import save_figures
from vitruvius.report.blocks import section
from vitruvius.report.explanations import draw_explanations
from vitruvius.report.page import write_page
from vitruvius.report.style import save_figure

__all__ = ["draw_explanations", "save_figure", "save_figures", "section", "write_page"]
