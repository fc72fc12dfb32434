"""The objective that another program's options describe: adversarial training, or distillation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Args = Mapping[str, Any]


def objective(args: Args, notes: list[str]) -> dict[str, Any] | None:
    """The light recipe's --adv-training; radii and steps are given in 1/255 there."""
    kind = args.get("adv_training")
    if not kind:
        return None
    steps = int(args.get("attack_steps") or 10)
    eps = float(args.get("attack_eps") or 4)
    task: dict[str, Any] = {
        "use": "trades" if kind == "trades" else "adversarial",
        "eps": eps / 255,
        "norm": args.get("attack_norm") or "linf",
        "attack": {
            "use": args.get("attack") or "pgd",
            "steps": steps,
            "step_size": float(args.get("attack_lr") or 1.5 * eps / steps) / 255,
        },
    }
    if kind == "trades":
        task["beta"] = float(args.get("trades_beta") or 6.0)
    if (args.get("eps_schedule") or "constant") != "constant" and args.get("eps_schedule_period"):
        task["coupled"] = False  # the step stays that of the final eps
        task["schedule"] = {"use": args["eps_schedule"], "epochs": args["eps_schedule_period"]}
        if args.get("zero_eps_epochs"):
            task["schedule"] |= {"zero": args["zero_eps_epochs"], "variant": "released"}
    notes.append("there the 1-step training attack chooses the best weights, here PGD-10 (train.select_threat).")
    return task


def distillation(args: Args, notes: list[str]) -> dict[str, Any] | None:
    """DeiT's --distillation-type, or timm's --kd-model-name."""
    kind = args.get("distillation_type")
    if kind and kind != "none":
        alpha = float(args.get("distillation_alpha", 0.5))
        teacher = args.get("teacher_model") or "regnety_160"
        path = str(args.get("teacher_path") or "")
        if teacher == "regnety_160" and (not path or "fbaipublicfiles.com" in path):
            teacher = "regnety_160.deit_in1k"  # timm's name of the teacher that DeiT published
            path = ""
        task = {"use": "distillation", "teacher": teacher, "kind": kind}
        if path:
            notes.append(f"teacher_path {path}: set task.teacher_weights to a file, or rely on timm's.")
        task |= {"temperature": float(args.get("distillation_tau", 1.0))} if kind == "soft" else {}
        return task | {"task_loss_weight": 1 - alpha, "distill_loss_weight": alpha}
    if args.get("kd_model_name"):
        task = {"use": "distillation", "teacher": args["kd_model_name"]}
        task["kind"] = "feature" if args.get("kd_distill_type") == "feature" else "soft"
        if args.get("kd_distill_type") == "token":
            notes.append("kd_distill_type token: models with a distillation token use it here without being asked.")
        for theirs, ours in (
            ("kd_temperature", "temperature"),
            ("distill_loss_weight",) * 2,
            ("task_loss_weight",) * 2,
        ):
            if args.get(theirs) is not None:
                task[ours] = float(args[theirs])
        return task
    return None
