"""Two fake runs and their page, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_run import write_run

from vitruvius.report import write_page

PARTS = [{"use": "low_rank", "rank": 2, "tensors": "qk"}, {"use": "softmax"}]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A plain run and one with a low-rank core, digits in 65 tokens; read only."""
    where = tmp_path_factory.mktemp("runs")
    return [write_run(where / "plain"), write_run(where / "low-rank", parts=PARTS, seed=1, robust=0.8)]


@pytest.fixture(scope="session")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of both."""
    return write_page(runs, tmp_path_factory.mktemp("page") / "report.html", title="Two runs")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A small run to damage."""
    return write_run(tmp_path / "run", epochs=4, patch=2, images=2)
