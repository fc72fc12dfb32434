import csv
import io
import json

import pytest
import torch

from vitruvius._errors import RunError
from vitruvius.analysis.table import Curve, Row, Table


def row(site="blocks.0.attn", head=0, statistic="max", mean=0.5, **changes):
    told = {"std": 0.1, "n": 9, "null": "gaussian", "null_mean": 0.3, "null_std": 0.1, "null_n": 8, "effect": 2.0}
    own = {"site": site, "head": head, "analysis": "eigenvalues", "statistic": statistic, "mean": mean}
    return Row(**{**own, **told, "claim": "above chance by 0.2", **changes})


def small_table():
    rows = [row(site=f"blocks.{i}.attn", head=h, mean=0.5 + i + h / 10) for i in range(2) for h in range(2)]
    rows += [row(head=None, site="model", statistic="all", std=None, effect=None, null=None, null_mean=None, claim="")]
    spectrum = torch.arange(6.0).view(2, 3)
    place = {"site": "blocks.0.attn", "analysis": "eigenvalues", "statistic": "spectrum", "null": ""}
    curve = Curve(**place, mean=spectrum, std=spectrum)
    return Table(rows=rows, curves=[curve], facts={"model": "tiny", "images": 9, "seed": 0}, remarks=["something"])


def test_a_table_comes_back_from_its_folder_as_it_was(tmp_path):
    table = small_table()
    table.save(tmp_path / "analysis")
    again = Table.load(tmp_path / "analysis")
    assert again == table
    torch.testing.assert_close(again.curves[0].mean, table.curves[0].mean)
    assert again.curves[0].statistic == "spectrum"
    assert not list((tmp_path / "analysis").glob(".*"))  # nothing half written


def test_the_csv_file_holds_every_row_under_the_promised_columns():
    found = list(csv.DictReader(io.StringIO(small_table().to_csv())))
    promised = ["site", "head", "analysis", "statistic", "mean", "std", "n", "null_mean", "null_std", "effect", "claim"]
    assert set(promised) <= set(found[0])
    assert len(found) == 5
    assert found[-1]["head"] == found[-1]["std"] == ""
    assert float(found[1]["mean"]) == 0.6


def test_numbers_that_are_not_finite_never_reach_a_file():
    table = Table(rows=[row(mean=float("nan"))])
    with pytest.raises(ValueError, match="not JSON compliant"):
        table.to_json()


def test_damaged_and_missing_tables_are_explained(tmp_path):
    with pytest.raises(RunError, match="no such file"):
        Table.load(tmp_path)
    for damage in ('{"rows": [[1]]}', "{"):
        (tmp_path / "table.json").write_text(damage)
        with pytest.raises(RunError, match="not a table of an analysis"):
            Table.load(tmp_path)


def test_a_table_prints_layers_chance_and_how_many_heads_lie_beyond_it():
    text = str(small_table())
    assert "model tiny · images 9 · seed 0" in text
    line = next(line for line in text.splitlines() if line.startswith("blocks.1.attn"))
    assert "1.550 (0.300)" in line
    assert text.splitlines()[1].startswith("means over heads and images; in brackets the nearest chance")
    assert "4 of 4" in next(line for line in text.splitlines() if line.startswith("beyond chance"))
    assert text.endswith("note: something")
    assert [r.head for r in small_table().select(site="blocks.1.attn")] == [0, 1]
    assert small_table().names("site") == ["blocks.0.attn", "blocks.1.attn", "model"]


def test_a_head_lies_beyond_chance_only_if_every_null_that_can_tell_agrees():
    def count(*claims):
        nulls = ("gaussian", "spectrum", "permuted")
        table = Table(rows=[row(null=null, claim=claim) for null, claim in zip(nulls, claims, strict=False)])
        return next(line for line in str(table).splitlines() if line.startswith("beyond")).split("chance")[1]

    assert "1 of 1" in count("above chance by 1", "above chance by 2")
    assert "0 of 1" in count("above chance by 1", "below chance by 2")
    assert "0 of 1" in count("above chance by 1", "indistinguishable from chance")
    assert "1 of 1" in count("above chance by 1", "the same by construction")
    assert "no null tells" in count("the same by construction", "the same by construction")


def test_the_nearest_null_that_can_tell_is_shown():
    rows = [row(null="gaussian", null_mean=0.1), row(null="spectrum", null_mean=0.4)]
    rows.append(row(null="permuted", null_mean=0.5, claim="the same by construction"))
    assert "0.500 (0.400)" in str(Table(rows=rows))


def test_tiny_numbers_are_printed_in_scientific_notation():
    text = str(Table(rows=[row(mean=3.16e-7, null_mean=1.5e-9)]))
    assert "3.16e-07 (1.5e-09)" in text
    assert json.loads(Table(rows=[row(mean=3.16e-7)]).to_json())["rows"][0][4] == 3.16e-7
