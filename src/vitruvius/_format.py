"""Numbers as people of this field write them."""

from __future__ import annotations

from typing import Any


def format_number(value: Any) -> str:
    """A number as one would write it: 4/255 if it is exactly that, 0.5, else with as many digits as it needs."""
    if isinstance(value, float) and (pixels := round(value * 255, 2)) / 255 == value:
        return min(f"{pixels:g}/255", str(value), key=len)
    return str(value)
