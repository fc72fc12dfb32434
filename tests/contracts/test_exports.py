"""What `import vitruvius` offers: this list and nothing else, quickly. A change belongs into README and CHANGELOG."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import vitruvius

PUBLIC = [
    "__version__",
    "analyse",
    "average_maps",
    "create_model",
    "evaluate",
    "initialise",
    "load_model",
    "look",
    "record",
    "restore",
    "rewire",
    "survey",
    "train",
]


def test_the_public_names_are_exactly_these() -> None:
    assert vitruvius.__all__ == PUBLIC
    assert dir(vitruvius) == sorted(PUBLIC)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "__version__"])
def test_every_public_name_is_documented_and_typed(name: str) -> None:
    piece = getattr(vitruvius, name)
    assert inspect.getdoc(piece)
    signature = inspect.signature(piece)
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'vitruvius' has no attribute 'rewrite'"):
        vitruvius.rewrite  # noqa: B018


def test_importing_the_package_imports_neither_torch_nor_timm() -> None:
    code = "import sys, vitruvius; sys.exit(any(name in sys.modules for name in ('torch', 'timm', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_is_typed() -> None:
    assert (Path(vitruvius.__file__).parent / "py.typed").exists()
