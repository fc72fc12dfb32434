"""A table as a CSV file inside a link, so that every figure carries its numbers."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Mapping, Sequence

Rows = Sequence[Mapping[str, object]]


def write_csv(rows: Rows) -> str:
    """One line a row under the names of all columns, in order of first appearance; None is an empty cell."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def csv_link(rows: Rows) -> str:
    """The same as a `data:` address."""
    return data_link("text/csv;charset=utf-8", write_csv(rows).encode())


def data_link(kind: str, content: bytes) -> str:
    """Bytes as a `data:` address."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
