"""Real faults: disks that are truly full or read-only, memory that truly ends, a terminal that knows ASCII alone.

A tmpfs of 16 kB and a read-only mount need the right to mount; where it is missing these tests are skipped and say so.
Simulated faults are in failing_disk.py, and their tests name them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from small_run import RECIPE, SMALL, small_run
from vitruvius.cli import main


def mounted(folder: Path, *options: str) -> None:
    """Mount a small disk in memory; skip where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError as error:
        pytest.skip(f"no mount here: {error}")
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.decode(errors='replace').strip()}")


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 kB."""
    mounted(tmp_path / "disk", "size=16k")
    yield tmp_path / "disk"
    unmount(tmp_path / "disk")


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that is mounted read-only, also for root."""
    mounted(tmp_path / "disk", "ro")
    yield tmp_path / "disk"
    unmount(tmp_path / "disk")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("runs") / "run", "train.epochs=1")


@pytest.fixture(scope="module")
def maps(run: Path) -> Path:
    file = run.parent / "maps.safetensors"
    assert main(["maps", str(run), "--images", "4", "--out", str(file)]) == 0
    return file


VERBS = {
    "train": ["train", str(RECIPE), *SMALL, "out={disk}/out", "--quiet"],
    "evaluate": ["evaluate", "{run}", "--threat", "fgsm:eps=0.1", "--out", "{disk}/out"],
    "attack": ["attack", "{run}", "--threat", "fgsm:eps=0.1", "--out", "{disk}/a.safetensors"],
    "attack pictures": ["attack", "{run}", "--threat", "fgsm:eps=0.1", "--out", "{disk}/pictures"],
    "analyse": ["analyse", "{run}", "norms", "--images", "4", "--out", "{disk}/out"],
    "maps": ["maps", "{run}", "--images", "4", "--out", "{disk}/maps.safetensors"],
    "masks": ["masks", "{maps}", "--out", "{disk}/masks.safetensors"],
    "masks npy": ["masks", "{maps}", "--out", "{disk}/masks.npy"],
    "export": ["export", "{run}", "--format", "safetensors", "--out", "{disk}/export.safetensors"],
    "corrupt": ["corrupt", "digits", "--corruptions", "contrast", "--workers", "1", "--out", "{disk}/out"],
    "report": ["report", "{run}", "--images", "0", "--out", "{disk}/page.html"],
}
FITS = ("maps", "masks", "masks npy")  # into 16 kB


def said(capsys: pytest.CaptureFixture[str], name: str, disk: Path, run: Path, maps: Path) -> str:
    """What a verb answers when its disk fails: one line."""
    words = {"{disk}": str(disk), "{run}": str(run), "{maps}": str(maps)}
    spoken = list(VERBS[name])
    for old, new in words.items():
        spoken = [word.replace(old, new) for word in spoken]
    capsys.readouterr()
    code = main(spoken)
    err = capsys.readouterr().err
    assert code == 1, err
    assert "Traceback" not in err
    return err.strip().splitlines()[-1]


@pytest.mark.parametrize("name", [name for name in VERBS if name not in FITS])
def test_a_disk_that_is_truly_full_is_one_line(
    name: str, full_disk: Path, run: Path, maps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "the disk is full" in said(capsys, name, full_disk, run, maps)
    assert not [path for path in full_disk.rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.parametrize("name", VERBS)
def test_a_disk_that_is_truly_read_only_is_one_line(
    name: str, read_only_disk: Path, run: Path, maps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no permission" in said(capsys, name, read_only_disk, run, maps)


def test_a_file_on_a_full_disk_stays_as_it_was(
    full_disk: Path, run: Path, maps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = b"what was exported before"
    (full_disk / "export.safetensors").write_bytes(before)
    said(capsys, "export", full_disk, run, maps)
    assert (full_disk / "export.safetensors").read_bytes() == before


LITTLE_MEMORY = """
import resource, sys
from vitruvius.cli import main
import torch, vitruvius.evaluation, vitruvius.request, vitruvius.data  # what is imported needs memory too
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20),) * 2)
sys.exit(main(sys.argv[1:]))
"""


def told(program: list[str], **environment: str) -> tuple[int, str]:
    """Exit code and errors of a process of its own."""
    done = subprocess.run(
        [sys.executable, *program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not say how much memory is used")
def test_memory_that_truly_ends_is_one_line(tmp_path: Path) -> None:
    words = ["evaluate", "vitruvius/vit_digits", "data.dataset=fake", "data.eval_batch_size=100000", "device=cpu"]
    words += ["data.val_num_samples=100000", "data.num_classes=10", "--out", str(tmp_path / "out")]
    code, err = told(["-c", LITTLE_MEMORY, *words])
    assert code == 1, err
    assert "Traceback" not in err
    assert "out of memory" in err.strip().splitlines()[-1]


def test_a_terminal_that_knows_ascii_alone_is_no_error() -> None:
    words = ["-m", "vitruvius", "list", "größe-ε"]
    code, err = told(words, LANG="C", LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert code == 1
    assert "Traceback" not in err
    assert "UnicodeEncodeError" not in err
    assert "gr\\xf6\\xdfe" in err or "gr\\u" in err or "größe" in err


def test_answers_that_the_locale_c_cannot_show_are_no_error() -> None:
    """A true locale: Python then lets surrogates through, and nothing else that is not ASCII."""
    locale = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code, err = told(
        ["-c", "import sys; from vitruvius.cli import main; sys.exit(main(['list', 'attentions']))"], **locale
    )
    assert code == 0, err


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize(("words", "expected"), [("list recipes", 0), ("list nope", 1), ("nope", 2)])
def test_a_closed_output_is_no_error_of_its_own(closed: str, words: str, expected: int) -> None:
    """Truly closed, by the shell."""
    done = subprocess.run(
        f"{sys.executable} -m vitruvius {words} {closed}", shell=True, capture_output=True, text=True, check=False
    )
    assert done.returncode == expected, done.stderr
    assert "Error" not in done.stderr


UNREADABLE = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]  # root is no longer above all rights


@pytest.mark.parametrize("hidden", [".", "config.yaml", "best.safetensors"])
def test_a_run_that_may_not_be_read_is_one_line(hidden: str, run: Path, tmp_path: Path) -> None:
    """True rights, for a process that has lost root's power to ignore them."""
    program = [sys.executable, "-m", "vitruvius", "evaluate", str(tmp_path / "run"), "--images", "4"]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root reads everything, and there is no setpriv to take that right away")
        program = [*UNREADABLE, *program]
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / hidden).chmod(0)
    try:
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    finally:
        (tmp_path / "run" / hidden).chmod(0o755)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "ermission" in done.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "run" / "evaluation").exists()
