"""Metrics for MLflow: on a server, or in files beside the run. A password stays in MLflow's own environment."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitruvius._files import atomic_write_text, read_json
from vitruvius._registry import require
from vitruvius.tracking.base import Row, scalars, trackers

PARAMS = 100  # that MLflow takes at a time
LONGEST = 500  # characters of a parameter's value


@trackers.register("mlflow")
class MLflow:
    """One MLflow run for one run folder, also when it resumes; numbers that MLflow has already are not sent again.

    Files in <run>/mlruns are shown by `MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri <run>/mlruns`.

    uri: a tracking server or folder; null: MLFLOW_TRACKING_URI, else <run>/mlruns
    experiment: name of the MLflow experiment, made if it is not there
    name: name of the MLflow run; null: that of the run folder
    """

    def __init__(self, *, uri: str | None = None, experiment: str = "vitruvius", name: str | None = None) -> None:
        require("mlflow", "mlflow")
        self.uri, self.experiment, self.name = uri, experiment, name
        self.client: Any = None

    def open(self, folder: Path, config: dict[str, Any]) -> None:
        """Start or resume in the `folder` of the run; `config`, the recipe without secrets, becomes its parameters."""
        mlflow: Any = require("mlflow", "mlflow")
        self.entities: Any = mlflow.entities
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # or MLflow 3 refuses to write plain files
            uri = (folder / "mlruns").resolve().as_uri()
        self.client = mlflow.MlflowClient(tracking_uri=uri)
        note = folder / "mlflow.json"
        if note.exists():
            self.id = read_json(note)["id"]
            self.client.update_run(self.id, status="RUNNING")
        else:
            experiment = self.client.get_experiment_by_name(self.experiment)
            number = experiment.experiment_id if experiment else self.client.create_experiment(self.experiment)
            self.id = self.client.create_run(number, run_name=self.name or folder.name).info.run_id
            atomic_write_text(note, json.dumps({"id": self.id}) + "\n")
        run = self.client.get_run(self.id).data
        params = [self.entities.Param(key, value[:LONGEST]) for key, value in flat(config).items() if not run.params]
        for start in range(0, len(params), PARAMS):
            self.client.log_batch(self.id, params=params[start : start + PARAMS])
        histories = [self.client.get_metric_history(self.id, key) for key in run.metrics]
        self.sent = {(metric.key, metric.step) for history in histories for metric in history}

    def log(self, rows: Sequence[Row]) -> None:
        """Numbers of `rows` that MLflow has not seen; it keeps what it has."""
        now = int(1000 * time.time())
        numbers = {(name, row["epoch"]): value for row in rows for name, value in scalars(row).items()}
        new = {key: value for key, value in numbers.items() if key not in self.sent}
        metrics = [self.entities.Metric(name, value, now, epoch) for (name, epoch), value in new.items()]
        if metrics:
            self.client.log_batch(self.id, metrics=metrics)
        self.sent |= set(new)

    def close(self) -> None:
        if self.client is not None:
            self.client.set_terminated(self.id)
            self.client = None


def flat(value: Any, name: str = "") -> dict[str, str]:
    """`{"train": {"lr": 1}}` → `{"train.lr": "1"}`."""
    if not isinstance(value, dict):
        return {name: value if isinstance(value, str) else json.dumps(value)}
    return {key: text for k, item in value.items() for key, text in flat(item, f"{name}.{k}".lstrip(".")).items()}
