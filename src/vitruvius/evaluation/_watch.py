"""The accuracy so far beside the bar of an evaluation."""

from __future__ import annotations

from vitruvius._bar import Bar


class Watch:
    """Told after every batch how far an evaluation is."""

    def __init__(self, *, shown: bool, title: str = "evaluating", what: str = "under the last threat") -> None:
        self.bar, self.what = Bar(title, shown=shown), what

    def __enter__(self) -> Watch:
        self.bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.__exit__()

    def __call__(self, done: int, total: int | None, /, **numbers: float) -> None:
        self.bar(done, total, f"{self.what} {100 * numbers['accuracy']:.1f} %")
