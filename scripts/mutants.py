"""A mutation check over the guards: each is broken on purpose, and the tests that guard it must notice.

    python scripts/mutants.py            every mutant; exit code 1 if one survives
    python scripts/mutants.py redact     those whose name holds a word

A mutant is one line of the package with one change. It lives in a copy of the source; the working tree is not touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import sklearn.datasets  # noqa: F401  (imported once, for all mutants)
import timm  # noqa: F401
import torch

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[1]
LIMIT = 240  # seconds for the tests of one mutant; one that never ends is killed too


class Mutant(NamedTuple):
    """One change: in which file, what becomes what, and the tests that should fail."""

    name: str
    file: str
    before: str
    after: str
    tests: str


MUTANTS = [
    # pickled code is never run
    Mutant("weights_only, weights", "models/weights.py", "weights_only=True", "weights_only=False",
           "tests/test_guards.py"),
    Mutant("weights_only, converters", "converters/base.py", "weights_only=True", "weights_only=False",
           "tests/test_guards.py"),
    Mutant("weights_only, states", "training/run_folder.py", "weights_only=True", "weights_only=False",
           "tests/test_guards.py"),
    Mutant("foreign plugins", "_registry.py", "if name not in sys.modules and not _is_installed(name):", "if False:",
           "tests/targets/test_foreign_plugins.py"),
    # checksums
    Mutant("checksum of states", "training/run_folder.py",
           "hashlib.sha256(body).hexdigest().encode() != data[-CHECKSUM:]", "False", "tests/test_guards.py"),
    Mutant("checksum of tensors", "_files/tensors.py", "expected != _checksum(tensors)", "False",
           "tests/test_files.py"),
    Mutant("checksum written", "_files/tensors.py", "CHECKSUM: _checksum(plain)", 'CHECKSUM: ""',
           "tests/test_files.py"),
    # states
    Mutant("previous state kept", "training/run_folder.py",
           "(self.folder / STATE).replace(self.folder / PREVIOUS)", "pass", "tests/test_guards.py"),
    Mutant("previous state read", "training/run_folder.py",
           "for file in (self.folder / STATE, self.folder / PREVIOUS):", "for file in (self.folder / STATE,):",
           "tests/test_guards.py"),
    Mutant("the newer copy", "_files/remote.py", "METRICS)) >= _epochs", "METRICS)) < _epochs",
           "tests/training/test_remote_run.py"),
    Mutant("atomic write", "_files/paths.py", "os.replace(temporary, path)", "path.write_bytes(data)",
           "tests/test_files.py"),
    Mutant("synced write", "_files/paths.py", "        os.fsync(handle)\n    finally:", "        pass\n    finally:",
           "tests/test_files.py"),
    Mutant("no bucket is made", "_files/paths.py", "if not has_buckets(filesystem):\n        filesystem.makedirs",
           "if True:\n        filesystem.makedirs", "tests/test_guards.py"),
    # redaction
    Mutant("redact text files", "_files/paths.py", "atomic_write_bytes(path, redact(text).encode",
           "atomic_write_bytes(path, text.encode", "tests/test_guards.py"),
    Mutant("redact lines", "_files/paths.py", "(redact(text).rstrip", "(text.rstrip", "tests/test_guards.py"),
    Mutant("redact headers", "_files/tensors.py", "**redact(dict(metadata or {}))", "**dict(metadata or {})",
           "tests/test_guards.py"),
    Mutant("redact answers", "cli/__init__.py", "RedactedStream(sys.stdout)", "sys.stdout", "tests/test_guards.py"),
    # clamps and balls
    Mutant("clamp of pgd", "attacks/pgd.py", "self.eps).add_(x).clamp_(*self.bounds)", "self.eps).add_(x)",
           "tests/attacks/test_pgd.py tests/attacks/test_every_attack.py"),
    Mutant("start of pgd", "attacks/pgd.py", "restart).add_(x).clamp_(*self.bounds)", "restart).add_(x)",
           "tests/attacks/test_pgd.py tests/attacks/test_every_attack.py"),
    Mutant("ball linf", "attacks/norms.py", "return delta.clamp(-eps, eps)", "return delta.clamp(-2 * eps, 2 * eps)",
           "tests/attacks/test_attack_norms.py"),
    Mutant("ball l2", "attacks/norms.py", "slack: float = 1e-12", "slack: float = -0.01",
           "tests/attacks/test_attack_norms.py"),
    Mutant("ball l1", "attacks/norms.py", "shrunk = (sizes - threshold).clamp(min=0)", "shrunk = sizes",
           "tests/attacks/test_attack_norms.py"),
    Mutant("clamp of corruptions", "corruptions/base.py", ".clamp_(0, 1)", "",
           "tests/corruptions/test_corruption_properties.py"),
    Mutant("pixels checked above", "_checks.py", "if least < low or most > high:", "if least < low:",
           "tests/test_checks.py"),
    Mutant("pixels checked for NaN", "_checks.py", "if math.isnan(least) or math.isnan(most):", "if False:",
           "tests/test_checks.py"),
    # metrics
    Mutant("calibration bins", "evaluation/metrics/calibration.py", "torch.bucketize(confidence, edges[1:-1])",
           "torch.bucketize(confidence, edges[1:-1], right=True)", "tests/test_guards.py"),
    Mutant("shifted bins", "evaluation/metrics/calibration.py", "torch.bucketize(confidence, edges[1:-1])",
           "torch.bucketize(confidence, edges[2:])", "tests/test_guards.py"),
    Mutant("other images", "evaluation/ledger.py", "if len(changed):", "if False:",
           "tests/evaluation/test_identity.py tests/evaluation/test_ledger.py"),
    # locks
    Mutant("lock of the kernel", "_files/lock.py", "            self._kernel.acquire()", "            pass",
           "tests/test_lock.py"),
    Mutant("lock of the living", "_files/lock.py", "if now != touched:", "if False:", "tests/test_lock.py"),
    Mutant("lock of the dead", "_files/lock.py", "if free and (owner is None or is_here):", "if owner is None:",
           "tests/test_lock.py"),
    Mutant("heartbeat", "_files/lock.py", "os.utime(self.file)", "pass", "tests/test_lock.py"),
    Mutant("redact refused words", "cli/__init__.py", "redirect_stderr(RedactedStream(sys.stderr))",
           "redirect_stderr(sys.stderr)", "tests/test_secrets.py"),
    Mutant("no number", "_config.py", "Strict(), Field(ge=-math.inf)]", "Strict()]", "tests/test_config.py"),
    Mutant("yaml bomb", "_yaml.py", "if total > LARGEST:", "if False:", "tests/test_bad_input.py"),
]  # fmt: skip


def main(words: list[str]) -> int:
    """Try every mutant; 1 if one survives or is no mutant any more."""
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for mutant in chosen:
            begun = time.monotonic()
            verdict = try_mutant(mutant, Path(folder) / "src")
            print(f"{verdict:<9} {mutant.name:<28} {time.monotonic() - begun:5.0f} s  {mutant.file}", flush=True)
            if verdict != "killed":
                survivors.append(mutant.name)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    if survivors:
        print("not killed:", ", ".join(survivors))
    return int(bool(survivors))


def try_mutant(mutant: Mutant, source: Path) -> str:
    """`killed` if a test fails or never ends, `SURVIVES` if all pass, `ABSENT` if the line is not there once."""
    file = source / "vitruvius" / mutant.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.before) != 1:
        return "ABSENT"
    file.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
    try:
        code = run_tests(mutant.tests.split(), source)
    finally:
        file.write_text(text, encoding="utf-8")
    if code in (1, None):
        return "killed"
    if code == 0:
        return "SURVIVES"
    return f"ERROR {code}"


def run_tests(tests: list[str], source: Path) -> int | None:
    """pytest's exit code in a forked process, which finds PyTorch imported already; None if it had to be stopped."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = _pytest(tests, source)
        finally:
            os._exit(code)  # nothing of the parent is cleaned up here
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _pytest(tests: list[str], source: Path) -> int:
    """In the child: run the tests on the changed source, silently."""
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = str(source)
    sys.path.insert(0, str(source))
    sys.dont_write_bytecode = True
    lenient = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # of plugins that timm has imported
    return int(pytest.main(["-x", "-q", "-n0", *lenient, *tests]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
