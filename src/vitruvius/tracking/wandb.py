"""Metrics for Weights & Biases. The key stays in the environment or in wandb's own settings; a run never holds it."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from vitruvius._files import atomic_write_text, read_json
from vitruvius._registry import require
from vitruvius.tracking.base import Row, scalars, trackers


@trackers.register("wandb")
class WeightsAndBiases:
    """One W&B run for one run folder, also when it resumes; offline files lie in <run>/wandb.

    wandb writes offline files when it likes, and a kill loses what it still had. So a run that resumes offline logs all
    its rows again, into a file that takes the place of the earlier ones.

    project: name of the W&B project
    name: name of the W&B run; null: that of the run folder
    entity: user or team; null: wandb's default
    group: group of the W&B run; null: none
    tags: tags of the W&B run
    mode: online, or offline files to be synchronised later
    """

    def __init__(
        self,
        *,
        project: str = "vitruvius",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: tuple[str, ...] = (),
        mode: Literal["online", "offline"] = "online",
    ) -> None:
        require("wandb", "wandb")
        self.settings = {"project": project, "name": name, "entity": entity, "group": group, "tags": list(tags)}
        self.mode = mode
        self.run: Any = None
        self.logged = 0  # epochs that W&B has

    def open(self, folder: Path, config: dict[str, Any]) -> None:
        """Start or resume in the `folder` of the run; `config`, the recipe without secrets, goes to W&B."""
        wandb: Any = require("wandb", "wandb")
        self.file = folder / "wandb.json"
        notes = read_json(self.file) if self.file.exists() else {}
        self.id = notes.get("id") or uuid.uuid4().hex[:12]
        quiet = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True, x_disable_meta=True)
        settings = {**self.settings, "name": self.settings["name"] or folder.name, "mode": self.mode, "id": self.id}
        settings |= {"dir": str(folder), "resume": "allow", "reinit": "finish_previous"}
        self.run = wandb.init(config=config, settings=quiet, **settings)
        self.logged = int(self.run.step) if self.mode == "online" else 0  # the server knows best
        self._note()

    def log(self, rows: Sequence[Row]) -> None:
        """Epochs of `rows` that W&B has not seen; it takes steps in their order only, so those it has stay."""
        for row in rows:
            if row["epoch"] >= self.logged:
                self.run.log(scalars(row), step=row["epoch"])
                self.logged = row["epoch"] + 1
        if self.mode == "offline":  # files of earlier processes, whose rows are all in that of this one
            own = Path(self.run.dir).parent
            for folder in own.parent.glob(f"offline-run-*-{self.id}"):
                if folder.resolve() != own.resolve():
                    shutil.rmtree(folder, ignore_errors=True)
        self._note()

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()
            self.run = None

    def _note(self) -> None:
        atomic_write_text(self.file, json.dumps({"id": self.id, "logged": self.logged}) + "\n")
