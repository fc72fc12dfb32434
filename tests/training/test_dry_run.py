"""A dry run tells sites, parameters, memory and time of a recipe, and writes nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vitruvius.training.dry_run as dry_running
from small_run import RECIPE, SMALL, small_config
from vitruvius._errors import ConfigError
from vitruvius.cli import main
from vitruvius.data import DataConfig
from vitruvius.models import create_model
from vitruvius.training import read_recipe
from vitruvius.training.dry_run import SavedTensors, dry_run, format_bytes, forward_flops
from vitruvius.training.loop import Trainer


def numbers(text: str, name: str) -> list[str]:
    return re.findall(rf"^\s*{name}\s+(.*)$", text, re.MULTILINE)


def test_the_command_prints_recipe_sites_parameters_memory_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "attention=[{parts: [rpc]}]", "train.model_ema=true"]
    assert main(["train", str(RECIPE), "--dry-run", *words]) == 0
    said = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    model = create_model("vitruvius/vit_digits", depth=1, embed_dim=24)
    assert "train:\n  epochs: 2\n" in said
    assert re.search(r"blocks\.0\.attn\s+vit\s.*rpc$", said, re.MULTILINE)
    (total,), (trainable,), (idle,) = (numbers(said, name) for name in ("total", "trainable", "idle"))
    assert total == trainable
    assert int(total.replace(",", "")) == sum(p.numel() for p in model.parameters())
    assert int(idle.replace(",", "")) == 24 * 24 + 24
    assert numbers(said, "average") == [line for line in numbers(said, "parameters") if line.endswith("iB")]
    assert re.search(r"time: [\d.,]+ images/s on one cpu, measured with 8 images a step", said)
    assert re.search(r"an epoch \d+ s, 2 epochs \d+ s", said)


def test_adam_keeps_two_numbers_a_parameter_and_sgd_none(tmp_path: Path) -> None:
    adam = dry_run(small_config(tmp_path / "run"))
    (parameters,) = (line for line in numbers(adam, "parameters") if line.endswith("iB"))
    (states,) = numbers(adam, "optimiser")
    assert float(states.split()[0]) == pytest.approx(2 * float(parameters.split()[0]), rel=0.02)
    plain = dry_run(small_config(tmp_path / "run", "train.opt=momentum", "train.momentum=0.0"))
    assert numbers(plain, "optimiser") == ["0.0 B"]


def test_data_that_are_not_here_are_a_note(tmp_path: Path) -> None:
    said = dry_run(small_config(tmp_path / "run", "data.dataset=folder", "data.root=nowhere", "data.num_classes=7"))
    assert "note: the data cannot be opened here: data.root nowhere does not exist" in said
    assert "num_classes: 7" in said
    assert "an epoch" not in said


def test_a_device_that_is_not_here_leaves_the_time_out_and_nothing_else(tmp_path: Path) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    said = dry_run(small_config(tmp_path / "run", "train.device=cuda"))
    assert "time: not measured here; " in said
    assert "note: device 'cuda' cannot be used here" in said
    here = dry_run(small_config(tmp_path / "run"))
    for part in ("optimiser", "activations of 8 images"):
        assert numbers(said, part) == numbers(here, part)


def test_an_image_size_that_the_model_does_not_take_is_refused_as_by_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not take 3 channel.* of 7 × 7 pixels"):
        dry_run(small_config(tmp_path, "data.image_size=7"))


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ([], (1, 1)),
        (["task={use: adversarial, eps: 0.1, attack: {use: pgd, steps: 5}}"], (6, 6)),
        (["task={use: adversarial, eps: 0.1, attack: {use: pgd, steps: 2}}", "data.batch_size=5"], (3, 3)),
        (
            [
                "task={use: adversarial, eps: 0.1, attack: {use: pgd, steps: 3}, schedule: {use: linear, epochs: 10}}",
                "train.epochs=20",
            ],
            (4, 4),
        ),
    ],
    ids=["supervised", "five steps", "two steps", "growing"],
)
def test_the_passes_of_an_attack_are_counted(settings: list[str], passes: tuple[int, int], tmp_path: Path) -> None:
    said = dry_run(small_config(tmp_path / "run", *settings))
    forwards, backwards = passes
    assert f"a step makes {forwards} forward and {backwards} backward passes of each image" in said


def test_memory_without_numbers_is_that_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = dry_run(small_config(tmp_path / "run"))
    monkeypatch.setattr(dry_running, "LONGEST", 0.0)
    without = dry_run(small_config(tmp_path / "run"))
    assert "measured without numbers" in without
    assert "time: not measured here" in without
    for part in ("parameters", "gradients", "optimiser"):
        assert numbers(without, part) == numbers(said, part)
    (kept,), (there,) = (numbers(text, "activations of 8 images") for text in (without, said))
    assert kept.split()[1] == there.split()[1]
    assert float(kept.split()[0]) == pytest.approx(float(there.split()[0]), rel=0.25)  # attention keeps more there


def test_a_step_that_does_not_fit_is_tried_with_fewer_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lack of memory is simulated."""
    train_batch = Trainer.train_batch

    def on_a_small_device(self: Trainer, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
        if len(x) > 4:
            raise torch.OutOfMemoryError("out of memory")
        return train_batch(self, x, y, number)

    monkeypatch.setattr(Trainer, "train_batch", on_a_small_device)
    said = dry_run(small_config(tmp_path / "run"))
    assert "note: a step with 8 images does not fit into the memory of this device." in said
    assert "measured with 4 images a step" in said


def test_splits_of_augmix_count_as_images(tmp_path: Path) -> None:
    said = dry_run(small_config(tmp_path / "run", "data.aug_splits=3", "data.aa=augmix-m5-w4-d2"))
    assert re.search(r"activations of 24 images", said)


def test_operations_are_counted_as_by_hand() -> None:
    config = read_recipe(RECIPE, SMALL)
    model = create_model(config.model.name, **config.model.kwargs).model
    tokens, width, hidden = 16, 24, model.blocks[0].mlp.fc1.out_features
    linear = 2 * tokens * (4 * width * width + 2 * width * hidden)  # qkv and proj; both layers of the MLP
    attention = 2 * 2 * tokens * tokens * width  # scores and values
    first, head = 2 * tokens * model.patch_embed.proj.weight.numel(), 2 * width * model.num_classes
    assert forward_flops(config) == linear + attention + first + head


def test_what_autograd_keeps_is_counted_once_and_without_weights() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 5))
    x = torch.rand(4, 10, requires_grad=True)
    kept = SavedTensors(model)
    with kept.hooks:
        model(x).sum().backward()
    assert kept.peak == 4 * (4 * 10 + 4 * 20)  # the input, and tanh's output, which two layers share
    assert kept.now == 0


def test_sizes_are_spoken() -> None:
    assert [format_bytes(n) for n in (0, 1536, 3 * 2**30, 2**41)] == ["0.0 B", "1.5 KiB", "3.0 GiB", "2,048.0 GiB"]


@pytest.mark.parametrize(("share", "busy"), [(1.0, False), (0.5, True)])
def test_a_busy_machine_is_named_with_the_speed_that_it_would_have_alone(
    share: float, busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which this thread computes for a share of the time."""
    clock = {"now": 0.0}

    def train_batch(self: Trainer, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        clock["now"] += len(x) / 100

    monkeypatch.setattr(Trainer, "train_batch", train_batch)
    monkeypatch.setattr(dry_running.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(dry_running.time, "thread_time", lambda: clock["now"] * share)
    said = dry_run(small_config(tmp_path / "run"))
    assert "time: 100.0 images/s on one cpu" in said
    assert ("busy with other work: alone it would be about 200.0 images/s" in said) == busy


def test_a_dry_run_changes_no_dice(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    config = small_config(tmp_path / "run")
    dry_run(replace(config, data=DataConfig(batch_size=8, train_num_samples=48)))
    assert torch.equal(torch.get_rng_state(), before)
