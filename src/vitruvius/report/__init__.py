"""Figures in one style, and one self-contained HTML page about one or several runs."""

from typing import TYPE_CHECKING

from vitruvius._lazy import exports

if TYPE_CHECKING:
    from vitruvius._style import save_figure as save_figure
    from vitruvius.report.analysis_figures import draw_explanations as draw_explanations
    from vitruvius.report.page import write_page as write_page
else:
    __getattr__, __dir__, __all__ = exports(__name__)
