"""Names that a package exports and imports only when somebody uses them.

if TYPE_CHECKING:
    from vitruvius.attacks.pgd import PGD as PGD
else:
    __getattr__, __dir__, __all__ = exports(__name__, {"PGD": "pgd"})
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def exports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package that exports each name from its home when it is first used.

    homes: the module of each name, relative to the package. Public modules of the package are imported on first use
        too. Where a module has the name of something exported (`vitruvius.init.mimetic`), the package's attribute is
        what is exported; `from vitruvius.init.mimetic import …` reaches the module.
    """
    module = sys.modules[package]
    names = sorted(homes)

    def get(name: str) -> Any:
        if name in homes:
            value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
            setattr(module, name, value)
            return value
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    class Package(ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            if not (name in homes and isinstance(value, ModuleType)):  # an imported module, which Python puts here
                super().__setattr__(name, value)

    module.__class__ = Package
    return get, lambda: names, names
