"""Slurm: what is asked of it, and, against a real one on this machine (`scripts/local_slurm.sh`), what comes of it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from small_run import RECIPE, SMALL, assert_same_run, small_config, small_run, state_of
from vitruvius._errors import ConfigError
from vitruvius._yaml import dump_yaml, read_yaml
from vitruvius.cli import main
from vitruvius.training.slurm import submit_runs, submit_training

SBATCH = """\
#!/bin/sh
cp "$2" "$ASKED/$(ls "$ASKED" | wc -l).sh"
[ -z "$REFUSE" ] || { echo "sbatch: error: $REFUSE" >&2; exit 1; }
echo 17
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The scripts that an `sbatch` was given, which gives each job the number 17."""
    folder = tmp_path / "asked"
    folder.mkdir()
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(SBATCH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(folder))
    monkeypatch.delenv("REFUSE", raising=False)
    return lambda: [path.read_text() for path in sorted(folder.iterdir())]


def test_slurm_is_asked_for_one_task_a_device_and_told_to_warn(asked: Callable[[], list[str]], tmp_path: Path) -> None:
    spec = "partition=gpu,nodes=2,gpus_per_node=8,timeout_min=90,qos=high,mem_gb=64"
    said = submit_training(small_config(tmp_path / "run"), spec)
    assert said == f"job 17: {tmp_path / 'run'}, logs in {tmp_path / 'slurm'}"
    (script,) = asked()
    options = {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert {"nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "time=90", "signal=USR2@120", "requeue"} < options
    assert {"partition=gpu", "qos=high", "mem=65536M"} < options
    assert not any(option.startswith(("account", "array")) for option in options)
    recipe = tmp_path / "slurm" / "run.yaml"
    assert f"vitruvius train {recipe}" in script
    assert stat.S_IMODE(recipe.stat().st_mode) == 0o600
    assert read_yaml(recipe)["out"] == str(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("partitoin=gpu", "unknown key '--slurm.partitoin'; did you mean 'partition'"),
        ("nodes=0", "nodes = 0, expected at least 1"),
        ("tasks_per_node=0", "tasks_per_node = 0, expected at least 1"),
        ("nodes", "'nodes' in .* is not of the form key=value"),
        ("nodes=two", "nodes = 'two', expected a whole number"),
    ],
)
def test_mistakes_are_explained(asked: Callable[[], list[str]], tmp_path: Path, spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        submit_training(small_config(tmp_path / "run"), spec)
    assert not asked()
    assert not (tmp_path / "slurm").exists()


def test_a_cluster_without_gpus_is_one_sentence(
    asked: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSE", "Batch job submission failed: Invalid generic resource (gres) specification")
    with pytest.raises(ConfigError, match=r"gpus_per_node=8 asks for GPUs that partition big does not have; gpus_per_"):
        submit_training(small_config(tmp_path / "run"), "partition=big,gpus_per_node=8")


def test_a_machine_without_slurm_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no `sbatch` here"):
        submit_training(small_config(tmp_path / "run"), "partition=gpu")


def sweep_file(folder: Path, **settings: object) -> Path:
    file = folder / "sweep.yaml"
    file.write_text(dump_yaml({"recipe": str(RECIPE), "out": str(folder / "out"), **settings}))
    return file


def test_a_sweep_is_one_array_and_a_table_after_it(
    asked: Callable[[], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep_file(tmp_path, grid={"seed": [0, 1, 2]})
    assert main(["sweep", str(file), *SMALL, "--slurm", "gpus_per_node=0,at_once=2"]) == 0
    assert "job 17: 3 runs in" in capsys.readouterr().out
    array, last = asked()
    assert "#SBATCH --array=0-2%2" in array
    assert '--run "$run"' in array
    assert (tmp_path / "out" / "slurm" / "runs.txt").read_text().splitlines() == ["seed=0", "seed=1", "seed=2"]
    assert "#SBATCH --dependency=afterany:17" in last
    assert " --status" in last


def test_an_evaluation_is_submitted_with_its_flags(
    asked: Callable[[], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data.dataset=digits", "--threat", "pgd:eps=8/255,steps=2", "--images", "8", "--fresh"]
    assert main(["evaluate", str(tmp_path), *words, "--slurm", "gpus_per_node=2"]) == 0
    (script,) = asked()
    assert "data.dataset=digits --threat=pgd:eps=8/255,steps=2 --images=8 --fresh\ncode" in script
    assert "--trust-plugins" not in script
    assert main(["evaluate", str(tmp_path), "--threat", "pdg", "--slurm", "gpus_per_node=2"]) == 1
    assert len(asked()) == 1


# a real Slurm

SLOW = """
import time
from vitruvius.training.loop import Trainer

