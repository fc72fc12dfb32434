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
from vitruvius.tracking._base import Row, scalars, trackers

FILE = "wandb.json"


@trackers.register("wandb")
class WeightsAndBiases:
    """One W&B run for one run folder, also when it goes on; offline files lie in <run>/wandb.

    wandb writes offline files when it likes, and a kill loses what it still had. So a run that goes on offline logs all
    its rows anew, into a file that takes the place of the earlier ones.

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
        self.file = Path()
        self.run: Any = None
        self.id = ""
        self.logged = 0  # epochs that W&B has

    def open(self, folder: Path, config: dict[str, Any]) -> None:
        """Begin or go on in the `folder` of the run; `config`, the recipe without secrets, goes to W&B."""
        wandb: Any = require("wandb", "wandb")
        self.file = folder / FILE
        known: dict[str, Any] = {}
        if self.file.exists():
            known = read_json(self.file)
        self.id = known.get("id") or uuid.uuid4().hex[:12]
        quiet = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True, x_disable_meta=True)
        settings = {**self.settings, "name": self.settings["name"] or folder.name, "mode": self.mode}
        self.run = wandb.init(
            id=self.id,
            dir=str(folder),
            resume="allow",
            config=config,
            settings=quiet,
            reinit="finish_previous",
            **settings,
        )
        self.logged = 0
        if self.mode == "online":
            self.logged = int(self.run.step)  # the server knows best
        self._note()

    def log(self, rows: Sequence[Row]) -> None:
        """Epochs that W&B has not seen; it takes steps in their order only, so those it has seen stay as they are.

        `rows` are all so far.
        """
        for row in rows:
            if row["epoch"] >= self.logged:
                self.run.log(scalars(row), step=row["epoch"])
                self.logged = row["epoch"] + 1
        if self.mode == "offline":
            self._remove_earlier_files()
        self._note()

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()
            self.run = None

    def _remove_earlier_files(self) -> None:
        """Offline files of earlier processes, whose rows are all in that of this one."""
        own = Path(self.run.dir).parent
        for folder in own.parent.glob(f"offline-run-*-{self.id}"):
            if folder.resolve() != own.resolve():
                shutil.rmtree(folder, ignore_errors=True)

    def _note(self) -> None:
        atomic_write_text(self.file, json.dumps({"id": self.id, "logged": self.logged}) + "\n")
