"""Distillation against timm's own tasks on normalised images; the teacher's frozen life; consistency of AugMix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hardened import small, some_digits
from timm.loss import JsdCrossEntropy
from timm.task import FeatureDistillationTask, LogitDistillationTask
from torch import nn

from vitruvius._checks import in_eval_mode
from vitruvius._errors import ConfigError, DataError
from vitruvius._files import save_tensors
from vitruvius.models import create_model
from vitruvius.models.config import ModelConfig
from vitruvius.surgery.base import inner
from vitruvius.tasks.distillation import Distillation
from vitruvius.tasks.jsd import JSD
from vitruvius.tasks.robust_distillation import RobustDistillation
from vitruvius.training import Config, TrainConfig
from vitruvius.training.session import make_optimizer

TEACHER = {"depth": 1, "embed_dim": 36, "num_heads": 2}


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run folder with a teacher that is wider than the student and normalises otherwise."""
    teacher = create_model("vitruvius/vit_digits", seed=8, mean=(0.4,) * 3, std=(0.3,) * 3, **TEACHER)
    save_tensors(tmp_path / "best.safetensors", inner(teacher).state_dict(), {})
    model = {"name": "vitruvius/vit_digits", "kwargs": TEACHER, "mean": [0.4] * 3, "std": [0.3] * 3}
    (tmp_path / "config.yaml").write_text(f"model: {model}\n".replace("'", '"'))
    return str(tmp_path)


def teacher_of(task: Any) -> nn.Module:
    """The timm model of our teacher, with the statistics where timm's tasks look for them."""
    teacher = inner(task.frozen_teacher.model)
    teacher.pretrained_cfg = {**teacher.pretrained_cfg, "mean": (0.4,) * 3, "std": (0.3,) * 3}
    return teacher


def normalised(x: torch.Tensor) -> torch.Tensor:
    return (x - 0.5) / 0.5


@pytest.mark.parametrize(
    ("weights", "temperature"), [({}, 1.0), ({"task_loss_weight": 0.3}, 3.0), ({"distill_loss_weight": 5.0}, 2.0)]
)
def test_soft_distillation_is_timms(run: str, weights: dict[str, float], temperature: float) -> None:
    model, (x, y) = small(), some_digits()
    ours = Distillation(model, teacher=run, temperature=temperature, **weights)
    theirs = LogitDistillationTask(inner(model), teacher_of(ours), temperature=temperature, verbose=False, **weights)
    torch.testing.assert_close(ours(x, y)["loss"], theirs(normalised(x), y)["loss"])


def test_what_a_task_trains_beside_the_model_decays_as_the_weights_do(run: str) -> None:
    model = small()
    task = Distillation(model, teacher=run, kind="feature")
    config = Config(model=ModelConfig(name="vitruvius/vit_digits"), train=TrainConfig(lr=0.1, weight_decay=0.3))
    group = make_optimizer(config, model, task).param_groups[-1]
    assert group["weight_decay"] == 0.3
    assert {id(p) for p in group["params"]} == {id(p) for p in task.own_parameters()}


def test_feature_distillation_is_timms_and_its_projection_is_trained_and_kept(run: str) -> None:
    model, (x, y) = small(), some_digits()
    ours = Distillation(model, teacher=run, kind="feature", distill_loss_weight=2.0)
    theirs = FeatureDistillationTask(inner(model), teacher_of(ours), distill_loss_weight=2.0, verbose=False)
    theirs.trainable_module.projection.load_state_dict(ours.trainable_module.projection.state_dict())
    student_x = normalised(x)
    features = inner(model).forward_head(inner(model).forward_features(student_x), pre_logits=True)
    expected = F.cross_entropy(model(x), y) + 2 * F.mse_loss(
        theirs.trainable_module.projection(features), ours.frozen_teacher.features(x)
    )
    loss = ours(x, y)["loss"]
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(p.grad is not None for p in ours.own_parameters())
    assert len(ours.own_parameters()) == 2
    assert inner(ours.get_trainable_module()) is inner(model)
    assert ours.get_eval_model() is model
    again = Distillation(small(), teacher=run, kind="feature")
    again.load_task_state(ours.get_task_state())
    torch.testing.assert_close(again.get_task_state(), ours.get_task_state())
    same = Distillation(small(embed_dim=36, num_heads=2), teacher=run, kind="feature")
    assert same.own_parameters() == []
    assert same.get_task_state() == {}


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_a_distillation_token_learns_from_the_teacher_as_in_timm(kind: Any, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"patch_size": 16, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 5}
    torch.manual_seed(0)
    student = create_model("deit_tiny_distilled_patch16_224", img_size=32, **sizes).train()
    file = tmp_path / "teacher.safetensors"
    big = create_model("test_vit", num_classes=5)
    save_tensors(file, inner(big).state_dict(), {})
    ours = Distillation(student, teacher="test_vit", teacher_weights=str(file), kind=kind, temperature=2.0)
    x, y = torch.rand(4, 3, 32, 32), torch.arange(4)
    result = ours(x, y)
    main, token = student(x)
    with torch.no_grad():
        lesson = big(F.interpolate(x, (160, 160), mode="bicubic", antialias=True).clamp(0, 1))
    theirs = F.cross_entropy(token, lesson.argmax(1))
    if kind == "soft":
        p, q = (lesson / 2).softmax(1), (token / 2).softmax(1)
        theirs = 4 * (p * (p.log() - q.log())).sum(1).mean()
    torch.testing.assert_close(result["loss"], F.cross_entropy(main, y) + theirs)
    torch.testing.assert_close(result["output"], main)
    with in_eval_mode(student):
        assert isinstance(student(x), torch.Tensor)


