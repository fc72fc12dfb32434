"""docs/attention.md: its table is complete, and its chains can be wired."""

from pathlib import Path

import yaml
from attending import make_site, registered

from vitruvius.attention import attentions, part
from vitruvius.attention.base import build_core

PAGE = (Path(__file__).parents[2] / "docs" / "attention.md").read_text()


def table():
    rows = PAGE.split("<!-- table: scripts/attention_table.py -->")[1].split("<!-- end of table -->")[0].strip()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows.splitlines()]


def test_the_table_has_a_row_for_every_part_of_the_page_and_no_empty_cell():
    head, _, *rows = table()
    described = {
        line.split("`")[1] for line in PAGE.split("## What goes where")[0].splitlines() if line.startswith("| `")
    }
    assert {row[0].split(",")[0] for row in rows} == described
    assert described == registered() - {"sparse_softmax"}  # what `export` makes of a mask, not a variant
    assert all(len(row) == len(head) and all(row) for row in rows)


def test_every_part_says_what_its_map_is():
    assert [name for name in registered() if not attentions[name].map_text] == []


def test_where_a_variant_is_accepted_it_trains_and_compiles():
    for row in table()[2:]:
        assert all(cell == "–" or cell.startswith("t c") for cell in row[1:]), row


def test_the_recipe_of_the_page_can_be_wired(tmp_path):
    recipe = yaml.safe_load(PAGE.split("```yaml")[1].split("```")[0])
    (rule,) = recipe["attention"]
    made = []
    for item in rule["parts"]:
        settings = {key: value for key, value in item.items() if key != "use"}
        if "file" in settings:
            settings = {"keep": "all"}
        made.append(part(item["use"], **settings))
    assert build_core(made, make_site()).describe() == "low_rank → mask → rpc"
