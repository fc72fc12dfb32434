"""Slurm: a recipe as a job of one or many nodes, through submitit; pre-empted or timed out, it is queued again.

Every task of the job is one process on one device and joins the others as under torchrun. Slurm announces the end with
SIGUSR2 (time) or SIGTERM (pre-emption); training then saves after the update at hand, and the job is put back.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from vitruvius._config import bind, build
from vitruvius._errors import ConfigError, Preempted
from vitruvius._files import is_url, join
from vitruvius._registry import parse_spec, require
from vitruvius._yaml import to_plain
from vitruvius.training._guards.preemption import Stop
from vitruvius.training._train import train
from vitruvius.training.config import Config

WARNING = signal.SIGUSR2  # submitit's default; NCCL may catch SIGUSR1
REQUEUES = 1000  # a run that times out so often will never end


def submit(config: Config, spec: str) -> str:
    """Submit a recipe as `partition=gpu,nodes=2,gpus_per_node=8,timeout_min=1440` says; one line about the job.

    `config` is the recipe; `spec` holds settings of `launch`.
    """
    _, settings = parse_spec(f"--slurm:{spec}", where="--slurm")
    job, logs = launch(config, **bind("--slurm", launch, settings))
    return f"job {job.job_id}: {config.out}, logs in {logs}"


def launch(
    config: Config,
    *,
    partition: str | None = None,
    nodes: int = 1,
    gpus_per_node: int = 1,
    timeout_min: int = 1440,
    cpus_per_task: int = 8,
    mem_gb: float | None = None,
    account: str | None = None,
    qos: str | None = None,
    constraint: str | None = None,
    name: str = "vitruvius",
    logs: str | None = None,
    signal_delay_s: int = 120,
    cluster: Literal["slurm", "local"] = "slurm",
) -> tuple[Any, str]:
    """Submit a recipe as a Slurm job; submitit's job, and the folder of its logs.

    partition: partition of the cluster; null: its default
    nodes: number of nodes
    gpus_per_node: GPUs on each node, one process each; 0: one process per node on its CPU
    timeout_min: time limit in minutes; the job is queued again when it is reached
    cpus_per_task: CPU cores of each process
    mem_gb: memory of each node in GB; null: the cluster's default
    account: account that is charged; null: the default
    qos: quality of service; null: the default
    constraint: features that nodes must have; null: none
    name: name of the job
    logs: folder of the job's files; null: slurm/ beside the run
    signal_delay_s: seconds before the time limit at which Slurm sends its signal
    cluster: slurm, or local to try it on this machine
    config: the recipe
    """
    submitit: Any = require("submitit", "slurm")
    if nodes < 1 or gpus_per_node < 0 or timeout_min < 1:
        raise ConfigError("--slurm: nodes and timeout_min are at least 1, gpus_per_node is at least 0.")
    if cluster == "slurm" and not submitit.SlurmExecutor.affinity() > 0:
        raise ConfigError("--slurm: there is no `sbatch` here; run it where jobs are submitted, or try cluster=local.")
    folder = logs or _log_folder(config)
    executor = submitit.AutoExecutor(folder=folder, cluster=cluster, slurm_max_num_timeout=REQUEUES)
    wishes = {"partition": partition, "account": account, "qos": qos, "constraint": constraint}
    executor.update_parameters(
        name=name,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        tasks_per_node=max(1, gpus_per_node),
        cpus_per_task=cpus_per_task,
        timeout_min=timeout_min,
        **({} if mem_gb is None else {"mem_gb": mem_gb}),
        slurm_signal_delay_s=signal_delay_s,
        **{f"slurm_{key}": value for key, value in wishes.items() if value is not None},
    )
    return executor.submit(Training(to_plain(config))), folder


@dataclass
class Training:
    """What a task of the job runs: plain data, so that it can be pickled and read by later versions."""

    recipe: dict[str, Any]
    patience: float = 60.0  # seconds that other tasks wait for the first to put the job back

    def __call__(self) -> str:
        """Train, or go on; the run folder."""
        import submitit

        # every task sees all devices of its node and takes its own
        environment = submitit.helpers.TorchDistributedEnvironment().export(False, overwrite=True)
        requeue: Any = signal.getsignal(WARNING)
        signal.signal(WARNING, _relay(requeue))
        try:
            return str(train(build(Config, self.recipe, source="the submitted recipe"), quiet=environment.rank > 0))
        except Preempted:
            requeue(WARNING, None)  # the first task puts the job back, and ends here
            time.sleep(self.patience)  # ending earlier than the first might end it too
            raise

    def checkpoint(self) -> Any:
        """What to run next time: the same, since the run folder knows how far it is."""
        import submitit

        return submitit.helpers.DelayedSubmission(Training(self.recipe, self.patience))


def _relay(requeue: Any) -> Any:
    """Submitit would end the process at once; training is asked to save first, if it is listening."""

    def handler(number: int, frame: FrameType | None) -> None:
        if isinstance(signal.getsignal(signal.SIGTERM), Stop):
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            requeue(number, frame)

    return handler


def _log_folder(config: Config) -> str:
    out = config.out or "runs/unnamed"
    if is_url(out):
        raise ConfigError(f"--slurm: out = {out} is remote; name a folder that all nodes see with logs=….")
    return str(join(out, "..", "slurm"))
