"""The page as a file: whole, self-contained, accessible, honest about what is missing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
from fake_run import write_run
from html_page import Page, read_page

from vitruvius._errors import RunError
from vitruvius.cli import main
from vitruvius.report import write_page
from vitruvius.report.blocks import Html, Note, section, sections


def test_the_page_is_well_formed_and_small_and_no_id_occurs_twice(page: Path) -> None:
    assert page.stat().st_size < 3_000_000
    parsed = read_page(page)
    assert parsed.errors == []
    ids = Counter(attributes["id"] for _, attributes in parsed.tags if "id" in attributes)
    assert [name for name, times in ids.items() if times > 1] == []


def test_the_page_loads_nothing_from_elsewhere(page: Path) -> None:
    parsed = read_page(page)
    addresses = [value for _, attributes in parsed.tags for key, value in attributes.items() if key in ("src", "href")]
    assert [address for address in addresses if not address.startswith(("data:", "#"))] == []
    assert "http://" not in (text := page.read_text("utf-8"))
    assert "https://" not in text
    assert "@import" not in text
    policy = next(tag["content"] for tag in parsed.all("meta") if "http-equiv" in tag)
    assert "default-src 'none'" in policy


def test_every_inner_link_and_reference_has_its_target(page: Path) -> None:
    parsed = read_page(page)
    ids = {attributes["id"] for _, attributes in parsed.tags if "id" in attributes}
    used = {value[1:] for _, a in parsed.tags for key, value in a.items() if key.endswith("href") and value[:1] == "#"}
    used |= set(re.findall(r"url\(#([\w-]+)\)", page.read_text("utf-8")))
    used |= {name for _, a in parsed.tags for name in a.get("aria-labelledby", "").split()}
    assert used - ids == set()


def test_all_sections_stand_in_order_and_in_the_contents(page: Path) -> None:
    parsed = read_page(page)
    names = ["summary", "curves", "threats", "strengths", "maps", "viewer", "model", "config"]
    assert [tag["id"] for tag in parsed.all("section")] == names
    assert [a["href"] for a in parsed.all("a") if a["href"].startswith("#")][1:] == [f"#{name}" for name in names]


def test_every_figure_carries_its_numbers_as_csv(page: Path, runs: list[Path]) -> None:
    files = read_page(page).downloads()
    wanted = {"training", "threats", "threats-table", "strengths", "maps-0", "maps-1", "cost", "sites-0", "versions"}
    assert {f"{name}.csv" for name in wanted} <= set(files)
    logged = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    drawn = [row for row in files["training.csv"] if row["run"] == "plain"]
    assert [float(row["val_loss"]) for row in drawn] == [row["val_loss"] for row in logged]
    report = json.loads((runs[1] / "evaluation" / "report.json").read_text())
    listed = [row for row in files["threats.csv"] if row["run"] == "low-rank" and row["name"] != "worst case"]
    assert [(row["spec"], float(row["low"])) for row in listed] == [(t["spec"], t["low"]) for t in report["threats"]]
    assert len(files["maps-0.csv"]) == 4 * 3 * 65


def test_pictures_have_alternative_texts_and_drawings_say_what_they_show(page: Path) -> None:
    parsed = read_page(page)
    assert all("alt" in image for image in parsed.all("img"))
    drawings = [svg for svg in parsed.all("svg") if svg.get("role") == "img"]
    assert len(drawings) == 5
    assert all(any(word in svg["aria-label"] for word in ("%", "ends at", "per cent")) for svg in drawings)
    rows = [tag for _, tag in parsed.tags if tag.get("class") == "map-row"]
    assert rows[0]["aria-label"] == "Average attention maps of the 3 heads of blocks.0.attn"


def test_drawings_wear_the_colours_of_the_page_and_no_other(page: Path) -> None:
    text = page.read_text("utf-8")
    drawings = re.findall(r"<svg viewBox[^>]*role=\"img\".*?</svg>", text, flags=re.DOTALL)
    assert len(drawings) == 5
    assert all("var(--series-0)" in drawing for drawing in drawings)
    assert [colour for drawing in drawings for colour in re.findall(r"#[0-9a-f]{6}", drawing)] == []


@pytest.mark.parametrize("missing", ["metrics.jsonl", "evaluation", "model.json", "maps.safetensors", "attention.json"])
def test_what_is_missing_is_left_out_with_a_remark(run: Path, missing: str) -> None:
    remove(run / missing)
    parsed = read_page(write_page([run], run / "report.html"))
    assert parsed.errors == []
    assert f"no {missing}" in parsed.text["remarks"].replace("evaluation/report.json", "evaluation")


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_run_with_nothing_but_its_recipe_still_has_a_page(run: Path) -> None:
    for path in set(run.iterdir()) - {run / "config.yaml"}:
        remove(path)
    parsed = read_page(write_page([run], run / "report.html"))
    assert parsed.errors == []
    assert [tag["id"] for tag in parsed.all("section")] == ["summary", "model", "config", "remarks"]
    assert "Not evaluated yet." in parsed.text["summary"]


def test_names_from_outside_stay_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)<"
    run = write_run(tmp_path / evil, epochs=2, patch=2, images=1, parts=[{"use": "</script><b>$x_{", "rank": 2}])
    path = run / "evaluation" / "report.json"
    report = json.loads(path.read_text())
    report["threats"][1] |= {"spec": "</script><script>alert(2)</script>", "name": "$\\frac{<i>"}
    path.write_text(json.dumps(report))
    facts = json.loads((run / "attention.json").read_text())
    (run / "attention.json").write_text(json.dumps(facts | {"labels": ["</script><script>alert(3)"]}))
    parsed = read_page(write_page([run], tmp_path / "report.html", title="<script>alert(4)</script>"))
    assert parsed.errors == []
    assert len(parsed.all("script")) == 4  # errors, the viewer's data, page.js, viewer.js
    assert {"b", "i"} & {tag for tag, _ in parsed.tags} == set()
    assert evil in parsed.text["summary"]


def test_names_in_other_scripts_are_drawn_without_a_warning(tmp_path: Path) -> None:
    run = write_run(tmp_path / "实验 ①", epochs=2, patch=2, images=1)
    other = write_run(tmp_path / "опыт", epochs=2, patch=2, images=1)
    assert "实验 ①" in write_page([run, other], tmp_path / "report.html").read_text("utf-8")


def test_runs_of_one_name_are_told_apart(run: Path, tmp_path: Path) -> None:
    twin = shutil.copytree(run, tmp_path / "later" / "run")
    cards = read_page(write_page([run, twin, twin], tmp_path / "r.html")).text["summary"]
    assert "later/run" in cards
    assert "later/run (2)" in cards


def test_a_section_is_one_function_in_one_file(run: Path) -> None:
    @section("heat", title="Corruptions", order=45)
    def heat(runs):
        """Errors by corruption."""
        return [Note(text=f"{len(runs)} run"), Html(markup="<hr>")]

    try:
        parsed = read_page(write_page([run], run / "report.html"))
        order = [tag["id"] for tag in parsed.all("section")]
        assert order.index("strengths") < order.index("heat") < order.index("maps")
        assert "1 run" in parsed.text["heat"]
        assert ("heat", "", "Errors by corruption.") in sections.describe()
    finally:
        del sections._pieces["heat"]


def test_a_failed_page_leaves_the_former_one_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = run / "report.html"
    out.write_text("former")

    full = OSError(28, "No space left on device")
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=full))
    with pytest.raises(RunError, match="disk is full"):
        write_page([run], out)
    assert out.read_text() == "former"
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_the_parser_of_these_tests_sees_errors() -> None:
    assert Page("<p><b></p>").errors == ["</p> closes nothing at (1, 6)", "<p> is never closed", "<b> is never closed"]


def test_the_page_says_what_the_maps_of_each_part_are(tmp_path: Path) -> None:
    parts = [{"use": "scaled", "form": "alpha"}, {"use": "rpc", "iterations": 2}]
    run = write_run(tmp_path / "run", epochs=1, patch=2, images=1, parts=parts)
    page = read_page(write_page([run], tmp_path / "report.html"))
    for name in ("maps", "viewer"):
        assert "of scaled A (I − S); weights may be negative; of rpc the softmax of its last" in page.text[name]
    plain = write_run(tmp_path / "plain", epochs=1, patch=2, images=1)
    assert "last iteration" not in read_page(write_page([plain], tmp_path / "plain.html")).text["viewer"]


def test_a_page_is_not_written_into_a_folder_that_does_not_exist(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "nope" / "page.html"
    with pytest.raises(RunError, match="does not exist"):
        write_page([run], page)
    assert main(["report", str(run), "--out", str(page)]) == 1
    assert not page.parent.exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["analysis.jsonl", "cycles.json", "evaluation/shifts/c/report.json"])
def test_a_pipe_among_the_files_of_a_run_does_not_hang_the_page(run: Path, tmp_path: Path, name: str) -> None:
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(run / name)
    with contextlib.suppress(RunError):
        write_page([run], tmp_path / "page.html")


def test_a_study_whose_picture_links_to_itself_has_a_page_without_it(tmp_path: Path) -> None:
    study = tmp_path / "study"
    study.mkdir()
    (study / "study.json").write_text('{"study": "kpca"}')
    (study / "table.csv").write_text("a,b\n1,2\n")
    (study / "figure.png").symlink_to(study / "figure.png")
    page = write_page([study], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Study kpca" in page
    assert "<img" not in page
