"""What is chosen for speed alone: precisions, fused optimisers, generators seeded without detours."""

import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from small_run import RECIPE, SMALL, assert_same_run, small_run, small_session, stopped_run
from vitruvius._random import seed_batch
from vitruvius._yaml import read_yaml
from vitruvius.attention.base import Core
from vitruvius.training import session as sessions
from vitruvius.training.session import can_fuse, fused_setting

ON_A_GPU: Any = SimpleNamespace(parameters=lambda: [SimpleNamespace(is_cuda=True)])


@pytest.mark.parametrize(
    ("name", "settings", "fused"),
    [
        *((name, {}, True) for name in ("adamw", "adam", "sgd", "momentum")),
        *((name, {}, False) for name in ("lamb", "nadamw", "radam", "no such optimiser")),
        ("adamw", {"fused": False}, False),  # what the recipe asks for is left alone
        ("adamw", {"foreach": True}, False),
    ],
)
@pytest.mark.parametrize("model", [ON_A_GPU, nn.Linear(2, 2)], ids=["gpu", "cpu"])
def test_pytorchs_own_optimisers_are_fused(name: str, settings: dict[str, bool], fused: bool, model: Any) -> None:
    assert fused_setting(name, settings, model) == ({"fused": True} if fused else {})
    assert fused_setting(name, settings, nn.Linear(2, 2, device="meta")) == {}


def test_weights_that_are_split_over_processes_are_fused_by_adam_alone() -> None:
    assert can_fuse(torch.optim.SGD, sharded=False)
    assert not can_fuse(torch.optim.SGD, sharded=True)  # the fused kernel of SGD knows no DTensor
    assert can_fuse(torch.optim.AdamW, sharded=True)
    assert not can_fuse(torch.optim.LBFGS, sharded=False)


def test_random_numbers_are_those_of_manual_seed_and_differ_from_batch_to_batch() -> None:
    drawn = []
    for batch in (0, 1, 0):
        seed_batch(seed=3, epoch=1, batch=batch, rank=0, device=torch.device("cpu"))
        drawn.append((float(torch.rand(())), random.random(), float(np.random.rand())))  # noqa: NPY002
    assert drawn[0] == drawn[2]
    assert all(a != b for a, b in zip(drawn[0], drawn[1], strict=True))
    mixed = np.random.SeedSequence([3, 1, 0, 0]).generate_state(4)
    torch.manual_seed((int(mixed[0]) << 31) ^ int(mixed[1]))
    assert float(torch.rand(())) == drawn[0][0]


def test_training_on_a_cpu_imports_no_compiler(tmp_path: Path) -> None:
    words = [*SMALL, "train.epochs=1", f"out={tmp_path / 'run'}"]
    program = f"import sys; from vitruvius.training import train; train({str(RECIPE)!r}, {words!r}, quiet=True)"
    program += "; assert not {'torch._inductor.cudagraph_trees', 'torch._inductor.compile_fx'} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


AUTO = "train.precision=auto"


@pytest.mark.parametrize(
    ("able", "faster", "expected"), [(True, 3.0, "bf16"), (True, 0.5, "fp32"), (False, 3.0, "fp32")]
)
def test_a_cpu_trains_in_bfloat16_where_a_timed_gradient_says_that_it_pays(
    able: bool, faster: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"now": 0.0}

    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        clock["now"] += 1 / faster if torch.is_autocast_enabled("cpu") else 1.0
        return original(self, x)

    original = sessions.PixelModel.forward
    monkeypatch.setattr(sessions.PixelModel, "forward", forward)
    monkeypatch.setattr(sessions, "multiplies_bfloat16", lambda: able)
    monkeypatch.setattr(sessions.time, "perf_counter", lambda: clock["now"])
    session = small_session(AUTO)
    assert session.config.train.precision == expected
    with session.autocast():
        assert torch.is_autocast_enabled("cpu") == (expected == "bf16")
    through_sockets = any(isinstance(module, Core) for module in session.model.modules())
    assert through_sockets == (expected == "bf16")  # which computes by products there
    assert session.model.state_dict().keys() == small_session("train.precision=fp32").model.state_dict().keys()


def test_timing_leaves_no_trace_in_the_weights_the_random_numbers_and_the_run(tmp_path: Path) -> None:
    run = small_run(tmp_path / "auto", AUTO)
    precision = read_yaml(run / "config.yaml")["train"]["precision"]
    assert_same_run(run, small_run(tmp_path / "named", f"train.precision={precision}"))


def test_a_run_resumes_in_the_precision_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(sessions, "bfloat16_pays", lambda *_: True)
    stopped_run(monkeypatch, tmp_path / "run", 7, AUTO)
    monkeypatch.setattr(sessions, "bfloat16_pays", lambda *_: False)
    assert_same_run(small_run(tmp_path / "run", AUTO), small_run(tmp_path / "whole", "train.precision=bf16"))