train_batch = Trainer.train_batch

def slowly(*arguments):
    time.sleep(SECONDS)
    return train_batch(*arguments)

Trainer.train_batch = slowly
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, where a Slurm answers."""
    if shutil.which("sinfo") is None or subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        pytest.skip('no Slurm answers here: eval "$(scripts/local_slurm.sh start)"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return tmp_path


def state_in_queue(job: str) -> str:
    shown = subprocess.run(["scontrol", "show", "job", job, "--oneliner"], capture_output=True, text=True, check=False)
    states = {word.partition("=")[2] for word in shown.stdout.split() if word.startswith("JobState=")}
    return ",".join(sorted(states))


def wait_for(condition: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, subprocess.run(["squeue", "--all"], capture_output=True, check=False).stdout
        time.sleep(0.5)


def submitted(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The number of the job that a command submits."""
    assert main(list(words)) == 0
    return capsys.readouterr().out.split()[1].rstrip(":")


def slow_training(folder: Path, seconds: float, epochs: int) -> list[str]:
    (folder / "slow.py").write_text(SLOW.replace("SECONDS", str(seconds)))
    settings = [f"train.epochs={epochs}", "plugins=[slow]", "out=run"]
    return ["train", str(RECIPE), *SMALL, *settings, "--slurm"]


CPU = "gpus_per_node=0,cpus_per_task=1"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_job_whose_time_is_over_is_put_back_and_ends_as_if_unbroken(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two and a half minutes of training in jobs of two minutes."""
    job = submitted(capsys, *slow_training(cluster, 2.5, 15), f"{CPU},timeout_min=2,signal_delay_s=20")
    wait_for(lambda: state_in_queue(job) == "COMPLETED", 900)
    log = (cluster / "slurm" / f"{job}.txt").read_text()
    assert "SIGUSR2: saved at update" in log
    assert "resuming at epoch" in log
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True).stdout
    assert "Restarts=0" not in shown
    unbroken = small_run(cluster / "unbroken", "train.epochs=15", "plugins=[slow]".replace("slow", "json"))
    for name in ("last.safetensors", "best.safetensors"):
        assert (cluster / "run" / name).read_bytes() == (unbroken / name).read_bytes()


@pytest.mark.long
def test_a_cancelled_job_saves_and_stays_cancelled(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = submitted(capsys, *slow_training(cluster, 0.5, 100), CPU)
    wait_for((cluster / "run" / "state.pt").exists)
    subprocess.run(["scancel", job], check=True)
    wait_for(lambda: state_in_queue(job) == "CANCELLED")
    log = (cluster / "slurm" / f"{job}.txt").read_text()
    assert "SIGTERM: saved at update" in log
    assert 0 < state_of(cluster / "run")["updates"] < 400
    time.sleep(3)
    assert state_in_queue(job) == "CANCELLED"


@pytest.mark.long
def test_a_requeue_by_slurm_itself_is_the_only_one(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As after a pre-emption with PreemptMode=REQUEUE: SIGTERM, and the job comes back once."""
    job = submitted(capsys, *slow_training(cluster, 0.5, 8), CPU)
    wait_for((cluster / "run" / "state.pt").exists)
    subprocess.run(["scontrol", "requeue", job], check=True)
    wait_for(lambda: state_in_queue(job) == "COMPLETED", 900)
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True).stdout
    assert "Restarts=1" in shown
    assert state_of(cluster / "run")["epoch"] == 8


