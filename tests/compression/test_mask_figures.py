"""Masks, accuracy and cycles are drawn from what they are given; masked runs show their masks on the page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from goldens import deit_tiny_keep

import vitruvius
from vitruvius._errors import ConfigError
from vitruvius._files import save_tensors
from vitruvius.attention import part
from vitruvius.compression.cost import cycle_table
from vitruvius.report import write_page
from vitruvius.report.sections.maps import draw_accuracy, draw_cycles, draw_masks


def test_every_head_has_a_picture_of_its_pattern() -> None:
    keep = {"blocks.0.attn": torch.rand(3, 8, 8) > 0.5, "blocks.1.attn": torch.ones(3, 8, 8, dtype=torch.bool)}
    figure = draw_masks(keep)
    assert len(figure.axes) == 6
    assert (figure.axes[1].images[0].get_array() == keep["blocks.0.attn"][1].numpy()).all()
    assert figure.axes[5].get_xlabel() == "0% removed"


def test_accuracy_and_cycles_are_drawn_against_sparsity() -> None:
    axes = draw_accuracy({"masked": {0.5: 0.9, 0.9: 0.4}}, dense=0.95).axes[0]
    assert axes.lines[1].get_xydata().tolist() == [[50, 90], [90, 40]]
    table = cycle_table([{"a": torch.eye(20, dtype=torch.bool).expand(2, 20, 20)}], head_dim=16)
    axes = draw_cycles(table.curves()).axes[0]
    assert axes.lines[0].get_ydata().tolist() == [cycles.total for cycles in table.rows.values()]


def test_the_table_begins_with_the_dense_baseline_and_holds_the_published_count() -> None:
    keep = {f"blocks.{i}.attn": pattern for i, pattern in enumerate(deit_tiny_keep())}
    more = {name: pattern | (torch.rand(pattern.shape) > 0.85) for name, pattern in keep.items()}
    table = cycle_table([keep, more], head_dim=64, ratio=2 / 3, threshold=50, heads="first")
    dense, middle, sparse = table.rows.values()
    assert sparse.total == 9_492
    assert dense.total > middle.total > sparse.total
    assert next(iter(table.rows)) == 0.0
    assert "94.67 %" in str(table)
    assert "1.00×" in str(table)
    with pytest.raises(ConfigError, match="no masks"):
        cycle_table([], head_dim=64)


def test_a_masked_run_shows_its_masks_on_the_page(tmp_path: Path) -> None:
    keep = torch.eye(16, dtype=torch.bool).expand(3, 16, 16)
    model = vitruvius.create_model("vitruvius/vit_digits", depth=2, attention=[part("mask", keep=keep)])
    for name, masked in (("plain", False), ("masked", True)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("model: {name: vitruvius/vit_digits}\n")
        state = {k: v for k, v in model.model.state_dict().items() if masked or ".core." not in k}
        save_tensors(tmp_path / name / "best.safetensors", state)
    page = write_page([tmp_path / "plain", tmp_path / "masked"], tmp_path / "page.html").read_text()
    assert "Attention masks" in page
    assert "masked: 93.75% of all pairs removed" in page
    assert "Attention masks" not in write_page([tmp_path / "plain"], tmp_path / "other.html").read_text()
