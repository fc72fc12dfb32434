"""train: make the run folder, train epoch by epoch, keep the best and the last weights, go on after a stop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vitruvius._errors import Preempted
from vitruvius._processes import joined
from vitruvius._registry import load_plugins
from vitruvius._yaml import to_plain
from vitruvius.tracking import Trackers
from vitruvius.training._alarm import Alarm
from vitruvius.training._analyses import Curves
from vitruvius.training._loop import Callback, Loop
from vitruvius.training._luck import borrowed_luck
from vitruvius.training._preemption import listening
from vitruvius.training._progress import Bar
from vitruvius.training._run import Run
from vitruvius.training._saving import Keeper, resume
from vitruvius.training._secrets import redact
from vitruvius.training._selection import Selection
from vitruvius.training._session import open_session
from vitruvius.training.config import Config, check


def train(
    config: Config, *, quiet: bool = False, console: Console | None = None, callbacks: Sequence[Callback] = ()
) -> Path:
    """Train as the recipe says; the run folder. Called again with the same recipe, it goes on where it stopped.

    Of a remote run (`out: s3://…`) the folder is its local mirror.
    """
    check(config, "the recipe")
    load_plugins(config.plugins)
    run, trackers = Run(config.out or "runs/unnamed"), Trackers.of(config.tracking)
    with joined(config.train.device) as process, borrowed_luck(process.device), listening() as stop:
        fresh = not process.once(run.has_state)
        session = open_session(config, process, fresh=fresh)  # what can be wrong is found before a file is written
        keeper = Keeper(session, run, stop, Alarm.of(session))
        selection = Selection(session)
        process.once(lambda: run.begin(session.config))
        try:
            resume(session, run)
            if process.first:
                trackers.open(run.folder, redact(to_plain(session.config)), session.rows)
            bar = Bar.of(session, shown=process.first and not quiet, console=console)
            watchers = [*callbacks, *Curves.of(session, run.folder)] if process.first else []
            Loop(session, run, keeper, selection, trackers, bar, watchers).run_epochs()
        except BaseException as error:
            if process.first:
                run.abandon()
            if stop.asked and isinstance(error, RuntimeError):  # workers that died of the same signal
                raise Preempted(f"{stop.name}: stopped at the last saved state of {run.folder}.") from error
            raise
        finally:
            trackers.close()
        process.once(run.push)
    return run.folder
