"""A bar with the time left, in a terminal; silent elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """Told how far some work is, and a few words about it."""

    def __init__(self, title: str, *, shown: bool = True, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self.bars = Progress(
            TextColumn(f"[bold]{title}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (shown and console.is_terminal),
        )
        self.bar = self.bars.add_task("", total=None, words="")

    def __enter__(self) -> Bar:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def __call__(self, done: int, total: int | None, /, words: str = "") -> None:
        self.bars.update(self.bar, completed=done, total=total, words=words)
