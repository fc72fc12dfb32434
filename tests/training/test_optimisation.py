"""Optimisation: rates that move and scale, gradients that add up, averages that follow, precisions that train."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from small_run import rows_of, small_config, small_run, small_session, state_of
from vitruvius._errors import ConfigError, DataError
from vitruvius._processes import Process
from vitruvius._yaml import read_yaml
from vitruvius.data import eval_loader
from vitruvius.data.loading import held_out
from vitruvius.evaluation import evaluate
from vitruvius.models import load_model
from vitruvius.training import loop
from vitruvius.training.checkpoint import Checkpoint
from vitruvius.training.loop import Trainer
from vitruvius.training.selection import Selection
from vitruvius.training.session import Session, with_rate


def weights(session: Session) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in session.model.state_dict().items()}


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The learning rate of every update, as the optimiser sees it."""
    seen: list[float] = []
    update = Trainer.update

    def noting(self: Trainer) -> None:
        seen.append(self.session.optimizer.param_groups[0]["lr"])
        update(self)

    monkeypatch.setattr(Trainer, "update", noting)
    return seen


def test_the_rate_follows_warmup_and_cosine_at_every_update(tmp_path: Path, rates: list[float]) -> None:
    settings = ("train.epochs=3", "train.warmup_epochs=1", "train.warmup_lr=1e-4", "train.lr=1e-2", "train.min_lr=1e-5")
    run = small_run(tmp_path / "run", *settings)
    warm = [1e-4 + (1e-2 - 1e-4) * step / 4 for step in range(4)]
    cosine = [1e-5 + 0.5 * (1e-2 - 1e-5) * (1 + math.cos(math.pi * step / 12)) for step in range(4, 12)]
    assert rates == pytest.approx(warm + cosine)
    assert [row["lr"] for row in rows_of(run)] == pytest.approx([rates[3], rates[7], rates[11]])


def test_with_accumulation_the_schedule_counts_updates(tmp_path: Path, rates: list[float]) -> None:
    small_run(tmp_path / "run", "train.grad_accum_steps=3", "train.lr=1e-2", "train.min_lr=0")
    # four batches: an update of three and one of one
    assert rates == pytest.approx([0.5e-2 * (1 + math.cos(math.pi * step / 4)) for step in range(4)])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["train.sched=none"], [1, 1, 1, 1]),
        (["train.sched=step", "train.decay_epochs=2", "train.decay_rate=0.1"], [1, 1, 0.1, 0.1]),
        (["train.sched=multistep", "train.decay_milestones=[1, 3]", "train.decay_rate=0.1"], [1, 0.1, 0.1, 0.01]),
        (["train.cooldown_epochs=1", "train.epochs=3", "train.min_lr=0.5"], [None, None, None, 0.5]),
    ],
)
def test_other_schedules_do_what_they_say(
    settings: list[str], expected: list[float | None], tmp_path: Path, rates: list[float]
) -> None:
    settings = ["train.epochs=4", "train.opt=sgd", "train.lr=1", "data.train_num_samples=28", *settings]
    small_run(tmp_path / "run", *settings)  # 21 images to train on: two batches an epoch
    for rate, wanted in zip(rates[::2], expected, strict=True):
        assert wanted is None or rate == pytest.approx(wanted)


def test_accumulated_gradients_are_those_of_the_large_batch(tmp_path: Path) -> None:
    settings = ("train.opt=sgd", "train.lr=0.1", "data.train_num_samples=44")  # 33 images: 4 batches of 8, or 2 of 16
    large = small_session(*settings, "data.batch_size=16")
    small = small_session(*settings, "data.batch_size=8", "train.grad_accum_steps=2")
    rows = [Trainer(session).train_epoch() for session in (large, small)]
    assert large.updates == small.updates == 2
    assert rows[0]["train_loss"] == pytest.approx(rows[1]["train_loss"], rel=1e-6)
    torch.testing.assert_close(weights(small), weights(large), rtol=1e-5, atol=1e-6)


def test_a_last_group_of_fewer_batches_is_their_mean() -> None:
    settings = ("train.opt=sgd", "train.lr=0.1", "data.train_num_samples=12")  # 9 images: one batch of 8
    plain, grouped = (small_session(*settings, f"train.grad_accum_steps={every}") for every in (1, 2))
    for session in (plain, grouped):
        Trainer(session).train_epoch()
    torch.testing.assert_close(weights(grouped), weights(plain), rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["norm", "value", "agc"])
