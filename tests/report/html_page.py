"""A page taken apart by Python's own HTML parser."""

from __future__ import annotations

import base64
import csv
import io
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

VOID = {"meta", "link", "img", "br", "input", "hr"}


class Page(HTMLParser):
    """Tags with their attributes, texts, and every nesting error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: dict[str, str] = {}  # section id → its text
        self.errors: list[str] = []
        self._open: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        self.errors += [f"<{tag}> is never closed" for tag, _ in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append((tag, found))
        if tag not in VOID:
            self._open.append((tag, found.get("id", "")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1][0] == tag:
            self._open.pop()
        else:
            self.errors.append(f"</{tag}> closes nothing at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        for tag, name in self._open:
            if tag == "section":
                self.text[name] = self.text.get(name, "") + data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def downloads(self) -> dict[str, list[dict[str, str]]]:
        """File name → rows of every CSV link."""
        links = [a for a in self.all("a") if "download" in a]
        return {a["download"]: list(csv.DictReader(io.StringIO(decode(a["href"])))) for a in links}


def decode(address: str) -> str:
    """The text inside a `data:` address."""
    head, _, body = address.partition(",")
    assert head.startswith("data:text/csv"), head
    return base64.b64decode(body).decode() if head.endswith(";base64") else unquote(body)


def read_page(path: Path) -> Page:
    return Page(path.read_text("utf-8"))
