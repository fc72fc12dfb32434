"""What can go wrong, as a tree.

VitruviusError
├── ConfigError              a recipe or a command line says something impossible
├── UnknownName              no registered piece of that name (also a KeyError)
├── SurgeryError             attention cannot be rewired as asked
│   ├── NoSiteError          a pattern matches no attention site, or the model has none
│   └── UnsuitableSite       a part does not make sense at this site
├── CheckpointError          weights do not belong to this model, or the file is damaged
├── DataError                a data set is missing, empty, or holds broken images
├── RunError                 a run folder cannot be written or read (also an OSError)
├── Diverged                 training has lost its numbers (also an ArithmeticError)
│   └── Overfitted           training has learned to fool its own attack (catastrophic overfitting)
├── Preempted                a signal asked the run to stop; it is saved and can go on (also an InterruptedError)
└── MissingExtra             an optional package is needed (also an ImportError)

All but the last five are ValueErrors too, so `except ValueError` keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class VitruviusError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1  # of the command line


class ConfigError(VitruviusError, ValueError):
    """A recipe, an override or an argument is not acceptable."""


class UnknownName(VitruviusError, KeyError, ValueError):
    """A name that no registry knows."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0])


class SurgeryError(VitruviusError, ValueError):
    """The attention of a model cannot be changed as asked."""


class NoSiteError(SurgeryError):
    """Nothing to operate on."""


class UnsuitableSite(SurgeryError):
    """A part refuses a site."""


class CheckpointError(VitruviusError, ValueError):
    """Weights that do not fit, or a file that cannot be read."""


class DataError(VitruviusError, ValueError):
    """Data that cannot be used."""


class RunError(VitruviusError, OSError):
    """A run folder that cannot be read or written."""


class Diverged(VitruviusError, ArithmeticError):
    """A loss or a weight is no longer a finite number."""


class Overfitted(Diverged):
    """Robust against one step, helpless against several."""


class Preempted(VitruviusError, InterruptedError):
    """Stopped by a signal, saved on the way out."""

    exit_code = 75  # "try again later", for schedulers


class MissingExtra(VitruviusError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: {install_command(extra)}")


def install_command(extra: str) -> str:
    """What installs an extra: from the checkout that this package runs from, if it does, else from an index."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "pyproject.toml").is_file():
        return f"pip install 'vitruvius[{extra}]'"
    if checkout == Path.cwd().resolve():
        return f"pip install -e '.[{extra}]'"
    return f"pip install -e '{checkout}[{extra}]'"


def suggest(name: str, known: Iterable[str]) -> str:
    """End of a sentence: `; did you mean 'rpc'?` when something known is close to `name`, else a full stop."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "."
