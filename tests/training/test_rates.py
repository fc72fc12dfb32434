"""Rates and optimisers: the scaling rule, schedules by epoch, warm-up before the schedule, what else timm takes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from small_run import rows_of, small_config, small_run, small_session, state_of
from vitruvius._errors import ConfigError
from vitruvius._processes import Process
from vitruvius._yaml import read_yaml
from vitruvius.training.session import with_rate

ALONE = Process(device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("settings", "processes", "expected"),
    [
        (["train.lr=0.3"], 4, 0.3),
        (["train.lr=null"], 1, 1e-3),
        (["train.lr=null", "train.lr_base=0.1", "train.lr_base_scale=linear"], 4, 0.1 * (8 * 4) / 256),
        (["train.lr=null", "train.lr_base=0.1", "train.lr_base_scale=sqrt"], 4, 0.1 * math.sqrt(8 * 4 / 256)),
        (["train.lr=null", "train.lr_base=0.1", "train.grad_accum_steps=3", "train.opt=sgd"], 2, 0.1 * 48 / 256),
        (["train.lr=null", "train.lr_base=0.1", "train.lr_base_size=64", "train.opt=lamb"], 1, 0.1 * math.sqrt(8 / 64)),
    ],
)
def test_the_rate_is_given_or_scaled_to_the_global_batch(
    settings: list[str], processes: int, expected: float, tmp_path: Path
) -> None:
    resolved = with_rate(small_config(tmp_path, *settings), processes)
    assert resolved.train.lr == pytest.approx(expected)
    assert with_rate(resolved, processes) == resolved  # a resolved recipe is a recipe


def test_two_rates_that_disagree_are_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path, "train.lr=0.3", "train.lr_base=0.1", "train.opt=sgd")
    with pytest.raises(ConfigError, match=r"train.lr = 0.3, but train.lr_base = 0.1 means 0.003125 .*Give one of"):
        with_rate(config, 1)


def test_the_resolved_rate_is_written_to_the_run(tmp_path: Path) -> None:
    settings = ("train.lr=null", "train.lr_base=0.32", "train.opt=sgd", "train.epochs=1")
    run = small_run(tmp_path / "run", *settings)
    written = read_yaml(run / "config.yaml")["train"]
    assert (written["lr"], written["lr_base_scale"]) == (pytest.approx(0.01), "linear")
    assert small_run(run, *settings) == run  # and recognised


def test_a_schedule_by_epochs_moves_between_epochs_only(tmp_path: Path) -> None:
    settings = ("train.sched_on_updates=false", "train.epochs=4", "train.lr=1", "train.min_lr=0", "train.opt=sgd")
    small = ("data.train_num_samples=16", "train.clip_grad=1e-6")
    rates = [row["lr"] for row in rows_of(small_run(tmp_path / "run", *settings, *small))]
    assert rates == pytest.approx([0.5 * (1 + math.cos(math.pi * epoch / 4)) for epoch in range(4)])


def test_a_warmup_may_come_before_the_schedule(tmp_path: Path) -> None:
    settings = ["train.warmup_epochs=1", "train.warmup_prefix=true", "train.lr=1", "train.min_lr=0", "train.opt=sgd"]
    session = small_session(*settings, "train.warmup_lr=0")
    assert session.num_epochs == 3
    rates = []
    for update in range(1, 13):
        rates.append(session.optimizer.param_groups[0]["lr"])
        session.scheduler.step_update(update)
    cosine = [0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert rates == pytest.approx([0, 0.25, 0.5, 0.75, *cosine])


def test_noise_on_the_rate_is_drawn_with_the_seed_of_the_run() -> None:
    rates = []
    for seed in (0, 1, 1):
        session = small_session("train.sched_on_updates=false", "train.epochs=4", "train.lr_noise=[0]", f"seed={seed}")
        session.scheduler.step(2)
        rates.append(session.optimizer.param_groups[0]["lr"])
    assert rates[0] != rates[1] == rates[2]


def test_layer_decay_gives_early_layers_smaller_steps(tmp_path: Path) -> None:
    session = small_session("train.layer_decay=0.5", "model.kwargs.depth=2")
    scales = {id(p): group["lr_scale"] for group in session.optimizer.param_groups for p in group["params"]}
    model = session.model.model
    places = [model.patch_embed.proj.weight, model.blocks[0].mlp.fc1.weight, model.blocks[1].mlp.fc1.weight]
    assert [scales[id(p)] for p in [*places, model.head.weight]] == [0.125, 0.25, 0.5, 1.0]


def test_more_settings_reach_the_optimiser(tmp_path: Path) -> None:
    group = small_session("train.opt=adamw", "train.opt_kwargs={amsgrad: true}").optimizer.param_groups[0]
    assert group["amsgrad"] is True
    with pytest.raises(ConfigError, match="cannot be made"):
        small_session("train.opt_kwargs={amsgard: true}")


def test_frozen_weights_are_neither_optimised_nor_averaged_away(tmp_path: Path) -> None:
    settings = ["model.freeze=[patch_embed, pos_embed]", "train.model_ema=true", "train.epochs=1"]
    session = small_session(*settings)
    optimised = {id(p) for group in session.optimizer.param_groups for p in group["params"]}
    frozen = [p for p in session.model.parameters() if not p.requires_grad]
    assert frozen
    assert not optimised & {id(p) for p in frozen}
    before = {name: p.clone() for name, p in session.model.model.named_parameters() if not p.requires_grad}
    state: dict[str, Any] = state_of(small_run(tmp_path / "run", *settings))
    for name, value in before.items():
        assert torch.equal(state["model"][name], value)
        assert torch.equal(state["ema"][name], value)
