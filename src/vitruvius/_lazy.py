"""Names that a package exports and imports only when somebody uses them.

if TYPE_CHECKING:
    from vitruvius.attacks.pgd import PGD as PGD
else:
    __getattr__, __dir__, __all__ = exports(__name__)
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


def exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package: the names that it imports for type checkers alone.

    Each is imported when it is first used; so are public modules of the package. Where a module has the name of what it
    holds (`vitruvius.init.mimetic`), the package's attribute is always what it holds; `from vitruvius.init.mimetic
    import …` reaches the module.
    """
    module = sys.modules[package]
    loader: Any = module.__loader__
    homes = _homes(loader.get_source(package))
    names = sorted(homes)

    def get(name: str) -> Any:
        if name in homes:
            with uncollected():
                value = getattr(importlib.import_module(homes[name]), name)
            setattr(module, name, value)
            return value
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    if like_modules := {name for name, home in homes.items() if home == f"{package}.{name}"}:
        module.__class__ = _named_like_modules(like_modules)
    return get, lambda: names, names


def _homes(source: str) -> dict[str, str]:
    """Name → module, of the imports below `if TYPE_CHECKING:`."""
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python looks for no garbage: imports make none, and the search takes a fifth of the time of timm's."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _named_like_modules(names: set[str]) -> type[ModuleType]:
    """The class of a package that exports `names`, each from the module of the same name.

    Python makes an imported module an attribute of its package; here what the module holds becomes that attribute.
    """

    class Package(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            if name in names and isinstance(value, ModuleType):
                value = getattr(value, name)
            super().__setattr__(name, value)

    return Package
