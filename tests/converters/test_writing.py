"""A converted checkpoint is a run folder like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch

import vitruvius
from vitruvius.cli import main


def test_a_timm_checkpoint_becomes_a_run_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    upstream = timm.create_model("test_vit", num_classes=7).eval()
    torch.save({"state_dict": upstream.state_dict()}, tmp_path / "old.pth")
    command = ["convert", str(tmp_path / "old.pth"), "--from", "timm", "--model", "test_vit", "--out"]
    assert main([*command, str(tmp_path / "run")]) == 0
    model = vitruvius.load_model(tmp_path / "run")
    x = torch.rand(2, 3, 160, 160)
    with torch.no_grad():
        torch.testing.assert_close(model(x), upstream((x - 0.5) / 0.5))
    assert main([*command, str(tmp_path / "run")]) == 1
    assert "belongs to a run" in capsys.readouterr().err
