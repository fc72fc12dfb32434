"""train: make the run folder, train epoch by epoch, keep the best and the last weights, go on after a stop."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from torch import nn

from vitruvius._errors import Preempted
from vitruvius._files import atomic_write_text
from vitruvius._processes import process_group
from vitruvius._registry import load_plugins
from vitruvius._secrets import redact
from vitruvius._signals import on_interrupt
from vitruvius._yaml import to_plain
from vitruvius.analysis import AnalysisCallback, first_images, rows_with_analyses
from vitruvius.analysis.callback import FILE
from vitruvius.tracking import Trackers
from vitruvius.training._guards.alarm import Alarm
from vitruvius.training._guards.preemption import listening
from vitruvius.training._loop import Callback, Loop
from vitruvius.training._progress_bar import Bar, make_teller
from vitruvius.training._run.folder import Run
from vitruvius.training._run.keeper import Keeper, resume
from vitruvius.training._seeding import preserve_rng
from vitruvius.training._selection import Selection
from vitruvius.training._session import Session, open_session
from vitruvius.training.config import Recipe, as_config


def train(
    config: Recipe,
    overrides: Iterable[str] = (),
    *,
    quiet: bool = False,
    console: Console | None = None,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Train as a recipe says; the run folder. Called again with the same recipe, it goes on where it stopped.

    config: the recipe: the name of a packaged one ("digits/softmax"), the path of a YAML file, a mapping with the
    sections of a recipe, or a Config. overrides: settings such as "train.epochs=20" or "out=runs/mine" on top of it;
    none by default. quiet: show no progress; false by default. console: the rich console that shows it, by default
    standard error. callbacks: objects with `epoch_end(epoch, model)`, called on the first process after every epoch;
    none by default.

    Without `out`, a file trains into runs/<its name>, a mapping into runs/unnamed. Of a remote run (`out: s3://…`) the
    folder is its local mirror.
    """
    config = as_config(config, overrides)
    load_plugins(config.plugins)
    run, trackers = Run(config.out or "runs/unnamed"), Trackers.of(config.tracking)
    with (
        process_group(config.train.device) as process,
        preserve_rng(process.device),
        listening() as stop,
        on_interrupt(run.describe_kept, run.abandon),
    ):
        fresh = not process.on_first(run.has_state)
        shown = process.first and not quiet
        tell = make_teller(console, shown=shown)
        # what can be wrong is found before a file is written
        session = open_session(config, process, fresh=fresh, tell=tell)
        keeper = Keeper(session, run, stop, Alarm.of(session))
        selection = Selection(session)
        process.on_first(lambda: run.begin(session.config))
        try:
            resume(session, run)
            if session.updates:
                tell(f"going on at epoch {session.epoch + 1}, after {session.updates:,} updates")
            bar = Bar.of(session, shown=shown, console=console)
            loop = Loop(session, run, keeper, selection, trackers, bar, tell=tell)
            if process.first:
                loop.analyses = Curves.of(session, run.folder)
                loop.callbacks = callbacks
                rows = rows_with_analyses(session.rows, run.folder)
                trackers.open(run.folder, redact(to_plain(session.config)), rows)
            loop.run_epochs()
        except BaseException as error:
            if process.first:
                run.abandon()
            if stop.asked and isinstance(error, RuntimeError):  # workers that died of the same signal
                raise Preempted(f"{stop.name}: {run.describe_kept()}") from error
            raise
        else:
            trackers.close()  # which writes what it still has
            process.on_first(lambda: run.push(required=True))
        finally:
            trackers.close()
            run.release()
    return run.folder


class Curves:
    """An analysis callback whose file is what the run knows, not more and not less."""

    def __init__(self, inside: AnalysisCallback, folder: Path) -> None:
        self.inside, self.file = inside, folder / FILE

    @classmethod
    def of(cls, session: Session, folder: Path) -> list[Curves]:
        """What the recipe asks of fixed images; a list of one, or of none."""
        config = session.config
        if not config.analyses:
            return []
        batches = {
            name: first_images(loader, config.train.analyse_images)
            for name, loader in (("train", session.train_loader), ("validation", session.val_loader))
        }
        inside = AnalysisCallback(config.analyses, batches, every=config.train.analyse_every, folder=folder)
        curves = cls(inside, folder)
        curves.mend(session)
        return [curves]

    def epoch_end(self, epoch: int, model: nn.Module) -> object:
        """Ask, after forgetting what an earlier attempt at this epoch has left."""
        self._forget(epoch)
        return self.inside.epoch_end(epoch, model)

    def mend(self, session: Session) -> None:
        """Forget epochs that the state does not know; the last one is asked anew, a kill may have cut its answer."""
        self._forget(session.epoch)
        if session.batch == 0 and session.epoch > 0 and session.replica is None:
            self.epoch_end(session.epoch - 1, session.eval_model())

    def _forget(self, epoch: int) -> None:
        """Lines of this epoch and later ones, and a line that was cut off."""
        if not self.file.exists():
            return
        text = self.file.read_text(encoding="utf-8")
        kept = [line for line in text.split("\n")[:-1] if json.loads(line)["epoch"] < epoch]
        if (wanted := "".join(f"{line}\n" for line in kept)) != text:
            atomic_write_text(self.file, wanted)
