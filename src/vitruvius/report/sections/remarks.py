"""Remarks: what the report left out of each run, and why."""

from __future__ import annotations

from collections.abc import Sequence

from vitruvius.report._blocks import Block, Note
from vitruvius.report._runs import Run
from vitruvius.report._section import section


@section("remarks", title="Remarks", order=99)
def remarks(runs: Sequence[Run]) -> Sequence[Block]:
    """What was missing or damaged in the run folders."""
    return [Note(text=f"{run.name}: {remark}") for run in runs for remark in run.remarks]
