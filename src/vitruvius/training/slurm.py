"""Slurm: a command as a job of one or many nodes, or as a job array with one command per task.

The job's script starts one process per GPU; they join as under torchrun. Before the time limit Slurm sends SIGUSR2: the
command saves, ends with exit code 85, and the script puts its job back. SIGTERM (scancel, pre-emption) saves and ends;
whether a pre-empted job comes back is Slurm's own affair.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vitruvius._config import bind
from vitruvius._errors import ConfigError
from vitruvius._files import atomic_write_text, is_url
from vitruvius._registry import parse_spec
from vitruvius._signals import TIME_OVER
from vitruvius._yaml import dump_yaml
from vitruvius.training.config import Config

SCRIPT = """\
#!/bin/sh
{options}
start=$(date +%s)
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + ${{SLURM_JOB_ID:-0}} % 40000))
[ "${{SLURM_NNODES:-1}}" = 1 ] || MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
{name}
{srun} sh -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS \
LOCAL_WORLD_SIZE={tasks}; exec "$@"' sh {command}
code=$?
# SIGUSR2 long before the limit is a pre-emption: then Slurm itself puts the job back, or nobody does
if [ $code = {time_over} ] && [ $(($(date +%s) - start)) -ge {due} ]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit $code
"""
LOCAL = """\
#!/bin/sh
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 LOCAL_WORLD_SIZE=1
{name}
while {command}; [ $? = {time_over} ]; do :; done
"""
EARLY = 90  # seconds by which Slurm may be early with its signal, which it sends with the resolution of a minute


def submit_training(config: Config, spec: str) -> str:
    """Submit a recipe, which is kept as it is now beside the job's logs; one line about the job.

    `spec` holds settings of `launch`: partition=gpu,nodes=2,gpus_per_node=8,timeout_min=1440.
    """
    out = config.out or "runs/unnamed"
    settings = settings_of(spec, Path(out).parent / "slurm", is_remote=is_url(out))
    recipe = Path(settings["logs"]) / f"{Path(out).name}.yaml"
    job = submit(["train", str(recipe)], settings, files={recipe: dump_yaml(config)})
    return f"job {job}: {out}, logs in {settings['logs']}"


def submit_runs(words: Sequence[str], runs: Sequence[str], folder: str, spec: str) -> str:
    """Submit the runs of a sweep, `vitruvius WORDS --run NAME` each, as one array; a last job prints the table."""
    settings = settings_of(spec, Path(folder) / "slurm", is_remote=is_url(folder))
    logs = Path(settings["logs"])
    job = submit(words, settings, runs=runs, files={logs / "runs.txt": "".join(f"{run}\n" for run in runs)})
    atomic_write_text(logs / "array.json", json.dumps({"job": job, "runs": list(runs)}) + "\n")
    table = submit([*words, "--status"], settings, after=job)
    return f"job {job}: {len(runs)} runs in {folder}, logs in {logs}; job {table} prints the table when they have ended"


def submit_evaluation(words: Sequence[str], flags: Mapping[str, Any], spec: str) -> str:
    """Submit `vitruvius evaluate WORDS` with its flags, whose tasks share the images; one line about the job."""
    target, said = Path(words[0]), ["evaluate", *words]
    for name, value in flags.items():
        if isinstance(value, bool):
            said += [f"--{name}"] * value
        else:
            values = value if isinstance(value, list | tuple) else [] if value is None else [value]
            said += [f"--{name}={item}" for item in values]
    place = (target.parent if target.is_dir() else Path("runs")) / "slurm"
    settings = settings_of(spec, place, is_remote=is_url(words[0]))
    return f"job {submit(said, settings)}: evaluation of {words[0]}, logs in {settings['logs']}"


def states_of(logs: Path) -> dict[str, tuple[str, Path]]:
    """How Slurm has the runs of the last array: run → (PENDING, RUNNING, …; its log); nothing for those that ended."""
    file = logs / "array.json"
    if not file.exists():
        return {}
    array = json.loads(file.read_text(encoding="utf-8"))
    lines: list[str] = []
    if shutil.which("squeue"):
        asked = ["squeue", "--noheader", "--array", f"--jobs={array['job']}", "--format=%K %T"]
        lines = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    queued = dict(line.split() for line in lines)
    return {
        run: (queued.get(str(number), "").lower(), logs / f"{array['job']}_{number}.txt")
        for number, run in enumerate(array["runs"])
    }


def settings_of(spec: str, logs: Path, *, is_remote: bool) -> dict[str, Any]:
    """All settings of `launch`, checked; files go to the folder `logs`, beside what the job writes, unless they say."""
    _, given = parse_spec(f"--slurm:{spec}", where="--slurm")
    settings: dict[str, Any] = {**(launch.__kwdefaults__ or {}), **bind("--slurm", launch, given)}
    if settings["logs"] is None and is_remote:
        raise ConfigError(f"--slurm: {logs} is remote; name a folder that all nodes see with logs=….")
    for key, least in {"nodes": 1, "gpus_per_node": 0, "tasks_per_node": 1, "timeout_min": 1, "at_once": 1}.items():
        if settings[key] is not None and settings[key] < least:
            raise ConfigError(f"--slurm: {key} = {settings[key]}, expected at least {least}.")
    return {**settings, "logs": str(Path(settings["logs"] or logs).absolute())}


def submit(
    words: Sequence[str],
    settings: dict[str, Any],
    *,
    runs: Sequence[str] = (),
    after: str = "",
    files: Mapping[Path, str] | None = None,
) -> str:
    """Submit `vitruvius WORDS`; the number of the job. `files` are written first."""
    if settings["cluster"] == "slurm" and shutil.which("sbatch") is None:
        raise ConfigError("--slurm: there is no `sbatch` here; run it where jobs are submitted, or try cluster=local.")
    if settings["cluster"] == "local" and (runs or settings["nodes"] > 1):
        raise ConfigError("--slurm: cluster=local runs one process; arrays and nodes are for a cluster.")
    Path(settings["logs"]).mkdir(parents=True, exist_ok=True)
    for file, text in (files or {}).items():
        atomic_write_text(file, text)
        file.chmod(0o600)  # a recipe is kept as it was given, with the passwords of its URLs
    return launch(words, runs, after, **settings)


def launch(
    words: Sequence[str],
    runs: Sequence[str],
    after: str,
    *,
    partition: str | None = None,
    nodes: int = 1,
    gpus_per_node: int = 1,
    tasks_per_node: int | None = None,
    timeout_min: int = 1440,
    cpus_per_task: int = 8,
    mem_gb: float | None = None,
    account: str | None = None,
    qos: str | None = None,
    constraint: str | None = None,
    at_once: int | None = None,
    name: str = "vitruvius",
    logs: str | None = None,
    signal_delay_s: int = 120,
    cluster: Literal["slurm", "local"] = "slurm",
) -> str:
    """Submit a command as a Slurm job; the number of the job.

    partition: partition of the cluster; null: its default
    nodes: number of nodes
    gpus_per_node: GPUs on each node, one process each; 0: none
    tasks_per_node: processes on each node; null: one per GPU, or one on the CPU
    timeout_min: time limit in minutes; the job is queued again when it is reached
    cpus_per_task: CPU cores of each process
    mem_gb: memory of each node in GB; null: the cluster's default
    account: account that is charged; null: the default
    qos: quality of service; null: the default
    constraint: features that nodes must have; null: none
    at_once: runs of a sweep at a time; null: as many as the cluster starts
    name: name of the job
    logs: folder of the job's files; null: slurm/ beside the run
    signal_delay_s: seconds before the time limit at which Slurm sends its signal
    cluster: slurm, or local to try it on this machine
    """
    tasks, logs_folder = tasks_per_node or max(1, gpus_per_node), Path(logs or ".")
    most = "" if at_once is None else f"%{at_once}"
    asked: dict[str, Any] = {
        "job-name": name,
        "nodes": nodes,
        "ntasks-per-node": tasks,
        "cpus-per-task": cpus_per_task,
        "time": timeout_min,
        "signal": f"USR2@{signal_delay_s}",
        "output": logs_folder / ("%A_%a.txt" if runs else "%j.txt"),
        "open-mode": "append",
        "gpus-per-node": gpus_per_node or None,
        "mem": None if mem_gb is None else f"{round(1024 * mem_gb)}M",
        "partition": partition,
        "account": account,
        "qos": qos,
        "constraint": constraint,
        "array": f"0-{len(runs) - 1}{most}" if runs else None,
        "dependency": f"afterany:{after}" if after else None,
    }
    options = [f"#SBATCH --{key}={value}" for key, value in asked.items() if value is not None]
    command = shlex.join([sys.executable, "-m", "vitruvius", *words]) + (' --run "$run"' if runs else "")
    reading = f'run=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(logs_folder / "runs.txt"))})'
    text = (SCRIPT if cluster == "slurm" else LOCAL).format(
        options="\n".join([*options, "#SBATCH --requeue"]),
        name=reading if runs else "",
        srun=f"srun --wait=60 --cpus-per-task={cpus_per_task}",
        tasks=tasks,
        command=command,
        time_over=TIME_OVER,
        due=60 * timeout_min - signal_delay_s - EARLY,
    )
    script = logs_folder / f"{name}{'-table' if after else ''}.sh"
    atomic_write_text(script, text)
    if cluster == "local":
        background = ["sh", "-c", 'nohup sh "$0" >>"$1" 2>&1 & echo $!', str(script), str(logs_folder / "local.txt")]
        return subprocess.run(background, capture_output=True, text=True, check=True).stdout.strip()
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        text = done.stderr.strip() or "sbatch failed"
        lines = [line.removeprefix("sbatch: error: ").strip() for line in text.splitlines() if "error:" in line]
        advice, where = "", f"partition {partition}" if partition else "the cluster's default partition"
        if gpus_per_node and ("gres" in text.lower() or "node configuration" in text.lower()):
            asked_for = f"gpus_per_node={gpus_per_node} asks for GPUs that {where} does not have"
            advice = f" {asked_for}; gpus_per_node=0 uses none."
        raise ConfigError(f"--slurm: Slurm refuses the job: {[text, *lines][-1].rstrip('.')}.{advice}")
    return done.stdout.split(";")[0].strip()
