"""A run folder elsewhere, by its URL: s3://bucket/runs/rpc. It is copied to runs/remote/…, where results go too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitruvius._files import is_url
from vitruvius.targets.base import Target, local_run, target_kinds
from vitruvius.targets.run_folder import RunFolder


@target_kinds.register("remote run")
class RemoteRun:
    """The URL of a run folder, of any store that fsspec knows: s3://…, gs://…."""

    order = 5.0
    has_data = True

    def accepts(self, text: str) -> bool:
        return is_url(text)

    def open(self, text: str, overrides: Sequence[str], *, trust_plugins: bool) -> Target:
        """The run in its local copy."""
        opened = RunFolder().open(local_run(text), overrides, trust_plugins=trust_plugins)
        return replace(opened, text=text)
