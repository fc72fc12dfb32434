"""Golden files: what the originals compute, as tensors, with metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"


def read_golden(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a file; numbers, lists and mappings in the metadata are JSON."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        return tensors, {key: _parsed(text) for key, text in file.metadata().items()}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
