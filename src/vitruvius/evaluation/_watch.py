"""A bar with the time left and the accuracy so far, in a terminal; silent elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Watch:
    """Told after every batch how far an evaluation is."""

    def __init__(self, *, shown: bool, title: str = "evaluating", what: str = "under the last threat") -> None:
        console = Console(stderr=True)
        self.what = what
        self.bars = Progress(
            TextColumn(f"[bold]{title}"),
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
        text = f"{self.what} {100 * numbers['accuracy']:.1f} %"
        self.bars.update(self.bar, completed=done, total=total, numbers=text)
