"""Secrets stay out of what is written and said: the one place that knows what they look like, used by every writer.

Hidden are, as `***`: what URLs say before the host (`https://TOKEN@host`, `s3://user:password@host`, also with a slash
or an @ in the password), parameters of URLs and values of keys with a secret name (`?token=…`, `;jwt=…`,
`aws_secret_access_key: …`, `X-Auth-Pin: …`), tokens that are known by how they begin (`ghp_…`, `hf_…`, `sk-…`,
`AKIA…`, `eyJ…`), and the values of environment variables with a secret name. Where a text can be read in two ways,
more is hidden rather than less: `https://host:80/a@b` may be a password with a slash.
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
SHORTEST = 6  # characters; shorter values of environment variables ("1", "true") are no secrets

_MERGED = r"(?:https?|s3a?|gcs|gs|s?ftp|ssh|abfss?|az|oss|r2|hf|hdfs|wss?|git|webdav):/"  # by Path, from two slashes
_SCHEME = rf"(\b(?:[a-z][\w+.-]{{0,20}}://|{_MERGED}(?!/)))"
_PASSWORD = re.compile(_SCHEME + r'[^\s/@:"<>]*:[^\s"<>]*@', re.I)  # up to the last @
_BEFORE_HOST = re.compile(_SCHEME + r'[^\s/?#"<>]*@', re.I)
_NO_SCHEME = re.compile(r'(?<![\w/.+-])[\w.+-]{1,64}:[^\s:@/="<>]{1,200}@(?=[\w-]+\.\w)')  # me:password@host.org

_NAME = (  # of a key; with what may stand before it
    r"(?:[\w.-]{0,60}[._-])?(?:password|passwd|passphrase|secret\w{0,30}|credentials?|connection_string|pat|jwt|pin"
    r"|(?:api|access|account|private|signing|encryption|auth)[_-]?key|aws_\w{0,30}(?:key|token)\w{0,10}"
    r"|(?:access|auth|session|security|refresh|bearer|sas|api|hf|hub|wandb|github|gitlab|slack|bot|id)[_-]?token)"
    r"|(?-i:(?:[A-Z][A-Z0-9_]{0,60}_)?(?:KEY|TOKEN))"  # as variables of the environment are written
)
_IN_QUERY = r"key|token|secret|signature|sig|password|passwd|credential"
_QUERY_NAME = (
    rf"(?:[^=&\s\"<>]{{0,40}}?(?:{_IN_QUERY})[^=&\s\"<>]{{0,40}}|(?:[\w.-]{{0,40}}[._-])?(?:pat|jwt|pin|auth))"
)
_QUERY = re.compile(rf'([?&#;]{_QUERY_NAME}=)[^&\s"<>]+', re.I)
_QUOTED = r"""(?P<quote>\\{0,7}["'])(?:(?!(?P=quote))(?:\\.|[^\n]))*(?P=quote)"""
_VALUE = rf"""(?:{_QUOTED}|(?!null\b|none\b|true\b|false\b)[^\s"'\\&,;{{}}\[\]<>()]+)"""
_NAMED = re.compile(rf"""(?<![\w.-])(?P<key>(?:{_NAME})\\{{0,7}}["']?\s?[=:]\s?){_VALUE}""", re.I)
_BARE = r"""(?:^|[{,]|\\n)\s*(?:-\s)?\\{0,7}["']?token\\{0,7}["']?\s?[=:]\s?"""  # where only a key can stand
_TOKEN = re.compile(rf"(?P<key>{_BARE}){_VALUE}", re.I | re.M)
_HEADER = re.compile(r"\b(authorization[\"']?\s?[:=]\s?[\"']?(?:\w+\s)?|bearer\s)[\w.~+/=-]{8,}", re.I)
_HINT = re.compile(
    r"passw|passphrase|secret|credential|connection_string|token|sig|auth|bearer|[_-]?key\\*[\"']?\s?[=:]|aws_"
    r"|(?:pat|jwt|pin)\\*[\"']?\s?[=:]",
    re.I,
)  # most texts have none of these, and pages are long
_KNOWN = re.compile(  # not in the middle of a word, a path or base64
    r"(?<![\w+/=.-])(?:gh[oprsu]_\w{12,}|github_pat_\w{12,}|glpat-[\w-]{12,}|hf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{12,}"
    r"|sk[-_](?=[\w-]*\d)[\w-]{12,}|A[KS]IA[A-Z0-9]{12,}|xox[a-z]-[\w-]{8,}|AIza[\w-]{30,}|eyJ[\w-]{8,}[\w.-]*)"
)
_KEY = re.compile(rf"{_NAME}|(?:[\w-]+\.)*token", re.I)
_VARIABLE = re.compile(r"KEY(?!BOARD|MAP)|TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|(?:^|_)(?:PAT|JWT|PIN)(?:_|$)", re.I)


def redact(value: Any) -> Any:
    """The same text, or the same mappings and lists, with every secret hidden, and whatever a key calls secret."""
    return _redact(value, _from_environment())


class RedactedStream:
    """A stream that hides secrets in what is written to it; otherwise the stream itself."""

    def __init__(self, stream: Any) -> None:
        self._stream = io.StringIO() if stream is None else stream  # None: closed by the shell

    def write(self, text: str) -> int:
        """Write the text without its secrets."""
        self._stream.write(redact(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _from_environment() -> list[str]:
    """Values of environment variables whose names say that they are secret, as files may spell them, longest first."""
    secrets: set[str] = set()
    for name, text in os.environ.items():
        is_number = text.isdecimal() and len(text) < 8  # as are many figures
        if _VARIABLE.search(name) and len(text) >= SHORTEST and not is_number and not os.path.exists(text):  # noqa: PTH110
            secrets |= {text, json.dumps(text)[1:-1], html.escape(text), quote(text, safe="")}
    return sorted(secrets, key=len, reverse=True)


def _redact(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, dict):
        return {_redact(key, secrets): _redact_item(key, item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redact(item, secrets) for item in value]
    if isinstance(value, str):
        return _redact_text(value, secrets)
    return value


def _redact_item(key: Any, item: Any, secrets: list[str]) -> Any:
    is_value = isinstance(item, str | int) and not isinstance(item, bool)
    return HIDDEN if is_value and isinstance(key, str) and _KEY.fullmatch(key) else _redact(item, secrets)


def _redact_text(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    if "@" in text:
        text = _PASSWORD.sub(rf"\1{HIDDEN}@", text)
        text = _BEFORE_HOST.sub(rf"\1{HIDDEN}@", text)
        text = _NO_SCHEME.sub(f"{HIDDEN}@", text)
    if _HINT.search(text):
        text = _HEADER.sub(rf"\1{HIDDEN}", text)
        text = _QUERY.sub(rf"\1{HIDDEN}", text)
        text = _NAMED.sub(_hide_value, text)
        text = _TOKEN.sub(_hide_value, text)
    return _KNOWN.sub(HIDDEN, text)


def _hide_value(match: re.Match[str]) -> str:
    """`key: "value"` as `key: "***"`, in its own quotes."""
    quotes = match["quote"] or ""
    return f"{match['key']}{quotes}{HIDDEN}{quotes}"
