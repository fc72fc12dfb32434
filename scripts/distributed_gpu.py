"""Training under torchrun on one GPU: NCCL with DDP and with FSDP2, a kill, and batch norms of two ranks that share it.

    python scripts/distributed_gpu.py [--device cuda|cpu] [--results distributed.jsonl] [--processes 6] [--only NAME …]

Every check starts `torchrun … -m vitruvius train` as a user would, in a folder of its own, and compares what the runs
have left: weights, optimiser, rows. NCCL takes one process per GPU, so its group is of one; two ranks that share a GPU
talk by gloo. With `--device cpu` everything is gloo. One line per check, passed or failed with its seconds and what was
seen, and with `--results` one JSON object per line; the exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
LIMIT = 240.0  # seconds for one command; a group that waits for ever is a failure, not a wait
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node"]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "NVIDIA_TF32_OVERRIDE": "0",  # one process and two are compared to 1e-6
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
EPOCHS = 4
VIT = (  # with everything that has a memory; AdamW would blow rounding up where a gradient is 0, as at biases of keys
    "train.opt=sgd",
    "train.lr=0.01",
    f"train.epochs={EPOCHS}",
    "train.warmup_epochs=1",
    "train.model_ema=true",
    "train.save_every=5",
    "train.compile=false",
    "data.train_num_samples=1024",
    "data.val_num_samples=256",
    "data.mixup=0.2",
)
CONVOLUTIONS = (  # a small ResNet with batch norms; six updates, at a rate that does not blow up rounding
    "model.name=test_resnet",
    "data.image_size=16",
    "data.train_num_samples=96",
    "data.val_num_samples=64",
    "train.holdout=0",
    "train.opt=sgd",
    "train.lr=0.001",
    "train.epochs=1",
    "train.warmup_epochs=0",
    "train.compile=false",
)
STEADY = "steady_algorithms"  # a plug-in that the script writes
TIMES = ("seconds", "images_per_second", "elapsed")  # what no two runs share


class CheckFailed(Exception):
    """What was expected and did not come."""


@dataclass(frozen=True)
class Result:
    """What became of one check."""

    name: str
    passed: bool
    seconds: float
    seen: str
    device: str


def main() -> None:
    options = read_options()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="distributed_") as folder:
        runs = Runs(Path(folder), options.device)
        with ThreadPoolExecutor(options.processes) as pool:
            pending = [pool.submit(judge, name, runs) for name in options.only or CHECKS]
            results = [tell(done.result(), options.results) for done in as_completed(pending)]
    failed = sum(not result.passed for result in results)
    print(f"{len(results) - failed} passed, {failed} failed in {time.monotonic() - began:.1f} s")
    sys.exit(failed > 0)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--results", type=Path, help="file to which one JSON object per check is added")
    parser.add_argument("--processes", type=int, default=max(1, min(6, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), help="these checks alone")
    return parser.parse_args()


class Runs:
    """Commands of vitruvius in one folder on one device, under torchrun or alone."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.device = device
        self.locks: defaultdict[str, Lock] = defaultdict(Lock)
        text = "import torch\n\ntorch.use_deterministic_algorithms(True, warn_only=True)\n"
        (folder / f"{STEADY}.py").write_text(text)

    def train(self, name: str, *overrides: str, ranks: int, parallel: str = "ddp") -> Path:
        """`vitruvius train digits/softmax …`, under torchrun or, with no ranks, alone; the run folder."""
        self.finish(self.begin_training(name, *overrides, ranks=ranks, parallel=parallel), name)
        return self.folder / name

    def begin_training(self, name: str, *overrides: str, ranks: int, parallel: str) -> subprocess.Popen[bytes]:
        settings = [f"out={self.folder / name}", f"train.device={self.device}", f"train.parallel={parallel}"]
        return self.begin(name, ["train", "digits/softmax", *settings, *overrides], ranks)

    def begin(self, name: str, words: list[str], ranks: int) -> subprocess.Popen[bytes]:
        launcher: list[str] = []
        if ranks:
            launcher = [*TORCHRUN, str(ranks)]
        command = [sys.executable, *launcher, "-m", "vitruvius", *words]
        with self.log(name).open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT}, cwd=self.folder)

    def finish(self, process: subprocess.Popen[bytes], name: str) -> None:
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            kill_family(process.pid)
            raise CheckFailed(f"{name} has not ended after {LIMIT:.0f} s: {self.end_of(name)}") from None
        if process.returncode:
            raise CheckFailed(f"{name} ended with {process.returncode}: {self.end_of(name)}")

    def judge(self, run: Path) -> dict[str, float]:
        """Accuracy and loss of a run's file by `vitruvius evaluate` with two ranks, as in training."""
        out = run / "evaluation"
        words = ["evaluate", str(run), "--out", str(out), "data.batch_size=8", f"device={self.device}"]
        name = f"{run.name}_judged"
        self.finish(self.begin(name, words, 2), name)
        scores: list[dict[str, Any]] = json.loads((out / "report.json").read_text())["threats"]
        return {"accuracy": scores[0]["accuracy"], "loss": scores[0]["loss"]}

    def train_and_kill(self, name: str, *overrides: str, parallel: str) -> tuple[Path, int]:
        """Train with one rank, kill it at its first state, train again; the folder, and the update of that state."""
        run = self.folder / name
        process = self.begin_training(name, *overrides, ranks=1, parallel=parallel)
        while not (run / "state.pt").exists() and process.poll() is None:
            time.sleep(0.005)
        kill_family(process.pid)
        process.wait()
        if not (run / "state.pt").exists():
            raise CheckFailed(f"{name} ended before its first state: {self.end_of(name)}")
        update = int(load_state(run)["updates"])
        if (run / "metrics.jsonl").exists() and len(rows_of(run)) == EPOCHS:
            raise CheckFailed(f"{name} had ended before it was killed")
        self.train(name, *overrides, ranks=1, parallel=parallel)
        self.require_group(name, "going on at epoch")
        return run, update

    def undisturbed(self, parallel: str) -> Path:
        """The run of one rank that others are compared with; trained by the first who asks."""
        with self.locks[parallel]:
            if not (self.folder / parallel / "metrics.jsonl").exists():
                self.train(parallel, *VIT, ranks=1, parallel=parallel)
        return self.folder / parallel

    def require_group(self, name: str, group: str) -> str:
        """The words with which the run has said how its processes are joined."""
        if group not in self.log(name).read_text(errors="replace"):
            raise CheckFailed(f"{name} does not say {group!r}: {self.end_of(name)}")
        return group

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def end_of(self, name: str) -> str:
        """What the command said last, without what torchrun adds when a rank has failed."""
        said = re.split(r"\nE\d{4} .*torch/distributed/elastic", self.log(name).read_text(errors="replace"))[0]
        return said[-2000:]

    @property
    def backend(self) -> str:
        """Of a group with a device for each of its processes."""
        if self.device == "cuda":
            return "nccl"
        return "gloo"


