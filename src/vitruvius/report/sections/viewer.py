"""The attention viewer of all runs that have recorded examples: runs side by side, clean beside attacked."""

from __future__ import annotations

from collections.abc import Sequence

from vitruvius.analysis.recording import MAX_BYTES, fit
from vitruvius.report.blocks import Block, Note, section
from vitruvius.report.run import Run, explain_maps
from vitruvius.report.viewer import Shown, make_viewer


@section("viewer", title="Attention viewer", order=60)
def viewer(runs: Sequence[Run]) -> Sequence[Block]:
    """Hover a patch, see each head's attention for that query."""
    with_examples = [(run, run.examples) for run in runs if run.examples is not None]
    if not with_examples:
        return []
    shown = []
    notes = []
    for run, examples in with_examples:
        fitted, sentence = fit(examples, MAX_BYTES // len(with_examples))
        shown.append(Shown(run.name, run.look.name, fitted))
        notes += [f"{run.name}: {sentence}"] if sentence else []
    told = explain_maps([run for run, _ in with_examples])
    return [make_viewer(shown), *(Note(text=text) for text in filter(None, [told, *notes]))]