@pytest.mark.long
def test_the_script_by_hand_of_the_docs_puts_itself_back_when_slurm_warns(cluster: Path) -> None:
    (cluster / "slow.py").write_text(SLOW.replace("SECONDS", "0.5"))
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    script = re.findall(r"```sh\n(#!/bin/sh\n#SBATCH .*?)```", page, re.DOTALL)[0]
    words = shlex.join([str(RECIPE), *SMALL, "train.epochs=8", "plugins=[slow]"])
    for old, new in (("--gpus-per-node=1 ", ""), ("=8 --time", "=1 --time"), ("RECIPE", words)):
        script = script.replace(old, new)
    (cluster / "seeds.sh").write_text(script.replace("vitruvius train", f"{sys.executable} -m vitruvius train"))
    sent = subprocess.run(["sbatch", "--parsable", "--array=3-3", "seeds.sh"], capture_output=True, check=True)
    job = f"{sent.stdout.decode().strip()}_3"
    wait_for((cluster / "runs" / "seed3" / "state.pt").exists)
    subprocess.run(["scancel", "--signal=USR2", job], check=True)  # as shortly before the limit
    wait_for(lambda: state_in_queue(job) in ("COMPLETED", "FAILED"), 250)
    assert state_in_queue(job) == "COMPLETED"
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=True).stdout
    assert "Restarts=1" in shown
    assert state_of(cluster / "runs" / "seed3")["epoch"] == 8


@pytest.mark.long
def test_two_tasks_on_one_node_train_as_a_group_and_share_the_images_of_an_evaluation(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = f"{CPU},tasks_per_node=2"
    words = ["train", str(RECIPE), *SMALL, "data.batch_size=4", "out=run", "--slurm", two]
    job = submitted(capsys, *words)
    wait_for(lambda: state_in_queue(job) in ("COMPLETED", "FAILED"))
    assert state_in_queue(job) == "COMPLETED", (cluster / "slurm" / f"{job}.txt").read_text()
    assert state_of(cluster / "run")["processes"] == 2
    job = submitted(capsys, "evaluate", "run", "--threat", "pgd:eps=8/255,steps=2", "--slurm", two)
    wait_for(lambda: state_in_queue(job) in ("COMPLETED", "FAILED"))
    assert state_in_queue(job) == "COMPLETED", (cluster / "slurm" / f"{job}.txt").read_text()
    threats = json.loads((cluster / "run" / "evaluation" / "report.json").read_text())["threats"]
    assert [threat["n"] for threat in threats] == [24, 24]


@pytest.mark.long
def test_an_array_with_a_failing_task_trains_the_others_and_ends_with_a_table(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep_file(cluster, list=[{"name": "good"}, {"name": "bad", "model.weights": "nowhere.safetensors"}])
    assert main(["sweep", str(file), *SMALL, "train.epochs=1", "--slurm", CPU]) == 0
    job, table = re.findall(r"job (\d+)", capsys.readouterr().out)
    wait_for(lambda: state_in_queue(table) == "COMPLETED")
    assert state_in_queue(job) == "COMPLETED,FAILED"
    said = (cluster / "out" / "slurm" / f"{table}.txt").read_text()
    assert "| good" in said
    assert "| bad" in said
    assert main(["sweep", str(file), *SMALL, "train.epochs=1", "--status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"good  finished, epoch 1 of 1, {cluster}/out/slurm/{job}_0.txt"
    assert lines[1].startswith("bad   failed: ")
    assert "nowhere.safetensors" in lines[1]
    alone = small_run(cluster / "alone", "train.epochs=1")
    (alone / "config.yaml").write_text((cluster / "out" / "good" / "config.yaml").read_text())
    assert_same_run(alone, cluster / "out" / "good")


@pytest.mark.long
def test_a_real_cluster_without_gpus_says_so_in_one_sentence(cluster: Path) -> None:
    with pytest.raises(ConfigError, match=r"gpus_per_node=4 asks for GPUs that the cluster's default partition does"):
        submit_training(small_config(cluster / "run"), "gpus_per_node=4")


@pytest.mark.long
def test_a_job_on_this_machine_is_run_without_slurm(tmp_path: Path) -> None:
    submit_training(small_config(tmp_path / "run"), "cluster=local,gpus_per_node=0")
    wait_for((tmp_path / "run" / "metrics.jsonl").exists, 120)
    wait_for(lambda: len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2, 60)
    with pytest.raises(ConfigError, match="cluster=local runs one process"):
        submit_runs(["sweep"], ["a"], str(tmp_path), "cluster=local")
    assert sys.executable in (tmp_path / "slurm" / "vitruvius.sh").read_text()
