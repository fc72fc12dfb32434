"""The files around the code say the same as the code: versions, commands, papers."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import vitruvius

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text(encoding="utf-8"))
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
PAPERS = {"2406.13762", "2505.07908", "2210.09573", "2404.01139", "2209.07399"}
CHECKS = ["ruff format --check", "ruff check", "mypy", "lint-imports", "pytest"]  # in this order


def test_ci_checks_every_python_that_the_package_names() -> None:
    named = [line.rsplit(" ", 1)[1] for line in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", line)]
    job = WORKFLOW["jobs"]["check"]
    assert job["strategy"]["matrix"]["python"] == named
    assert any(step.get("run", "").startswith("make check") for step in job["steps"])


def test_every_step_of_ci_is_a_target_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    steps = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    assert [step.split()[:2] for step in steps] == [["make", "check"], ["make", "test-long"], ["make", "docs"]]
    assert {step.split()[1] for step in steps} <= targets


def test_check_is_format_lint_types_layers_tests() -> None:
    done = subprocess.run(["make", "-n", "check"], cwd=ROOT, capture_output=True, text=True, check=True)
    places = [done.stdout.index(f".venv/bin/{check}") for check in CHECKS]
    assert places == sorted(places)


def test_the_promised_ci_command_runs_the_tests() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


def test_the_citation_names_this_version_and_the_five_papers() -> None:
    assert CITATION["version"] == vitruvius.__version__
    assert {reference["url"].rsplit("/", 1)[1] for reference in CITATION["references"]} == PAPERS
    for reference in CITATION["references"]:
        assert reference["repository-code"].startswith("https://github.com/")
        assert all(author["family-names"] and author["given-names"] for author in reference["authors"])


def test_pre_commit_uses_the_tools_of_check() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    tools = {hook["entry"].removeprefix(".venv/bin/").split()[0] for hook in hooks}
    assert tools == {"ruff", "mypy", "lint-imports"}


@pytest.mark.parametrize("name", ["config.yml", "fault.yml", "number.yml", "wanted.yml"])
def test_issue_templates_are_yaml_with_fields_that_have_names(name: str) -> None:
    template = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / name).read_text(encoding="utf-8"))
    fields = template.get("body", [])
    assert len({field["id"] for field in fields}) == len(fields)


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == vitruvius.__version__