def test_the_teacher_stays_in_eval_mode_and_gets_no_gradient(run: str) -> None:
    model, batch = small(), some_digits()
    task = Distillation(model, teacher=run)
    task.train()
    assert not any(module.training for module in task.frozen_teacher.modules())
    task(*batch)["loss"].backward()
    assert all(p.grad is None and not p.requires_grad for p in task.frozen_teacher.parameters())


def test_a_teacher_of_other_classes_or_without_a_name_is_refused(run: str) -> None:
    with pytest.raises(ConfigError, match="the teacher knows 10 classes, the student 4"):
        Distillation(small(num_classes=4), teacher=run)
    with pytest.raises(ConfigError, match="is a run and has weights"):
        Distillation(small(), teacher=run, teacher_weights="best.safetensors")


def test_robust_distillation_teaches_at_the_disturbed_image_what_the_teacher_says_of_the_clean_one(run: str) -> None:
    model, (x, y) = small(), some_digits()
    task = RobustDistillation(
        model,
        teacher=run,
        eps=0.1,
        attack={"use": "pgd", "steps": 1, "random_start": False},
        temperature=2.0,
        task_loss_weight=0.25,
    )
    attacked = task.disturb(x, y)
    p, q = (task.frozen_teacher(x) / 2).softmax(1), (model(attacked) / 2).softmax(1)
    taught = 4 * (p * (p.log() - q.log())).sum(1).mean()
    result = task(x, y)
    torch.testing.assert_close(result["loss"], 0.25 * F.cross_entropy(model(x), y) + 0.75 * taught)  # labels: at x
    torch.testing.assert_close(result["output"], model(attacked))
    assert result["clean_accuracy"] == (model(x).argmax(1) == y).float().mean()
    assert task.threat == ("linf", 0.1)


def test_robust_distillation_looks_at_the_clean_image_only_where_its_label_counts(run: str) -> None:
    (x, y), seen = some_digits(), []
    model = small()
    model.register_forward_hook(lambda model, inputs, output: seen.append(torch.is_grad_enabled() and model.training))
    settings: dict[str, Any] = {"teacher": run, "eps": 0.1, "attack": "pgd:steps=1"}

    def passes(task: RobustDistillation) -> int:
        seen.clear()
        task(x, y)
        return sum(seen)

    assert passes(RobustDistillation(model, **settings)) == 2
    assert passes(RobustDistillation(model, **settings, schedule="linear:epochs=5")) == 1  # x' is x
    alone = RobustDistillation(model, **settings, task_loss_weight=0.0)
    assert passes(alone) == 1
    assert "clean_accuracy" not in alone(x, y)


# AugMix


def test_jsd_is_timms_loss_on_contiguous_splits() -> None:
    model, (x, y) = small(), some_digits(6)
    expected = JsdCrossEntropy(num_splits=3, alpha=12, smoothing=0.1)(model(x), y)
    for labels in (y, y[:2]):
        result = JSD(model, splits=3, smoothing=0.1)(x, labels)
        torch.testing.assert_close(result["loss"], expected)
        assert len(result["output"]) == len(labels)


def test_jsd_is_the_slow_formula_with_soft_labels_and_zero_where_splits_agree() -> None:
    model, (x, y) = small(), some_digits(4)
    soft = 0.6 * F.one_hot(y, 10) + 0.04
    first, second = model(x).softmax(1).split(2)
    middle = (first + second) / 2
    apart = sum((p * (p.log() - middle.log())).sum(1).mean() for p in (first, second)) / 2
    natural = -(soft[:2] * first.log()).sum(1).mean()
    torch.testing.assert_close(JSD(model, splits=2, alpha=3.0)(x, soft)["loss"], natural + 3 * apart)
    twice = torch.cat([x[:2], x[:2]])
    torch.testing.assert_close(JSD(model, splits=2)(twice, soft)["loss"], natural)


def test_batches_that_are_not_made_of_splits_are_refused() -> None:
    with pytest.raises(DataError, match=r"a batch has 5 images and 5 labels; set data.aug_splits=3"):
        JSD(small())(*some_digits(5))
    with pytest.raises(ConfigError, match=r"task.splits = 1"):
        JSD(small(), splits=1)
