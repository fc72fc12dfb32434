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
    attack: dict[str, Any] = {"use": args.get("attack") or "pgd", "steps": int(args.get("attack_steps") or 10)}
    if args.get("attack_lr"):
        attack["step_size"] = float(args["attack_lr"]) / 255
    task: dict[str, Any] = {
        "use": "trades" if kind == "trades" else "adversarial",
        "eps": float(args.get("attack_eps") or 4) / 255,
    }
    task |= {"norm": args.get("attack_norm") or "linf", "attack": attack, "coupled": False}
    if kind == "trades":
        task["beta"] = float(args.get("trades_beta") or 6.0)
    if (args.get("eps_schedule") or "constant") != "constant" and args.get("eps_schedule_period"):
        zero = {"zero": args["zero_eps_epochs"]} if args.get("zero_eps_epochs") else {}
        length = {"epochs": args["eps_schedule_period"], "variant": "released"}
        task["schedule"] = {"use": args["eps_schedule"], **length, **zero}
    notes.append("there the 1-step training attack chooses the best weights, here PGD-10 (train.select_threat).")
    return task


def distillation(args: Args, notes: list[str]) -> dict[str, Any] | None:
    """DeiT's --distillation-type, or timm's --kd-model-name."""
    kind = args.get("distillation_type")
    if kind and kind != "none":
        alpha = float(args.get("distillation_alpha", 0.5))
        task = {"use": "distillation", "teacher": args.get("teacher_model") or "regnety_160", "kind": kind}
        if args.get("teacher_path"):
            notes.append(f"teacher_path {args['teacher_path']}: set task.teacher_weights to a file, or rely on timm's.")
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
