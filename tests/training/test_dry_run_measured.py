"""What a dry run says of ImageNet's models, compared with a real short run: memory, passes of an attack, time.

Both are made in processes of their own, so that neither finds memory that the other has left. Memory is that of the
whole process by the kernel's account (VmHWM, reset before the first batch), time is the processor's, which other
programs on the machine do not lengthen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

PROGRAM = """
import json, sys, time
import torch
torch.set_num_threads(1)
time.perf_counter = time.process_time
from vitruvius._processes import process_group
from vitruvius.training import dry_run, session, train
from vitruvius.training.config import as_config
from vitruvius.training.loop import Trainer

def kilobytes(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

config = as_config(json.loads(sys.argv[2]))
if sys.argv[1] == "said":
    with process_group("cpu") as process:
        known = session.with_classes(config, 10)
        opened = session.open_session(dry_run.pretended(known), process, fresh=False)
        probe = dry_run.measure(opened, known.data.batch_size, [])
    weights = sum(p.nbytes for p in opened.model.parameters())
    images = config.data.batch_size
    print(json.dumps({
        "seconds": probe.seconds / probe.images * images,
        "megabytes": (weights + probe.optimizer + probe.activations * images) / 2**20,  # gradients, states, activations
        "forwards": probe.forwards,
        "backwards": probe.backwards,
    }))
else:
    real, seconds, begun = Trainer.train_batch, [], None
    def timed(*arguments):
        global begun
        if begun is None:
            open("/proc/self/clear_refs", "w").write("5")
            begun = kilobytes("VmRSS")
        before = time.process_time()
        found = real(*arguments)
        seconds.append(time.process_time() - before)
        return found
    Trainer.train_batch = timed
    train(config, quiet=True, callbacks=[])
    print(json.dumps({"seconds": min(seconds[1:]), "megabytes": (kilobytes("VmHWM") - begun) / 1024}))
"""


def recipe(folder: Path, name: str, batch: int, **more: Any) -> dict[str, Any]:
    data = {"dataset": "fake", "num_classes": 10, "image_size": 224, "batch_size": batch, "workers": 0}
    return {
        "model": {"name": name},
        "data": {**data, "train_num_samples": 3 * batch, "val_num_samples": 1, "cache": "none"},
        "train": {"epochs": 1, "device": "cpu", "compile": False, "holdout": 0, "warmup_epochs": 0},
        "out": str(folder / "run"),
        **more,
    }


def asked(what: str, recipe: dict[str, Any]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what, json.dumps(recipe)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


TRADES = {"use": "trades", "eps": 4 / 255, "attack": {"use": "pgd", "steps": 2}}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system cannot reset its peak of memory")
@pytest.mark.parametrize(
    ("name", "batch", "more", "passes"),
    [
        ("deit_tiny_patch16_224", 16, {}, (1, 1)),
        ("xcit_nano_12_p16_224", 8, {"task": TRADES}, (5, 4)),  # clean answer, two steps, clean and x' at the end
    ],
    ids=["deit", "xcit with trades"],
)
def test_a_dry_run_of_a_model_of_imagenet_tells_the_truth(
    name: str, batch: int, more: dict[str, Any], passes: tuple[int, int], tmp_path: Path
) -> None:
    said = asked("said", recipe(tmp_path, name, batch, **more))
    real = asked("real", recipe(tmp_path, name, batch, **more))
    assert (said["forwards"], said["backwards"]) == passes
    assert 0.6 < said["megabytes"] / real["megabytes"] < 1.3
    assert 1 / 1.5 < said["seconds"] / real["seconds"] < 1.5
