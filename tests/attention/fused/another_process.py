"""Python in a process of its own, where modules can be chosen before anything is imported."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def start(*arguments, **environment):
    """What became of `python arguments…`, run in the project's folder."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def answer_of(*arguments, **environment):
    """What it printed; that it went well is asserted."""
    done = start(*arguments, **environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout
