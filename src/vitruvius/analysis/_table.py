"""The table of an analysis: a row for each site, head, statistic and null; curves beside it; kept as CSV and JSON."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitruvius._errors import RunError
from vitruvius._files import StrPath, atomic_write_text, exists, join, load_tensors, read_text, save_tensors
from vitruvius.analysis.text import table_text


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number beside chance. `head` is None for a statistic of the whole model, `null` where no chance was drawn."""

    site: str
    head: int | None
    analysis: str
    statistic: str
    mean: float
    std: float | None  # unbiased, over images; None for a single image
    n: int  # images
    null: str | None = None
    null_mean: float | None = None
    null_std: float | None = None
    null_n: int = 0
    effect: float | None = None  # (mean − null_mean) / pooled standard deviation
    claim: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """A statistic with one more axis: mean and deviation over images, (H, K); `null` "" is what was observed."""

    site: str
    analysis: str
    statistic: str
    null: str
    mean: Tensor
    std: Tensor


class Pictures(NamedTuple):
    """Some images and what an explanation makes of them; attacked ones beside them, if there was an attack."""

    clean: Tensor  # (B, 3, h, w) in [0, 1]
    clean_map: Tensor  # (B, rows, columns)
    attacked: Tensor | None = None  # as clean
    attacked_map: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """What an analysis found. Prints as a summary by layer; `save(folder)` and `Table.load(folder)` round-trip."""

    rows: list[Row]
    curves: list[Curve] = field(default_factory=list, compare=False)
    facts: dict[str, Any] = field(default_factory=dict)  # model, data, images, seed, …
    remarks: list[str] = field(default_factory=list)
    pictures: dict[str, Pictures] = field(default_factory=dict, compare=False)  # by explanation

    def __str__(self) -> str:
        return table_text(self.rows, self.facts, self.remarks)

    def select(self, **wanted: Any) -> list[Row]:
        """Rows whose columns have the given values: `select(site="blocks.0.attn", statistic="max")`.

        `wanted` are names of columns and the values they must have.
        """
        return [row for row in self.rows if all(getattr(row, key) == value for key, value in wanted.items())]

    def names(self, column: str) -> list[Any]:
        """The values of a `column`, each once, in order."""
        return list(dict.fromkeys(getattr(row, column) for row in self.rows))

    def save(self, folder: StrPath) -> None:
        """Write table.csv, table.json and, if there are any, curves.safetensors and explanations.safetensors."""
        atomic_write_text(join(folder, "table.csv"), self.to_csv())
        atomic_write_text(join(folder, "table.json"), self.to_json())
        if self.curves:
            save_tensors(join(folder, "curves.safetensors"), _pack(self.curves))
        if self.pictures:
            save_tensors(join(folder, "explanations.safetensors"), _pack_pictures(self.pictures))

    @classmethod
    def load(cls, folder: StrPath) -> Table:
        """What `save` wrote."""
        path = join(folder, "table.json")
        try:
            data = json.loads(read_text(path))
            rows = [Row(**dict(zip(data["columns"], row, strict=True))) for row in data["rows"]]
            curves = _unpack(_tensors_of(folder, "curves.safetensors"), rows)
            pictures = _unpack_pictures(_tensors_of(folder, "explanations.safetensors"))
            return cls(rows=rows, curves=curves, facts=data["facts"], remarks=data["remarks"], pictures=pictures)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{path} is not a table of an analysis ({error}). `vitruvius analyse` writes one."
            ) from error

    def to_csv(self) -> str:
        """One line a row; what is not known is an empty cell."""
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in self.rows)
        return buffer.getvalue()

    def to_json(self) -> str:
        """Columns and rows, with facts and remarks."""
        rows = ",\n".join(json.dumps(list(dataclasses.asdict(row).values()), allow_nan=False) for row in self.rows)
        head = {"facts": self.facts, "remarks": self.remarks, "columns": COLUMNS}
        return f'{json.dumps(head, indent=1, ensure_ascii=False)[:-2]},\n "rows": [\n{rows}\n]\n}}\n'


COLUMNS = [column.name for column in dataclasses.fields(Row)]
_PARTS = ("site", "analysis", "statistic", "null")


def _pack(curves: Iterable[Curve]) -> dict[str, Tensor]:
    """`site|analysis|statistic|null` → (2, H, K): mean and deviation."""
    return {"|".join(getattr(c, part) for part in _PARTS): torch.stack([c.mean, c.std]).float() for c in curves}


def _unpack(tensors: dict[str, Tensor], rows: Sequence[Row]) -> list[Curve]:
    """In the order of the rows' sites: the file knows none."""
    sites = {site: place for place, site in enumerate(dict.fromkeys(row.site for row in rows))}
    named = [(dict(zip(_PARTS, key.split("|"), strict=True)), pair) for key, pair in tensors.items()]
    curves = [Curve(mean=pair[0], std=pair[1], **names) for names, pair in named]
    return sorted(curves, key=lambda curve: (sites.get(curve.site, len(sites)), curve.analysis, curve.statistic))


def _tensors_of(folder: StrPath, name: str) -> dict[str, Tensor]:
    """The tensors of a file that need not be there."""
    path = join(folder, name)
    if not exists(path):
        return {}
    return load_tensors(path)[0]


def _pack_pictures(pictures: Mapping[str, Pictures]) -> dict[str, Tensor]:
    """`explanation|field` → tensor."""
    packed = {}
    for name, own in pictures.items():
        for field_name, tensor in own._asdict().items():
            if tensor is not None:
                packed[f"{name}|{field_name}"] = tensor.contiguous()
    return packed


def _unpack_pictures(tensors: Mapping[str, Tensor]) -> dict[str, Pictures]:
    fields: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, field_name = key.rpartition("|")
        fields.setdefault(name, {})[field_name] = tensor
    return {name: Pictures(**own) for name, own in fields.items()}
