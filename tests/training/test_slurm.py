"""Jobs through submitit: what is asked of Slurm, and a run that is pre-empted, queued again and ends as if unbroken."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from small_run import assert_same_run, small_config, small_run
from vitruvius._errors import ConfigError, MissingExtra, Preempted
from vitruvius._yaml import to_plain
from vitruvius.cli import main
from vitruvius.training import slurm
from vitruvius.training.slurm import Training, submit

submitit = pytest.importorskip("submitit", reason="submitit is not installed: pip install 'vitruvius[slurm]'")


class Executor:
    """Remembers what it was asked for."""

    asked: dict[str, Any]

    def __init__(self, **settings: Any) -> None:
        type(self).asked = settings

    def update_parameters(self, **settings: Any) -> None:
        self.asked.update(settings)

    def submit(self, work: Any) -> Any:
        self.asked["work"] = work
        return SimpleNamespace(job_id="17")


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> type[Executor]:
    monkeypatch.setattr(submitit, "AutoExecutor", Executor)
    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", classmethod(lambda _: 2))
    return Executor


def test_slurm_is_asked_for_one_task_a_device_and_told_to_warn(executor: type[Executor], tmp_path: Path) -> None:
    said = submit(small_config(tmp_path / "run"), "partition=gpu,nodes=2,gpus_per_node=8,timeout_min=90,qos=high")
    assert said.startswith(f"job 17: {tmp_path / 'run'}, logs in ")
    asked = executor.asked
    assert (asked["nodes"], asked["tasks_per_node"], asked["gpus_per_node"], asked["timeout_min"]) == (2, 8, 8, 90)
    assert (asked["slurm_partition"], asked["slurm_qos"], asked["slurm_signal_delay_s"]) == ("gpu", "high", 120)
    assert "slurm_account" not in asked
    assert asked["slurm_max_num_timeout"] >= 100
    assert asked["work"].recipe["seed"] == 0
    assert not (tmp_path / "run").exists()


def test_parameters_are_ones_that_submitit_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", classmethod(lambda _: 2))
    monkeypatch.setattr(submitit.AutoExecutor, "submit", lambda self, _: SimpleNamespace(job_id="1", made=self))
    spec = {"partition": "p", "account": "a", "qos": "q", "constraint": "c", "mem_gb": 64.0, "logs": str(tmp_path)}
    job, _ = slurm.launch(small_config(tmp_path / "run"), **spec)
    known = job.made._executor.parameters
    assert (known["partition"], known["account"], known["qos"], known["constraint"]) == ("p", "a", "q", "c")
    assert known["mem"] == "64GB"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("partitoin=gpu", "unknown key '--slurm.partitoin'; did you mean 'partition'"),
        ("nodes=0", "nodes and timeout_min are at least 1"),
        ("nodes", "'nodes' in .* is not of the form key=value"),
        ("nodes=two", "nodes = 'two', expected a whole number"),
    ],
)
def test_mistakes_are_explained(executor: type[Executor], tmp_path: Path, spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        submit(small_config(tmp_path / "run"), spec)


def test_a_machine_without_slurm_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", classmethod(lambda _: -1))
    with pytest.raises(ConfigError, match="there is no `sbatch` here"):
        submit(small_config(tmp_path / "run"), "partition=gpu")


def test_without_submitit_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "submitit", None)
    with pytest.raises(MissingExtra, match=r"submitit is not installed; run: pip install .*\[slurm\]'"):
        submit(small_config(tmp_path / "run"), "partition=gpu")


def test_a_warning_saves_first_and_then_puts_the_job_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Warn:
        def epoch_end(self, epoch: int, model: object) -> None:
            if epoch == 0:
                os.kill(os.getpid(), signal.SIGUSR2)

    real, requeued = slurm.train, []
    environment = SimpleNamespace(export=lambda *_, **__: SimpleNamespace(rank=1))
    monkeypatch.setattr(submitit.helpers, "TorchDistributedEnvironment", lambda: environment)
    monkeypatch.setattr(slurm, "train", lambda config, **settings: real(config, callbacks=[Warn()], **settings))
    before = signal.signal(signal.SIGUSR2, lambda number, _: requeued.append(number))
    config = small_config(tmp_path / "run", "train.epochs=3")
    try:
        job = Training(to_plain(config), patience=0.0)
        with pytest.raises(Preempted):
            job()
        assert requeued == [signal.SIGUSR2]
        monkeypatch.setattr(slurm, "train", real)
        again = job.checkpoint()
        assert again.function() == str(tmp_path / "run")
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert_same_run(tmp_path / "run", small_run(tmp_path / "unbroken", "train.epochs=3"))


IMPATIENT = """
import os, signal, threading, time
from pathlib import Path

def wait():
    while not Path("run/state.pt").exists():
        time.sleep(0.005)
    Path("asked").touch()
    os.kill(os.getpid(), signal.SIGUSR2)

if not Path("asked").exists():
    threading.Thread(target=wait, daemon=True).start()
"""


@pytest.mark.skipif("VITRUVIUS_SLOW_TESTS" not in os.environ, reason="half a minute; set VITRUVIUS_SLOW_TESTS=1")
def test_a_job_on_this_machine_is_queued_again_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    monkeypatch.chdir(tmp_path)
    config = small_config(Path("run"), "train.epochs=15", "plugins=[impatient]")
    job, logs = slurm.launch(config, cluster="local", gpus_per_node=0, timeout_min=5)
    assert Path(job.result()).name == "run"
    log = "".join(path.read_text() for path in Path(logs).glob("*_0_log.*"))
    assert "Requeued job" in log
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 15


def test_the_command_submits(executor: type[Executor], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits/softmax", f"out={tmp_path / 'run'}", "--slurm", "partition=gpu"]) == 0
    assert capsys.readouterr().out.startswith("job 17: ")
