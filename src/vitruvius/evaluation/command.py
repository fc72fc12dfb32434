"""The verb `evaluate` as a command uses it: open the target, make the threats, keep the ledger in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vitruvius._processes import joined
from vitruvius.data import eval_loader
from vitruvius.evaluation._evaluate import evaluate
from vitruvius.evaluation._subject import data_settings
from vitruvius.evaluation._target import open_target, parse_threats
from vitruvius.evaluation.examination import examine, save_findings
from vitruvius.evaluation.result import Report
from vitruvius.evaluation.sanity import Finding


def evaluate_target(
    target: str, overrides: Sequence[str], threats: Sequence[str], out: str | None, sanity: float | None = None
) -> tuple[Report, list[Finding]]:
    """Evaluate a run folder or a model by name; ledger and report go to `out`, by default into the run.

    With an ε for `sanity`, the checks against gradient masking run too, and their findings lie beside the report.
    """
    made = [threat for text in threats for threat in parse_threats(text)]
    model, config = open_target(target, overrides)
    home = Path(target) if Path(target).is_dir() else Path("runs") / target.replace("/", "-")
    with joined(config.device) as process:
        model.to(process.device).eval()
        loader = eval_loader(
            config.data,
            input_size=model.data_config,
            rank=process.rank,
            world_size=process.world_size,
            device=process.device,
        )
        folder = Path(out or home / "evaluation")
        with Watch(shown=process.first) as watch:
            report = evaluate(
                model,
                loader,
                made,
                folder=folder,
                process=process,
                progress=watch,
                signature=data_settings(config.data),
            )
        findings = examine(model, loader, sanity) if sanity is not None and process.first else []
    if findings:
        save_findings(findings, folder / "sanity.json")
    return report, findings


class Watch:
    """A bar with the time left and the accuracy so far, in a terminal; silent elsewhere."""

    def __init__(self, *, shown: bool) -> None:
        console = Console(stderr=True)
        self.bars = Progress(
            TextColumn("[bold]evaluating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}  left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (shown and console.is_terminal),
        )
        self.bar = self.bars.add_task("", total=None, numbers="")

    def __enter__(self) -> Watch:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def __call__(self, done: int, total: int | None, /, **numbers: float) -> None:
        text = f"under the last threat {100 * numbers['accuracy']:.1f} %"
        self.bars.update(self.bar, completed=done, total=total, numbers=text)
