"""What can go wrong, as a tree of classes: all are VitruviusErrors, and what Python calls such an error, too.

So `except ValueError` catches ConfigError, UnknownName, SurgeryError, CheckpointError and DataError.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class VitruviusError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1  # of the command line


class ConfigError(VitruviusError, ValueError):
    """A recipe, a command line or an argument says something impossible."""


class UnknownName(VitruviusError, KeyError, ValueError):
    """No registered piece of that name."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0])


class SurgeryError(VitruviusError, ValueError):
    """Attention cannot be rewired as asked."""


class NoSiteError(SurgeryError):
    """A pattern matches no attention site, or the model has none."""


class UnsuitableSite(SurgeryError):
    """A part does not make sense at this site."""


class CheckpointError(VitruviusError, ValueError):
    """Weights do not belong to this model, or the file is damaged."""


class DataError(VitruviusError, ValueError):
    """A data set is missing, empty, or holds broken images."""


class RunError(VitruviusError, OSError):
    """A run folder cannot be read or written."""


class Diverged(VitruviusError, ArithmeticError):
    """Training has lost its numbers: a loss or a weight is not finite."""


class Overfitted(Diverged):
    """Training has learned to fool its own attack (catastrophic overfitting)."""


class Preempted(VitruviusError, InterruptedError):
    """A signal asked the run to stop; it is saved and can be resumed."""

    exit_code = 75  # "try again later", for schedulers


class MissingExtra(VitruviusError, ImportError):
    """An optional package is needed."""

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