def check_ddp(runs: Runs) -> str:
    """One rank under torchrun with DDP trains as one process without."""
    run = runs.undisturbed("ddp")
    group = runs.require_group("ddp", f"ddp in a group of 1 by {runs.backend}")
    alone = runs.train("alone", *VIT, ranks=0)
    return f"{group}; {require_close(run, alone, 1e-6)}"


def check_fsdp(runs: Runs) -> str:
    """One rank under torchrun with FSDP2 trains as one with DDP."""
    run = runs.undisturbed("fsdp")
    group = runs.require_group("fsdp", f"fsdp in a group of 1 by {runs.backend}")
    return f"{group}; {require_close(run, runs.undisturbed('ddp'), 1e-5)}"


def check_resume(runs: Runs, parallel: str) -> str:
    """A run killed with SIGKILL in the middle of an epoch and started again ends as one that was never disturbed.

    Where two undisturbed runs differ as well, since the device's kernels add up in any order, PyTorch's deterministic
    algorithms are switched on and all is done again.
    """
    undisturbed = runs.undisturbed(parallel)
    killed, update = runs.train_and_kill(f"{parallel}_killed", *VIT, parallel=parallel)
    seen = f"{parallel} by {runs.backend}, killed after update {update} of {load_state(undisturbed)['updates']}"
    apart = first_difference(killed, undisturbed)
    if not apart:
        return f"{seen}; equal in every bit"
    if not first_difference(runs.train(f"{parallel}_again", *VIT, ranks=1, parallel=parallel), undisturbed):
        raise CheckFailed(f"{seen}; {apart}")
    steady = (*VIT, f"plugins=[{STEADY}]")
    undisturbed = runs.train(f"{parallel}_steady", *steady, ranks=1, parallel=parallel)
    killed, update = runs.train_and_kill(f"{parallel}_steady_killed", *steady, parallel=parallel)
    if apart := first_difference(killed, undisturbed):
        raise CheckFailed(f"{seen}; with deterministic algorithms {apart}")
    return f"{seen}; equal in every bit with deterministic algorithms (without, undisturbed runs differ too)"


