"""Secrets stay out of what is written: the one place that knows what they look like, used by every writer of text.

Hidden are, as `***`: what URLs say before the host (`https://TOKEN@host`, `s3://user:password@host`, also with a slash
or an @ in the password), parameters of URLs with a secret name (`?token=…`), values of keys with a secret name
(`aws_secret_access_key: …`, `password=…`), and the values of environment variables with a secret name. Where a text can
be read in two ways, more is hidden rather than less: `https://host:80/a@b` may be a password with a slash.
"""

from __future__ import annotations

import html
import io
import json
import os
import re
from typing import Any
from urllib.parse import quote

HIDDEN = "***"
_MERGED = r"(?:https?|s3a?|gcs|gs|s?ftp|ssh|abfss?|az|oss|r2|hf|hdfs|wss?|git|webdav):/"  # by Path, from two slashes
_SCHEME = rf"(\b(?:[a-z][\w+.-]{{0,20}}://|{_MERGED}(?!/)))"
_PASSWORD = re.compile(_SCHEME + r'[^\s/@:"<>]*:[^\s"<>]*@', re.I)  # up to the last @
_BEFORE_HOST = re.compile(_SCHEME + r'[^\s/?#"<>]*@', re.I)
_NO_SCHEME = re.compile(r'(?<![\w/.+-])[\w.+-]{1,64}:[^\s:@/="<>]{1,200}@(?=[\w-]+\.\w)')  # me:password@host.org
_IN_QUERY = r"key|token|secret|signature|sig|password|passwd|credential"
_QUERY = re.compile(rf'([?&#;][^=&\s"<>]{{0,40}}?(?:{_IN_QUERY})[^=&\s"<>]{{0,40}}=)[^&\s"<>]+', re.I)
_NAMES = (
    r"(?:[\w.-]{0,60}[._-])?(?:password|passwd|passphrase|secret\w{0,30}|credentials?|connection_string"
    r"|(?:api|access|account|private)_?key|aws_\w{0,30}(?:key|token)\w{0,10}"
    r"|(?:access|auth|session|security|refresh|bearer|sas|api|hf|hub|wandb)_?token)"
)
_QUOTED = r"""(?P<quote>\\{0,7}["'])(?:(?!(?P=quote))(?:\\.|[^\n]))*(?P=quote)"""
_VALUE = rf"""(?:{_QUOTED}|(?!null\b|none\b|true\b|false\b)[^\s"'\\&,;{{}}\[\]<>()]+)"""
_NAMED = re.compile(rf"""(?<![\w.-])(?P<key>{_NAMES}\\{{0,7}}["']?\s?[=:]\s?){_VALUE}""", re.I)
_BARE = r"""(?:^|[{,]|\\n)\s*(?:-\s)?\\{0,7}["']?token\\{0,7}["']?\s?[=:]\s?"""  # where only a key can stand
_TOKEN = re.compile(rf"(?P<key>{_BARE}){_VALUE}", re.I | re.M)
_HINT = re.compile(r"passw|passphrase|secret|credential|connection_string|token|sig|key=|[a-z_-]key|aws_", re.I)
_KEY = re.compile(rf"{_NAMES}|(?:[\w-]+\.)*token", re.I)
_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.I)
_SHORTEST = 8  # letters; shorter values of such variables ("1", "true") are no secrets


def redact(value: Any) -> Any:
    """The same mappings and lists, with every secret in their texts hidden, and whatever a key calls secret."""
    return _redact(value, _from_environment())


def redact_text(text: str) -> str:
    """The same text with every secret hidden."""
    return _redact_text(text, _from_environment())


class RedactedStream:
    """A stream that hides secrets in what is written to it; otherwise the stream itself."""

    def __init__(self, stream: Any) -> None:
        self._stream = io.StringIO() if stream is None else stream  # None: closed by the shell

    def write(self, text: str) -> int:
        """Write the text without its secrets."""
        self._stream.write(redact_text(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _from_environment() -> list[str]:
    """Values of environment variables whose names say that they are secret, as files may spell them, longest first."""
    found: set[str] = set()
    for name, text in os.environ.items():
        if _VARIABLE.search(name) and len(text) >= _SHORTEST:
            found |= {text, json.dumps(text)[1:-1], html.escape(text), quote(text, safe="")}
    return sorted(found, key=len, reverse=True)


def _redact(value: Any, hidden: list[str]) -> Any:
    if isinstance(value, dict):
        return {_redact(key, hidden): _redact_item(key, item, hidden) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redact(item, hidden) for item in value]
    if isinstance(value, str):
        return _redact_text(value, hidden)
    return value


def _redact_item(key: Any, item: Any, hidden: list[str]) -> Any:
    is_value = isinstance(item, str | int) and not isinstance(item, bool)
    if is_value and isinstance(key, str) and _KEY.fullmatch(key):
        return HIDDEN
    return _redact(item, hidden)


def _redact_text(text: str, hidden: list[str]) -> str:
    for secret in hidden:
        text = text.replace(secret, HIDDEN)
    if "@" in text:
        text = _PASSWORD.sub(rf"\1{HIDDEN}@", text)
        text = _BEFORE_HOST.sub(rf"\1{HIDDEN}@", text)
        text = _NO_SCHEME.sub(f"{HIDDEN}@", text)
    if _HINT.search(text):  # most texts have none, and pages are long
        text = _QUERY.sub(rf"\1{HIDDEN}", text)
        text = _NAMED.sub(_hide_value, text)
        text = _TOKEN.sub(_hide_value, text)
    return text


def _hide_value(found: re.Match[str]) -> str:
    """`key: "value"` as `key: "***"`, in its own quotes."""
    quotes = found["quote"] or ""
    return f"{found['key']}{quotes}{HIDDEN}{quotes}"
