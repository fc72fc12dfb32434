"""The ledger: one row an image, one group of columns a threat; written as it grows, resumed where it stopped.

Rows arrive in parts (`parts/<threat>-<rank>-<number>.safetensors`, each written atomically), so a killed
evaluation loses at most the batch it was working on, and any number of processes may go on with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from vitruvius._errors import RunError
from vitruvius._files import atomic_write_text, load_tensors, save_tensors

Columns = dict[str, Tensor]  # every column (n,), `id` among them
MEANINGS = "id, label, prediction, confidence, correct, loss, top5"


class Ledger:
    """What every image did under every threat."""

    def __init__(self, folder: str | Path | None = None, *, rank: int = 0) -> None:
        self.folder = None if folder is None else Path(folder)
        self.rank = rank
        self.columns: dict[str, Columns] = {}
        self._written = 0
        if self.folder is not None:
            self._read_parts(self.folder)

    def start(self, signature: Mapping[str, object]) -> None:
        """Note what is being evaluated; a ledger of something else is refused, never mixed."""
        if self.folder is None:
            return
        file, text = self.folder / "signature.json", json.dumps(signature, indent=1, sort_keys=True)
        if file.exists() and file.read_text() != text:
            known = json.loads(file.read_text())
            differing = sorted(k for k in {*known, *signature} if known.get(k) != signature.get(k))
            raise RunError(
                f"{self.folder} holds the ledger of another evaluation: {', '.join(differing)} differ. "
                "Choose another folder, or delete it to begin anew."
            )
        if self.rank == 0 and not file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write_text(file, text)

    def done(self, threat: str) -> Tensor:
        """Ids of the images this threat has already seen."""
        return self.columns[threat]["id"] if threat in self.columns else torch.empty(0, dtype=torch.int64)

    def add(self, threat: str, rows: Columns) -> None:
        """Rows of one batch, on the CPU; on disk before this returns."""
        rows = {name: column.detach().cpu() for name, column in rows.items()}
        self._merge(threat, rows)
        if self.folder is not None:
            name = f"{_safe(threat)}-{self.rank:05d}-{self._written:06d}.safetensors"
            save_tensors(self.folder / "parts" / name, rows, {"threat": threat, "columns": MEANINGS})
            self._written += 1

    def join(self, others: list[dict[str, Columns]]) -> None:
        """Take in the rows of other processes."""
        for columns in others:
            for threat, rows in columns.items():
                self._merge(threat, rows)

    def rows(self, threat: str) -> Columns:
        """Columns of one threat, ordered by image."""
        columns = self.columns[threat]
        order = columns["id"].argsort()
        return {name: column[order] for name, column in columns.items()}

    def save(self, path: str | Path, signature: Mapping[str, object]) -> None:
        """All rows in one file: columns named `<threat>/<column>`."""
        tensors = {
            f"{threat}/{name}": column.contiguous()
            for threat in self.columns
            for name, column in self.rows(threat).items()
        }
        save_tensors(path, tensors, {"signature": json.dumps(signature), "columns": MEANINGS})

    def _merge(self, threat: str, rows: Columns) -> None:
        known = self.columns.get(threat)
        if known is None:
            self.columns[threat] = rows
            return
        new = ~torch.isin(rows["id"], known["id"])
        self.columns[threat] = {name: torch.cat([known[name], rows[name][new]]) for name in known}

    def _read_parts(self, folder: Path) -> None:
        for file in sorted((folder / "parts").glob("*.safetensors")):
            rows, metadata = load_tensors(file)
            self._merge(metadata["threat"], rows)
            rank, number = map(int, file.stem.rsplit("-", 2)[1:])
            if rank == self.rank:
                self._written = max(self._written, number + 1)


def load_ledger(path: str | Path) -> dict[str, Columns]:
    """Columns by threat, from the one file `Ledger.save` writes."""
    columns: dict[str, Columns] = {}
    for key, tensor in load_tensors(path)[0].items():
        threat, _, name = key.rpartition("/")
        columns.setdefault(threat, {})[name] = tensor
    return columns


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.=]+", "_", name)[:80]
