"""What lies in a folder, for readers and for their letters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def subfolders(folder: Path) -> list[str]:
    """Names of the folders inside, in order; none where there is no such folder."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def listed(folder: Path) -> str:
    """Some of what lies inside: folders if there are any, else files."""
    return some(subfolders(folder) or sorted(path.name for path in folder.iterdir()), 5) or "nothing"


def some(names: Sequence[str], shown: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
