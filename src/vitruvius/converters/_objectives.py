"""The objective that another program's options describe: adversarial training, or distillation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Args = Mapping[str, Any]
CLASSES = {"IMNET": 1000, "CIFAR": 100, "CIFAR100": 100, "CIFAR10": 10, "INAT": 8142, "INAT19": 1010}  # of --data-set


def objective(args: Args, notes: list[str]) -> dict[str, Any] | None:
    """The light recipe's --adv-training; radii and steps are given in 1/255 there."""
    kind = args.get("adv_training")
    if not kind:
        return None
    eps = float(_given(args, "attack_eps", 4))
    task: dict[str, Any] = {
        "use": {"trades": "trades"}.get(kind, "adversarial"),
        "eps": eps / 255,
        "norm": _given(args, "attack_norm", "linf"),
        "attack": _attack(args, eps),
    }
    if kind == "trades":
        task["beta"] = float(_given(args, "trades_beta", 6.0))
    if _given(args, "eps_schedule", "constant") != "constant" and args.get("eps_schedule_period"):
        task["coupled"] = False  # the step stays that of the final eps
        task["schedule"] = {"use": args["eps_schedule"], "epochs": args["eps_schedule_period"]}
        if args.get("zero_eps_epochs"):
            task["schedule"] |= {"zero": args["zero_eps_epochs"], "variant": "released"}
    notes.append("there the 1-step training attack chooses the best weights, here PGD-10 (train.select_threat).")
    return task


def distillation(args: Args, notes: list[str]) -> dict[str, Any] | None:
    """DeiT's --distillation-type, or timm's --kd-model-name."""
    if _given(args, "distillation_type", "none") != "none":
        return _deit_distillation(args, notes)
    if args.get("kd_model_name"):
        return _timm_distillation(args, notes)
    return None


def _given(args: Args, name: str, default: Any) -> Any:
    """An option, or the default where it is missing or says nothing; 0 says something."""
    value = args.get(name)
    if value is None or value == "" or value is False:
        return default
    return value


def _attack(args: Args, eps: float) -> dict[str, Any]:
    steps = int(args.get("attack_steps") or 10)  # an attack makes a step, and of some length
    step_size = float(args.get("attack_lr") or 1.5 * eps / steps) / 255
    return {"use": _given(args, "attack", "pgd"), "steps": steps, "step_size": step_size}


def _deit_distillation(args: Args, notes: list[str]) -> dict[str, Any]:
    kind = args["distillation_type"]
    alpha = float(args.get("distillation_alpha", 0.5))
    teacher = _given(args, "teacher_model", "regnety_160")
    path = str(_given(args, "teacher_path", ""))
    if teacher == "regnety_160" and (not path or "fbaipublicfiles.com" in path):
        teacher = "regnety_160.deit_in1k"  # timm's name of the teacher that DeiT published
        path = ""
    task = {"use": "distillation", "teacher": teacher, "kind": kind}
    if path:
        notes.append(f"teacher_path {path}: set task.teacher_weights to a file, or rely on timm's.")
    share = alpha
    if kind == "soft":
        task["temperature"] = float(args.get("distillation_tau", 1.0))
        classes = int(args.get("nb_classes") or CLASSES.get(str(args.get("data_set")), 1000))
        share = alpha / classes
        notes.append(
            f"soft distillation: DeiT divides by the number of classes too, so its weight is {alpha}/{classes}."
        )
    return task | {"task_loss_weight": 1 - alpha, "distill_loss_weight": share}


def _timm_distillation(args: Args, notes: list[str]) -> dict[str, Any]:
    task: dict[str, Any] = {"use": "distillation", "teacher": args["kd_model_name"], "kind": "soft"}
    if args.get("kd_distill_type") == "feature":
        task["kind"] = "feature"
    if args.get("kd_distill_type") == "token":
        notes.append("kd_distill_type token: models with a distillation token use it here without being asked.")
    names = {
        "kd_temperature": "temperature",
        "distill_loss_weight": "distill_loss_weight",
        "task_loss_weight": "task_loss_weight",
    }
    for theirs, ours in names.items():
        if args.get(theirs) is not None:
            task[ours] = float(args[theirs])
    return task
