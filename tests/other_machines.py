"""Processes that take locks, here or on a machine with another name (a UTS namespace of its own, which only root may
make: skipped visibly elsewhere). They are real processes, and die by a real SIGKILL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from vitruvius._errors import RunError
from vitruvius._files import Lock, _owners, _remote_lock, _store
_owners.BEAT = float(sys.argv[2])
_owners.LOOK = 0.02
_remote_lock.SETTLE = 0.5
print("ready", flush=True)
sys.stdin.readline()
try:
    Lock(sys.argv[1]).take()
except RunError as error:
    print("told:", error, flush=True)
else:
    print("has it", flush=True)
sys.stdin.readline()
"""


class Machine:
    """A process in a folder of its own that waits for a line, tries to take a lock, says how it went, and waits."""

    def __init__(self, path: str | Path, here: Path, *, name: str | None = None, beat: float = 0.1) -> None:
        here.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", PROGRAM, str(path), str(beat)]
        if name is not None:
            command = ["unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh", *command]
        self.process = subprocess.Popen(
            command, cwd=here, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.is_ready = False

    def waits(self) -> None:
        """Until it has begun, so that several can be told at once."""
        if not self.is_ready:
            assert self.hears() == "ready"
        self.is_ready = True

    def says(self) -> None:
        self.waits()
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def takes_it(self) -> Machine:
        self.says()
        assert self.hears() == "has it"
        return self

    def dies(self) -> None:
        self.process.kill()
        self.process.communicate()


def require_names() -> None:
    """Skip where a process cannot have another host name."""
    try:
        done = subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False)
    except OSError as error:
        pytest.skip(f"no unshare here: {error}")
    if done.returncode or os.name != "posix":
        pytest.skip(f"no other host name is allowed here: {done.stderr.decode(errors='replace').strip()}")
