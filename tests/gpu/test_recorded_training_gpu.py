"""Training steps as CUDA graphs: `train.compile: auto` on a GPU trains as plain steps do.

Run by hand:  python scripts/gpu_tests.py tests/gpu/test_recorded_training_gpu.py
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from small_run import rows_of, small_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SETTINGS = (
    "model.kwargs={depth: 2, embed_dim: 48}",
    "data.train_num_samples=null",
    "data.batch_size=64",
    "train.device=cuda",
    "train.holdout=0",
    "train.clip_grad=1.0",
)
TASKS = {
    "supervised": "task=supervised",
    "pgd": "task={use: adversarial, eps: 4/255, attack: 'pgd:steps=2'}",
    "trades": "task={use: trades, eps: 4/255, attack: 'pgd:steps=2'}",
}


@pytest.mark.parametrize("opt", ["adamw", "lamb"])
@pytest.mark.parametrize("task", list(TASKS))
def test_recorded_training_learns_what_plain_training_learns(
    tmp_path: Path, task: str, opt: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = (*SETTINGS, TASKS[task], f"train.opt={opt}")
    plain = rows_of(small_run(tmp_path / "plain", "train.compile=false", *settings))
    with caplog.at_level(logging.DEBUG):
        fast = rows_of(small_run(tmp_path / "fast", *settings))
    assert "are recorded as CUDA graphs" in caplog.text
    for one, other in zip(plain, fast, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=2e-2)
