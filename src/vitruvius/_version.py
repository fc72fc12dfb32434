"""The version, in one place."""

import importlib
import platform

__version__ = "0.3.0"


def versions() -> dict[str, str]:
    """What this runs with."""
    installed = {name: str(importlib.import_module(name).__version__) for name in ("torch", "torchvision", "timm")}
    return {"vitruvius": __version__, "python": platform.python_version(), **installed}
