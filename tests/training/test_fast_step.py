"""`train.compile: auto`: recorded and compiled steps train as plain ones do, bit for bit; a stand-in records."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from small_run import assert_same_run, small_config, small_run
from vitruvius._processes import Process
from vitruvius.tasks import Objective
from vitruvius.training import fast_step, train
from vitruvius.training.fast_step import Regions, SessionStep, StepRecorder, is_capturable, why_not_recorded

ADVERSARIAL = "task={use: adversarial, eps: 4/255, attack: 'pgd:steps=1'}"


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> list[StepRecorder]:
    """Records on the CPU: the work is done again instead of replayed."""
    made: list[StepRecorder] = []

    class Watched(StepRecorder):
        def __init__(self, step: SessionStep, _: object) -> None:
            super().__init__(step, lambda work: work)
            made.append(self)

    monkeypatch.setattr(fast_step, "why_not_recorded", lambda *_: "")
    monkeypatch.setattr(fast_step, "StepRecorder", Watched)
    monkeypatch.setattr(fast_step, "Regions", lambda model: Regions(model, backend="eager"))
    monkeypatch.setattr(fast_step, "is_capturable", lambda optimizer: False)  # in float32 a rate is another number
    return made


def assert_fast_is_plain(tmp_path: Path, *settings: str) -> None:
    plain = small_run(tmp_path / "plain", "train.compile=false", *settings)
    fast = small_run(tmp_path / "fast", *settings)
    (plain / "config.yaml").write_text((fast / "config.yaml").read_text())
    assert_same_run(plain, fast)


@pytest.mark.parametrize("how", [(), (ADVERSARIAL,), ("train.model_ema=true", "train.clip_grad=0.1", "train.opt=lamb")])
def test_recorded_training_is_plain_training(
    tmp_path: Path, recording: list[StepRecorder], how: tuple[str, ...]
) -> None:
    settings = ("train.epochs=3", "train.holdout=0", "model.kwargs={depth: 2, embed_dim: 24}", *how)
    assert_fast_is_plain(tmp_path, *settings)
    assert len(recording) == 1
    assert recording[0]._recordings


@pytest.mark.parametrize(
    "task",
    [
        "use: adversarial, attack: 'pgd:steps=1'",
        "use: adversarial, attack: 'pgd:steps=2', norm: l2, coupled: false",
        "use: trades, attack: 'pgd:steps=1'",
        "use: fast, align: 0.1",
    ],
)
def test_a_radius_that_grows_with_every_update_is_read_by_one_recording(
    tmp_path: Path, recording: list[StepRecorder], task: str
) -> None:
    grows = f"task={{{task}, eps: 8/255, schedule: {{use: linear, epochs: 2, per: update}}}}"
    settings = ("train.epochs=2", "train.holdout=0", grows)
    assert_fast_is_plain(tmp_path, *settings)
    assert len(recording[0]._recordings) == 1


def test_an_attack_that_needs_its_radius_as_a_number_is_never_frozen(
    tmp_path: Path, recording: list[StepRecorder]
) -> None:
    grows = (
        "task={use: adversarial, eps: 8/255, attack: 'apgd:steps=2', schedule: {use: linear, epochs: 2, per: update}}"
    )
    settings = ("train.epochs=2", "train.holdout=0", grows)
    assert_fast_is_plain(tmp_path, *settings)
    assert not recording[0]._recordings


def test_blocks_that_cannot_be_compiled_are_run_as_they_are(
    tmp_path: Path, recording: list[StepRecorder], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: object, inputs: object) -> object:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(fast_step, "Regions", lambda model: Regions(model, backend=broken))  # type: ignore[arg-type]
    two_blocks = "model.kwargs={depth: 2, embed_dim: 24}"
    assert_fast_is_plain(tmp_path, two_blocks)
    assert "cannot be compiled" in caplog.text


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("train.precision=fp16", "fp16"),
        ("train.nonfinite=skip", "looks at every loss"),
        ("train.grad_accum_steps=2", "not one batch"),
        ("seed=0", ""),
    ],
)
def test_what_stands_in_the_way_is_named(tmp_path: Path, setting: str, reason: str) -> None:
    config = small_config(tmp_path, setting)
    task = Objective(torch.nn.Linear(2, 2))
    said = why_not_recorded(config, Process(device=torch.device("cuda")), task)
    assert reason in said
    assert bool(said) == bool(reason)
    assert "cpu" in why_not_recorded(config, Process(device=torch.device("cpu")), task)


def test_only_pytorchs_own_fused_updates_are_recorded() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    assert is_capturable(torch.optim.AdamW([weight], fused=True))
    assert not is_capturable(torch.optim.AdamW([weight]))


def test_training_on_a_cpu_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_step, "Regions", lambda *_: pytest.fail("nothing is compiled on a CPU"))
    train(small_config(tmp_path / "run"), quiet=True)