def test_gradients_are_clipped_as_asked(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = small_session(f"train.clip_mode={mode}", "train.clip_grad=1e-3", "train.opt=sgd")
    step, seen = session.optimizer.step, []

    def noting(*arguments: Any) -> Any:
        seen.append({name: p.grad.clone() for name, p in session.model.model.named_parameters()})
        return step(*arguments)

    monkeypatch.setattr(session.optimizer, "step", noting)
    Trainer(session).train_epoch()
    for gradients in seen:
        if mode == "norm":
            total = torch.stack([g.norm() for g in gradients.values()]).norm()
            assert total == pytest.approx(1e-3, rel=1e-3)
        elif mode == "value":
            assert max(float(g.abs().max()) for g in gradients.values()) == pytest.approx(1e-3)
        else:  # each row at most a thousandth of its weights; the head goes free
            assert gradients["blocks.0.mlp.fc1.weight"].norm() < 1e-2 < gradients["head.weight"].norm()


def test_the_average_is_an_exponential_one_and_is_judged_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history: list[torch.Tensor] = []
    update = Trainer.update

    def noting(self: Trainer) -> None:
        update(self)
        history.append(self.session.model.model.head.weight.detach().clone())

    monkeypatch.setattr(Trainer, "update", noting)
    run = small_run(tmp_path / "run", "train.model_ema=true", "train.model_ema_decay=0.7")
    average = history[0]  # the first update is copied, as upstream does
    for weight in history[1:]:
        average = 0.7 * average + 0.3 * weight
    torch.testing.assert_close(state_of(run)["ema"]["head.weight"], average)
    model = load_model(run, best=False)
    model.model.load_state_dict(state_of(run)["ema"])
    config = small_config(run)
    chosen = held_out(config.data, 0.25, seed=config.seed)
    loader = eval_loader(config.data, input_size=model.data_config, split="train", only=chosen)
    assert rows_of(run)[-1]["ema_accuracy"] == evaluate(model, loader)["clean"].accuracy


def test_weights_are_chosen_by_images_kept_from_training(tmp_path: Path) -> None:
    session = small_session()
    assert session.val_loader.name == "digits/train"
    chosen = {int(i) for _, _, ids in session.val_loader.with_ids() for i in ids}
    trained = set()
    for epoch in range(3):
        session.train_loader.set_epoch(epoch)
        trained |= {int(i) for _, _, ids in session.train_loader.with_ids() for i in ids}
    assert len(chosen) == 12
    assert len(trained) == 36
    assert not chosen & trained


def test_without_a_held_out_part_the_validation_split_chooses(tmp_path: Path) -> None:
    session = small_session("train.holdout=0")
    assert session.val_loader.name == "digits/validation"
    assert session.train_loader.num_images == 48


def test_the_best_weights_are_those_of_the_best_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    scores = iter([0.2, 0.9, 0.5, 0.9])
    monkeypatch.setattr(
        Selection, "judge", lambda self, progress, attacking: {"val_accuracy": next(scores), "val_loss": 1.0}
    )
    kept: dict[int, torch.Tensor] = {}
    save = Checkpoint.save

    def noting(self: Checkpoint, *, ended: bool) -> None:
        kept[self.session.epoch - 1] = self.session.model.model.head.weight.detach().clone()
        save(self, ended=ended)

    monkeypatch.setattr(Checkpoint, "save", noting)
    run = small_run(tmp_path / "run", "train.epochs=4")
    torch.testing.assert_close(load_model(run).model.head.weight.data, kept[1], rtol=0, atol=0)
    torch.testing.assert_close(load_model(run, best=False).model.head.weight.data, kept[3], rtol=0, atol=0)


def test_epochs_without_a_look_choose_nothing(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", "train.epochs=3", "train.evaluate_every=2", "train.model_ema=true")
    assert ["val_accuracy" in row for row in rows_of(run)] == [False, True, True]
    assert state_of(run)["best_epoch"] in (1, 2)


@pytest.mark.parametrize(
    "settings",
    [
        ["train.precision=bf16"],
        ["data.mixup=0.8", "data.cutmix=1.0", "data.smoothing=0.1"],
        ["train.grad_checkpointing=true"],
        ["train.channels_last=true"],
        ["train.layer_decay=0.7"],
        ["task={use: supervised, binary: true}"],
        ["train.opt=lion", "train.lr=1e-4"],
    ],
    ids=lambda settings: settings[0],
)
def test_training_works_with(settings: list[str], tmp_path: Path) -> None:
    rows = rows_of(small_run(tmp_path / "run", "train.epochs=4", *settings))
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]


def test_checkpointed_activations_change_nothing(tmp_path: Path) -> None:
    plain, thrifty = small_session(), small_session("train.grad_checkpointing=true")
    for session in (plain, thrifty):
        Trainer(session).train_epoch()
    torch.testing.assert_close(weights(thrifty), weights(plain), rtol=0, atol=1e-7)


def test_bf16_computes_in_bf16_and_keeps_float32_weights(tmp_path: Path) -> None:
    session = small_session("train.precision=bf16")
    with session.autocast():
        assert session.model(torch.rand(1, 3, 8, 8)).dtype == torch.bfloat16
    assert next(session.model.parameters()).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_trains_and_is_saved_as_the_plain_one(tmp_path: Path) -> None:
    torch._dynamo.reset()
    settings = ["train.epochs=1", "train.model_ema=true", "data.train_num_samples=24"]
    plain = small_run(tmp_path / "plain", *settings)
    compiled = small_run(tmp_path / "compiled", *settings, "train.compile=eager")
    torch.testing.assert_close(state_of(compiled)["model"], state_of(plain)["model"], rtol=1e-5, atol=1e-6)
    assert rows_of(compiled)[0]["val_accuracy"] == rows_of(plain)[0]["val_accuracy"]


def test_the_penalty_of_stages_is_trained_and_told(tmp_path: Path) -> None:
    settings = ["attention=[{parts: [{use: low_rank, rank: 1}]}]", "task={use: supervised, penalty: 0.1}"]
    rows = rows_of(small_run(tmp_path / "run", "train.epochs=3", *settings))
    assert all(row["train_penalty"] > 0 for row in rows)


@pytest.mark.parametrize("every", [0, 1, 3, 4])
def test_a_multiple_is_crossed_also_where_an_update_jumps_over_it(every: int) -> None:
    for before, now in itertools.combinations(range(13), 2):
        assert loop.crossed(every, before, now) == any(every and n % every == 0 for n in range(before + 1, now + 1))


def test_smoothing_of_the_data_reaches_the_task(tmp_path: Path) -> None:
    assert small_session("data.smoothing=0.3").task.criterion.smoothing == 0.3
    own = small_session("data.smoothing=0.3", "task={use: supervised, smoothing: 0.2}")
    assert own.task.criterion.smoothing == 0.2


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, list(range(1, 13))), (math.inf, [10, 12])])
def test_slow_batches_are_shown_one_by_one_and_quick_ones_ten_at_a_time(
    seconds: float, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[float] = []
    monkeypatch.setattr(loop, "LOOK_SECONDS", seconds)
    session = small_session("data.train_num_samples=128", "data.batch_size=8")  # 96 images: 12 batches
    Trainer(session, progress=lambda done, total, text="": shown.append(done)).train_epoch()
    assert shown == expected


def test_the_metrics_do_not_depend_on_when_somebody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for seconds in (0.0, math.inf):
        monkeypatch.setattr(loop, "LOOK_SECONDS", seconds)
        rows.append(rows_of(small_run(tmp_path / str(seconds), "data.train_num_samples=320", "train.epochs=2")))
    assert rows[0] == rows[1]


def folder_session(tmp_path: Path, *overrides: str, broken: tuple[int, ...]) -> Session:
    """Six images of two classes, of which some cannot be read, one to a batch."""
    for split, number in itertools.product(("train", "validation"), range(6)):
        path = tmp_path / "images" / split / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(path)
        if split == "train" and number in broken:
            path.write_bytes(b"no picture")
    data = ("data.dataset=folder", f"data.root={tmp_path / 'images'}", "data.batch_size=1", "data.broken=skip")
    small = ("data.train_num_samples=null", "data.val_num_samples=null", "data.cache=none", "train.holdout=0")
    return small_session(*data, *small, "data.workers=0", *overrides)


@pytest.mark.parametrize("broken", [(2,), (0, 1, 2, 3, 4)])
def test_a_batch_without_a_readable_image_keeps_its_number_and_its_place_in_the_schedule(
    broken: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = folder_session(tmp_path, "train.grad_accum_steps=2", "train.clip_grad=1", broken=broken)
    seen: list[int] = []

    train_batch = Trainer.train_batch

    def noting(self: Trainer, x: torch.Tensor, y: torch.Tensor, number: int) -> Any:
        seen.append(number)
        return train_batch(self, x, y, number)

    monkeypatch.setattr(Trainer, "train_batch", noting)
    loader: Any = session.train_loader
    order = loader.order.epoch(0)[0].tolist()
    lost = [index for index in range(6) if any(f"/{n}.png" in loader.images.describe(index) for n in broken)]
    Trainer(session).train_epoch()
    assert seen == [number for number, index in enumerate(order) if index not in lost]
    assert (session.batch, session.updates) == (6, 3)
    assert all(p.grad is None for p in session.model.parameters())  # no group is left over for the next epoch


def test_one_of_several_processes_with_nothing_to_read_says_so_instead_of_letting_the_others_wait(
    tmp_path: Path,
) -> None:
    session = folder_session(tmp_path, broken=tuple(range(6)))
    session.process = Process(device=torch.device("cpu"), rank=1, world_size=2)
    with pytest.raises(DataError, match=r"none of the images of batch 1 of process 2 of 2 could be read"):
        Trainer(session).train_epoch()


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
