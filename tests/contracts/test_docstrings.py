"""Every public function names its arguments in a docstring (CONVENTIONS, rule 2).

Public is what can be reached without an underscore: a function, or a method or constructor of a class, whose name,
class and module have no leading underscore (`__init__` and `__call__` are how a class is used, and count), and whatever
a room lists in its `__all__`, wherever it is defined. An argument may be named by the function itself, its class, or
by the same method of a class of this package that it inherits from or of a protocol of its room that it fulfils; in
backticks, or as `name: what it is`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import vitruvius

CALLED = ("__init__", "__call__")  # how a class is used
EXTRAS = {"vitruvius.surgery._transformers": "transformers"}  # modules that begin with an optional package


def module_names() -> list[str]:
    """Every module of the package, apart from `__main__` and those whose extra is not installed."""
    found = [module.name for module in pkgutil.walk_packages(vitruvius.__path__, "vitruvius.")]
    left_out = {name for name, package in EXTRAS.items() if importlib.util.find_spec(package) is None}
    return ["vitruvius", *(name for name in found if not name.endswith("__main__") and name not in left_out)]


def is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def public_pieces(module: ModuleType) -> Iterator[Any]:
    """What the module defines under a public name, and what it lists in `__all__`."""
    for name, piece in vars(module).items():
        if is_public(name) and getattr(piece, "__module__", None) == module.__name__:
            yield piece
    for name in getattr(module, "__all__", ()):
        yield getattr(module, name)


def public_functions() -> dict[str, tuple[Callable[..., Any], type | None]]:
    """`module.name` or `module.Class.name` → the function, and its class."""
    found: dict[str, tuple[Callable[..., Any], type | None]] = {}
    for name in filter(is_public, module_names()):
        for piece in public_pieces(importlib.import_module(name)):
            if inspect.isclass(piece):
                found |= {full: (method, piece) for full, method in methods_of(piece)}
            elif callable(piece) and inspect.isfunction(inspect.unwrap(piece)):
                found[f"{piece.__module__}.{piece.__qualname__}"] = (inspect.unwrap(piece), None)
    return found


def methods_of(owner: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The methods that a class itself writes down; what a dataclass or a named tuple generates has no text."""
    for name, member in vars(owner).items():
        if not is_public(name) and name not in CALLED:
            continue
        function: Any = getattr(member, "__func__", member)  # of a class or static method
        if callable(function):
            function = inspect.unwrap(function)
        if inspect.isfunction(function) and function.__module__ == owner.__module__ and not generated(function):
            yield f"{owner.__module__}.{owner.__qualname__}.{name}", function


def generated(function: Any) -> bool:
    return bool(function.__code__.co_filename.startswith("<"))


def unnamed(function: Callable[..., Any], owner: type | None) -> list[str]:
    """The arguments that no docstring names."""
    text = "\n".join(texts(function, owner))
    arguments = list(inspect.signature(function).parameters)
    if owner is not None and not isinstance(vars(owner).get(function.__name__), staticmethod):
        arguments = arguments[1:]
    return [name for name in arguments if not name.startswith("_") and not is_named(name, text)]


def is_named(argument: str, text: str) -> bool:
    """`` `argument` ``, alone or in an expression; `argument: …`, `argument, other: …` or `argument=…`."""
    in_backticks = rf"`[^`]*\b{argument}\b[^`]*`"
    before_colon = rf"(?<![\w.]){argument}(?:,? (?:and )?`?\w+`?)?(?:: |=)"
    return re.search(f"{in_backticks}|{before_colon}", text) is not None


def texts(function: Callable[..., Any], owner: type | None) -> Iterator[str]:
    """The docstrings that may name an argument."""
    yield function.__doc__ or ""
    if owner is None:
        return
    bases = [base for base in owner.__mro__ if base.__module__.startswith("vitruvius")]
    for base in [*bases, *protocols_of(owner)]:
        yield vars(base).get("__doc__") or ""
        yield getattr(vars(base).get(function.__name__), "__doc__", None) or ""


def protocols_of(owner: type) -> list[type]:
    """The protocols of its room whose methods the class has."""
    room = ".".join(owner.__module__.split(".")[:2])
    return [protocol for protocol in PROTOCOLS if is_in(protocol, room) and methods_in(protocol) <= set(dir(owner))]


def is_in(piece: type, room: str) -> bool:
    return f"{piece.__module__}.".startswith(f"{room}.")


def methods_in(protocol: type) -> set[str]:
    return {name for name, member in vars(protocol).items() if is_public(name) and inspect.isfunction(member)}


def every_protocol() -> list[type]:
    """Protocols with methods of a name, also those of private modules that a public one imports."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("vitruvius.")]
    classes = {piece for module in modules for piece in vars(module).values() if inspect.isclass(piece)}
    return [one for one in classes if getattr(one, "_is_protocol", False) and methods_in(one)]


FUNCTIONS = public_functions()
PROTOCOLS = every_protocol()


@pytest.mark.parametrize("room", sorted({name.split(".")[1] for name in FUNCTIONS}))
def test_public_functions_name_every_argument(room: str) -> None:
    found = {
        name: missing
        for name, (function, owner) in FUNCTIONS.items()
        if name.split(".")[1] == room and (missing := unnamed(function, owner))
    }
    assert found == {}


def test_the_contract_sees_functions_methods_constructors_and_what_rooms_export() -> None:
    for name in (
        "vitruvius.surgery.rewiring.plug",
        "vitruvius.attacks.pgd.PGD.search",
        "vitruvius.attention.rpc.RPC.__init__",
        "vitruvius.evaluation._evaluate.evaluate",
    ):
        assert name in FUNCTIONS


def test_an_argument_may_be_named_by_the_function_its_class_or_what_it_overrides() -> None:
    def lonely(first: int, second: int, third: int, fourth: int) -> None:
        """Of `first`, and fourth. second, third: whole numbers."""

    assert unnamed(lonely, None) == ["fourth"]
    from vitruvius.attacks.fgsm import FGSM

    assert FGSM.search.__doc__ is None
    assert unnamed(FGSM.search, FGSM) == []