def check_batch_norms(runs: Runs, *, synchronised: bool) -> str:
    """Two ranks and a model with batch norms: what is logged is what is saved; synchronised, it is one process's."""
    name = "dist_bn"
    setting = "train.dist_bn=reduce"
    if synchronised:
        name = "sync_bn"
        setting = "train.sync_bn=true"
    run = runs.train(name, *CONVOLUTIONS, "data.batch_size=8", setting, ranks=2)
    group = runs.require_group(name, "ddp in a group of 2 by gloo")
    logged = rows_of(run)[-1]
    judged = runs.judge(run)
    if (logged["val_accuracy"], logged["val_loss"]) != (judged["accuracy"], judged["loss"]):
        raise CheckFailed(f"logged {logged['val_accuracy']} {logged['val_loss']}, saved {judged}")
    seen = f"{group}; logged = saved: accuracy {judged['accuracy']:.4f}, loss {judged['loss']:.6f}"
    if not synchronised:
        return seen
    alone = runs.train("batch_norms_alone", *CONVOLUTIONS, "data.batch_size=16", ranks=0)
    return f"{seen}; {require_close(run, alone, 1e-6)}"


CHECKS: dict[str, Callable[[Runs], str]] = {
    "ddp": check_ddp,
    "fsdp": check_fsdp,
    "resume_ddp": lambda runs: check_resume(runs, "ddp"),
    "resume_fsdp": lambda runs: check_resume(runs, "fsdp"),
    "sync_bn": lambda runs: check_batch_norms(runs, synchronised=True),
    "dist_bn": lambda runs: check_batch_norms(runs, synchronised=False),
}


def judge(name: str, runs: Runs) -> Result:
    """One check, whatever becomes of it."""
    began = time.monotonic()
    passed = True
    try:
        seen = CHECKS[name](runs)
    except Exception as error:
        passed = False
        seen = f"{type(error).__name__}: {error}"
    return Result(name, passed, round(time.monotonic() - began, 1), seen, runs.device)


def tell(result: Result, file: Path | None) -> Result:
    fate = "failed"
    if result.passed:
        fate = "passed"
    print(f"{fate}  {result.name:<12}{result.seconds:6.1f} s  {result.seen}", flush=True)
    if file is not None:
        with file.open("a") as lines:
            lines.write(json.dumps(asdict(result)) + "\n")
    return result


def kill_family(pid: int) -> None:
    """SIGKILL to a process and all its children, youngest last: torchrun cannot tidy up after itself."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found: list[int] = []
    if children.exists():
        found = [int(word) for word in children.read_text().split()]
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    for child in found:
        kill_family(child)


def load_state(run: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(run / "state.pt", weights_only=True, map_location="cpu")
    return state


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The metrics without the times."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def first_difference(run: Path, other: Path) -> str:
    """Where state or rows of two runs differ in a bit; nothing if they do not."""
    states = [load_state(run), load_state(other)]
    for state in states:
        state["rows"] = state["elapsed"] = None
    return differs(states[0], states[1], "state") or differs(rows_of(run), rows_of(other), "rows")


def differs(one: Any, other: Any, place: str) -> str:
    if isinstance(one, dict) and one.keys() == other.keys():
        found = (differs(one[key], other[key], f"{place}.{key}") for key in one)
        return next((text for text in found if text), "")
    if isinstance(one, list) and len(one) == len(other):
        found = (
            differs(left, right, f"{place}[{at}]") for at, (left, right) in enumerate(zip(one, other, strict=True))
        )
        return next((text for text in found if text), "")
    if isinstance(one, torch.Tensor):
        if torch.equal(one, other):
            return ""
        return f"{place} differs by up to {float((one.double() - other.double()).abs().max()):.3g}"
    if one == other:
        return ""
    return f"{place}: {one} and {other}"


def require_close(run: Path, other: Path, limit: float) -> str:
    """Every weight within limit · max(1, its size), and losses likewise."""
    weights = [load_state(folder)["model"] for folder in (run, other)]
    furthest = max(distance(weights[0][name], weights[1][name]) for name in weights[1])
    losses = [torch.tensor([row["train_loss"] for row in rows_of(folder)]) for folder in (run, other)]
    apart = distance(losses[0], losses[1])
    seen = f"weights within {furthest:.1e} and losses within {apart:.1e} of {other.name}"
    if not max(furthest, apart) <= limit:
        raise CheckFailed(f"{seen}; expected {limit:g}")
    return seen


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    size = other.double().abs().clamp_min(1.0)
    return float(((one.double() - other.double()).abs() / size).max())


if __name__ == "__main__":
    main()
