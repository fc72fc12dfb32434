"""`train.precision: auto`: bfloat16 where the device computes faster in it; a run keeps what it has begun with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from small_run import assert_same_run, small_run, small_session, stopped_run
from vitruvius._yaml import read_yaml
from vitruvius.attention.base import Core
from vitruvius.training import session as sessions

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
