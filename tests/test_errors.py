"""Errors are catchable the way people catch, and read plainly."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path

import pytest

from vitruvius import _errors
from vitruvius._errors import MissingExtra, RunError, UnknownName, VitruviusError, suggest

KINDS = {
    name: kind
    for name, kind in vars(_errors).items()
    if inspect.isclass(kind) and issubclass(kind, VitruviusError) and kind is not VitruviusError
}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_an_error_is_also_one_of_pythons_own(name: str) -> None:
    others = {"RunError": OSError, "Diverged": ArithmeticError, "Overfitted": ArithmeticError}
    others |= {"Preempted": InterruptedError, "MissingExtra": ImportError}
    python = others.get(name, ValueError)
    assert issubclass(KINDS[name], python)
    assert KINDS[name].__doc__


def test_messages_read_plainly_and_travel_between_processes() -> None:
    assert str(UnknownName("no hat named 'x'.")) == "no hat named 'x'."
    for error in (RunError("cannot write"), UnknownName("no hat")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)


def test_a_suggestion_comes_only_when_something_is_close() -> None:
    assert suggest("rcp", ["rpc", "mask"]) == "; did you mean 'rpc'?"
    assert suggest("zzz", ["rpc", "mask"]) == "."


def test_what_is_missing_is_installed_from_the_checkout_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = Path(_errors.__file__).parents[2]
    monkeypatch.chdir(checkout)
    assert str(MissingExtra("datasets", "hf")) == "datasets is not installed; run: pip install -e '.[hf]'"
    monkeypatch.chdir(tmp_path)
    assert str(MissingExtra("datasets", "hf")).endswith(f"pip install -e '{checkout}[hf]'")
    monkeypatch.setattr(_errors, "__file__", str(tmp_path / "lib" / "vitruvius" / "_errors.py"))
    assert str(MissingExtra("datasets", "hf")).endswith("run: pip install 'vitruvius[hf]'")
