"""Secrets stay out of runs: passwords in URLs, signed queries, and what the environment keeps under a secret name."""

from __future__ import annotations

import os
import re
from typing import Any

HIDDEN = "***"
_PASSWORD = re.compile(r"(\w[\w+.-]*://)[^/\s@]*:[^/\s@]*@")
_QUERY = re.compile(r"([?&][^=&\s]*(?:key|token|secret|signature|sig|password|credential)[^=&\s]*=)[^&\s]+", re.I)
_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.I)
_SHORTEST = 8  # letters; shorter values of such variables ("1", "true") are no secrets


def redact(value: Any) -> Any:
    """The same value, with every secret in its texts hidden."""
    return _redact(value, secrets())


def secrets() -> list[str]:
    """Values of environment variables whose names say that they are secret, the longest first."""
    found = {text for name, text in os.environ.items() if _NAME.search(name) and len(text) >= _SHORTEST}
    return sorted(found, key=len, reverse=True)


def _redact(value: Any, hidden: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _redact(item, hidden) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redact(item, hidden) for item in value]
    if not isinstance(value, str):
        return value
    for secret in hidden:
        value = value.replace(secret, HIDDEN)
    return _QUERY.sub(rf"\1{HIDDEN}", _PASSWORD.sub(rf"\1{HIDDEN}@", value))
