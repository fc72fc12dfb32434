"""What a tracker is: it is opened with a run, shown all rows after every epoch, and closed.

It gets all rows every time, because a run that goes on after a stop, or is rolled back, may take rows back: what
was written must become what is true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from vitruvius._registry import Registry

Row = dict[str, Any]  # epoch, train_loss, val_accuracy, …


class Tracker(Protocol):
    """One place where metrics go."""

    def open(self, folder: Path, config: dict[str, Any]) -> None:
        """Begin, or go on; `config` is the resolved recipe without secrets.

        `folder` is that of the run.
        """
        ...

    def log(self, rows: Sequence[Row]) -> None:
        """All `rows` so far, one per epoch; rows that are there already must not be there twice."""
        ...

    def close(self) -> None:
        """No more rows in this process."""
        ...


trackers: Registry[Callable[..., Tracker]] = Registry("tracker", homes=["vitruvius.tracking"])


class Trackers:
    """All trackers of a run; without any it does nothing.

    `members` are opened, shown rows and closed in their order.
    """

    def __init__(self, members: Sequence[Tracker] = ()) -> None:
        self.members = list(members)
        self._opened: list[Tracker] = []

    @classmethod
    def of(cls, specs: Sequence[Any]) -> Trackers:
        """From a recipe: `csv`, `wandb:mode=offline`, `{use: wandb, mode: offline}`; checked before anything begins.

        `specs` are the entries of its list `tracking:`.
        """
        return cls([trackers.make(spec, where="tracking") for spec in specs])

    def open(self, folder: Path, config: dict[str, Any], rows: Sequence[Row]) -> None:
        """All of them, up to the rows that a resumed run brings.

        `folder` is that of the run; `config` the resolved recipe without secrets; `rows` those so far.
        """
        for member in self.members:
            member.open(folder, config)
            self._opened.append(member)
            member.log(rows)

    def log(self, rows: Sequence[Row]) -> None:
        """Show all `rows` so far to each of them."""
        for member in self._opened:
            member.log(rows)

    def close(self) -> None:
        for member in self._opened:
            member.close()
        self._opened = []


def scalars(row: Row) -> dict[str, float]:
    """The numbers of a row, without its epoch."""
    return {key: float(value) for key, value in row.items() if key != "epoch" and isinstance(value, int | float)}
