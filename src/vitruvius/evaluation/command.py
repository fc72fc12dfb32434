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
from vitruvius.evaluation._target import open_target, parse_threat
from vitruvius.evaluation.result import Report


def evaluate_target(target: str, overrides: Sequence[str], threats: Sequence[str], out: str | None) -> Report:
    """Evaluate a run folder or a model by name; ledger and report go to `out`, by default into the run."""
    made = [parse_threat(text) for text in threats]
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
        with Watch(shown=process.first) as watch:
            return evaluate(
                model,
                loader,
                made,
                folder=out or home / "evaluation",
                process=process,
                progress=watch,
                signature=data_settings(config.data),
            )


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
