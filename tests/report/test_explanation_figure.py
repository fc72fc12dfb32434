"""The picture of explanations: clean and attacked side by side."""

import pytest
import torch

from vitruvius._errors import DataError
from vitruvius.models import create_model
from vitruvius.report.explanations import draw_explanations


def test_every_image_has_a_row_of_four_pictures():
    model = create_model("vitruvius/vit_digits", depth=1).eval()
    clean = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    figure = draw_explanations(model, clean, (clean + 0.1).clamp(max=1))
    assert len(figure.axes) == 8
    titles = [title for axes in figure.axes if (title := axes.get_title() or axes.get_title("left"))]
    assert titles == ["clean", "rests on", "attacked", "now rests on"]
    with pytest.raises(DataError, match="one shape"):
        draw_explanations(model, clean, clean[:1])
