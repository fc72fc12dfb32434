"""Corruptions on the fly and a published layout, by two processes that are killed: nothing is asked twice or lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crews import finish, kill, working
from judging import assert_same_rows

from shift_layouts import write_corrupted
from vitruvius._files import paths
from vitruvius.cli.evaluate import evaluate
from vitruvius.evaluation.ledger import Ledger

SETTINGS = (
    *("model.kwargs={depth: 1, embed_dim: 24, init: skip}", "device=cpu"),
    *("data.dataset=digits", "data.val_num_samples=13", "data.batch_size=2", "data.workers=0"),
)
THREATS = ("fog:severity=3", "gaussian_noise:severity=5", "contrast:severity=2")
IMAGES = 4 * 13 + 4 * 10  # three threats and clean on 13 digits, four parts of ten pictures
PLACES = (".", "shifts/folder-c")
Asked = list[tuple[str, str, int]]  # place of the ledger, threat or part, image


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four parts of ten pictures."""
    return write_corrupted(tmp_path_factory.mktemp("c"), ["fog", "snow"], [1, 4], [str(digit) for digit in range(10)])


@pytest.fixture(scope="module")
def undisturbed(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In this process, so that those forked from it find everything imported."""
    folder = tmp_path_factory.mktemp("whole") / "evaluation"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "add", Ledger.add)  # given back at the end
        work(folder, pictures)
    return folder


def work(folder: Path, pictures: Path, die: Callable[[], None] | None = None) -> None:
    """The command, which also notes what it asks the model; the one who dies is the first process."""
    note_questions(folder)
    if die is not None and os.environ.get("RANK") == "0":
        die()
    evaluate("vitruvius/vit_digits", *SETTINGS, threat=THREATS, shift=[f"folder-c:{pictures}"], out=folder)


def note_questions(folder: Path) -> None:
    add, log = Ledger.add, folder.with_suffix(".log")

    def noting(self: Ledger, threat: str, columns: Any) -> None:
        time.sleep(0.005)  # so that whoever pulls the plug is in time
        with log.open("a") as file:
            for image in columns["id"].tolist():
                file.write(json.dumps([os.path.relpath(self.folder, folder), threat, image]) + "\n")
        add(self, threat, columns)

    Ledger.add = noting  # type: ignore[method-assign]


def asked(folder: Path) -> Asked:
    log = folder.with_suffix(".log")
    lines = log.read_text().splitlines() if log.exists() else []
    return [(place, threat, image) for place, threat, image in map(json.loads, lines)]


def held(folder: Path) -> Asked:
    """What is on disk."""
    found = []
    for place in PLACES:
        ledger = Ledger(folder / place)
        ledger.read()
        found += [(place, threat, image) for threat, rows in ledger.columns.items() for image in rows["id"].tolist()]
    return found


def in_writing_the_whole() -> None:
    """Half of the one file with all rows of the shift."""
    write = paths.write_synced

    def dying(path: Path, data: bytes) -> None:
        if path.parent.name == "folder-c" and "ledger.safetensors" in path.name:
            path.write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, data)

    paths.write_synced = dying


def in_sweeping_up() -> None:
    """The one file is there, and some parts of the corruptions on the fly have gone into it."""
    unlink, gone = Path.unlink, []

    def dying(self: Path, missing_ok: bool = False) -> None:
        gone.append(unlink(self, missing_ok=missing_ok))
        if self.parent.name == "parts" and len(gone) > 5:
            os.kill(os.getpid(), signal.SIGKILL)

    Path.unlink = dying  # type: ignore[method-assign]


def interrupt(moment: tuple[str, int] | Callable[[], None], folder: Path, pictures: Path) -> None:
    """Two processes, of which the first dies by itself or both are killed after so many parts; both are gone then."""
    if isinstance(moment, tuple):
        place, parts = moment
        assert kill(2, folder / place, parts, 0.003, work, folder, pictures)
        return
    with working(2, work, folder, pictures, moment) as (first, _):
        first.join(60)
        assert first.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("moment", "fewest", "most"),
    [
        ((".", 9), 16, 52),
        (("shifts/folder-c", 5), 52 + 8, IMAGES - 1),
        (in_sweeping_up, 52, 52),
        (in_writing_the_whole, IMAGES, IMAGES),
    ],
    ids=["on the fly", "in folders", "parts half gone", "all rows half written"],
)
def test_killed_in_two_processes_nothing_is_asked_twice_or_lost(
    moment: Any, fewest: int, most: int, pictures: Path, undisturbed: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    interrupt(moment, killed, pictures)
    before = held(killed)
    assert fewest <= len(before) <= most
    assert not (killed / "shifts" / "folder-c" / "report.json").exists()
    for world_size in (2, 1):
        folder = Path(shutil.copytree(killed, tmp_path / str(world_size)))
        finish(world_size, work, folder, pictures)
        questions = asked(folder)
        assert sorted(before + questions) == sorted(held(undisturbed))  # each once: then, or now
        assert_same(folder, undisturbed)


def assert_same(folder: Path, undisturbed: Path) -> None:
    files = [{path.relative_to(one) for path in one.rglob("*")} for one in (folder, undisturbed)]
    assert files[0] == files[1]  # neither parts nor halves of files are left
    for place in PLACES:
        assert_same_rows(folder / place, undisturbed / place, atol=1e-5)
    for report in ("shifts/folder-c/report.json", "shifts/corruptions/report.json"):
        one, other = (json.loads((place / report).read_text()) for place in (folder, undisturbed))
        assert one["corruption"].keys() == other["corruption"].keys()
        for name, number in one["corruption"].items():
            assert number == pytest.approx(other["corruption"][name]), name
        assert one["remarks"] == other["remarks"]


def test_an_undisturbed_evaluation_asks_every_image_once(undisturbed: Path) -> None:
    assert sorted(asked(undisturbed)) == sorted(held(undisturbed))
    assert len(asked(undisturbed)) == IMAGES
