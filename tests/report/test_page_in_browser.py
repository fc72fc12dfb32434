"""The page in a real browser: its scripts run, the viewer follows pointer and keys, nothing complains."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_run import write_run

from small_run import small_run
from vitruvius.cli.look import report
from vitruvius.report import write_page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--virtual-time-budget=5000", "--dump-dom"),
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium installed: the page is not tried in a browser")


def test_the_viewer_follows_pointer_and_keys_without_an_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=2, patch=2, images=2)
    page = write_page([run], tmp_path / "report.html")
    root = dump(page, tmp_path)
    assert 'data-errors="0"' in root, root
    assert 'data-selftest="passed"' in root


def test_runs_and_views_stand_side_by_side_and_follow_each_other_on_a_telephone_too(tmp_path: Path) -> None:
    runs = [small_run(tmp_path / name, f"seed={seed}") for seed, name in enumerate(("one", "other"))]
    page = report(*map(str, runs), images=2, out=tmp_path / "report.html")
    for width in (1280, 390):
        root = dump(page, tmp_path, f"--window-size={width},844")
        assert 'data-errors="0"' in root, root
        assert 'data-panes="4"' in root, "two runs, each with the clean and the attacked picture"
        assert 'data-overflow="0"' in root, f"wider than {width} pixels"
        assert 'data-selftest="passed"' in root


def test_an_error_on_the_page_would_be_seen(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=2, patch=2, images=1)
    page = write_page([run], tmp_path / "report.html")
    page.write_text(page.read_text("utf-8").replace("function settle() {", "function settle() { nobody();"), "utf-8")
    root = dump(page, tmp_path)
    assert 'data-errors="1"' in root
    assert "nobody is not defined" in root
    assert "data-selftest" not in root


def dump(page: Path, folder: Path, *flags: str) -> str:
    """The opening tag of the page after its scripts have run."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={folder / 'profile'}", f"{page.as_uri()}#selftest"]
    for _ in range(3):  # on a busy machine the browser may write the page down before its scripts have run
        done = subprocess.run(command, capture_output=True, timeout=120, check=True)
        match = re.search(r"<html[^>]*>", done.stdout.decode())
        assert match is not None, done.stderr.decode()[-2000:]
        if "data-selftest" in match[0] or 'data-errors="0"' not in match[0]:
            break
    return match[0]
