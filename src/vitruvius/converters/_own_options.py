"""Options that only one program has, as sections of a recipe: KPCA's layers, ViTCoD's low rank, structured starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vitruvius._errors import ConfigError

Args = Mapping[str, Any]
Sections = dict[str, Any]
OWN = {
    "robust", "num_iter", "lambd", "layer", "s_scalar", "svd_type", "mask_path", "mask", "restart_finetune",
}  # fmt: skip
HEADS = {"deit_tiny_patch16_224": 3, "deit_small_patch16_224": 6, "deit_base_patch16_224": 12}
RECONSTRUCTION_HEADS = {"deit_tiny_patch16_224": 6, "vit_tiny_patch16_224": 3}
LEVIT_RANKS = {"LeViT_128": (2, 4, 6), "LeViT_192": (2, 3, 4), "LeViT_256": (2, 4, 4)}
EVERY_BLOCK = "blocks.*.attn"
BLOCKS = 12  # of every DeiT
PSEUDO = {"pseudo_input1": "first", "pseudo_input2": "rest"}
FACEBOOK = {"deit": "fb_in1k", "LeViT": "fb_dist_in1k"}  # folder of dl.fbaipublicfiles.com: timm's tag


def nothing(args: Args, sections: Sections, notes: list[str]) -> None:
    """A program without options of its own."""


def pursuit(args: Args, sections: Sections, notes: list[str]) -> None:
    """--robust --num_iter --lambd --layer: one layer of robust principal components, or all where it is negative."""
    sections["init"] = "skip"
    if not args.get("robust"):
        sections["attention"] = [{"where": EVERY_BLOCK, "parts": ["symmetric"]}]
        return
    rpc = {"use": "rpc", "iterations": int(args.get("num_iter", 1)), "variant": "released"}
    rpc["sparsity"] = float(args.get("lambd", 0.0))
    layer = int(args.get("layer", 0))
    if layer < 0:
        sections["attention"] = [{"where": EVERY_BLOCK, "parts": [rpc]}]
        return
    if layer == 0:
        sections["attention"] = [
            {"where": "blocks.0.attn", "parts": [rpc]},
            {"where": "blocks.[1-9]*.attn", "parts": ["symmetric"]},
        ]
        return
    sections["attention"] = [
        {"where": f"blocks.{block}.attn", "parts": [rpc if block == layer else "symmetric"]} for block in range(BLOCKS)
    ]


def scaled(args: Args, sections: Sections, notes: list[str]) -> None:
    """--s_scalar: a learned number; without it a learned matrix per head."""
    form = "alpha" if args.get("s_scalar") else "matrix"
    sections["init"] = "skip"
    sections["attention"] = [{"where": EVERY_BLOCK, "parts": [{"use": "scaled", "form": form}]}]


def reconstruction(args: Args, sections: Sections, notes: list[str]) -> None:
    """Standardised queries and keys, and the question how well attention reconstructs its queries."""
    name = str(args["model"])
    if name in RECONSTRUCTION_HEADS:
        sections["model"].setdefault("kwargs", {})["num_heads"] = RECONSTRUCTION_HEADS[name]
    sections["init"] = "skip"
    sections["attention"] = [{"where": EVERY_BLOCK, "parts": ["standardised"]}]
    sections["analyses"] = ["reconstruction:variant=reproduction"]


def low_rank(args: Args, sections: Sections, notes: list[str]) -> None:
    """--svd_type, --mask_path (for LeViT --mask), --resume with --restart_finetune: ViTCoD's two steps."""
    _start_from(args, sections, notes)
    kind = args.get("svd_type") or None
    mask = args.get("mask_path") or args.get("mask") or None
    if kind is not None:
        sections["train"]["precision"] = "fp32"  # its loop leaves half precision with every svd_type
        sections["task"]["penalty"] = 1e-4
    rules = _levit_rules(args, kind, mask) if args["model"] in LEVIT_RANKS else _deit_rules(args, kind, mask)
    if rules:
        sections["attention"] = rules


def _start_from(args: Args, sections: Sections, notes: list[str]) -> None:
    """The weights of --resume: Facebook's by timm's tag, a run's as they are; a new optimiser in both cases."""
    model = sections["model"]
    if model["name"].startswith("LeViT"):
        model["name"] = model["name"].lower()
    start = str(args.get("resume") or "")
    if not start:
        return
    published = re.fullmatch(r"https?://dl\.fbaipublicfiles\.com/(deit|LeViT)/.*\.pth", start)
    if published:
        model |= {"name": f"{model['name']}.{FACEBOOK[published.group(1)]}", "pretrained": True}
        return
    model["weights"] = start
    if not args.get("restart_finetune"):
        notes.append("resume without restart_finetune also restores optimiser and epoch there; here the weights only.")


def _deit_rules(args: Args, kind: str | None, mask: str | None) -> list[dict[str, Any]]:
    parts = _squeezed(kind, -(-HEADS.get(str(args["model"]), 0) // 2) or None) + _masked(mask)
    return [{"where": EVERY_BLOCK, "parts": parts}] if parts else []


def _levit_rules(args: Args, kind: str | None, mask: str | None) -> list[dict[str, Any]]:
    rules = []
    for stage, rank in enumerate(LEVIT_RANKS[str(args["model"])]):
        parts = _squeezed(kind, rank) + _masked(mask)
        if parts:
            rules.append({"where": f"stages.{stage}.blocks.*.attn", "parts": parts})
    if mask:
        rules.append({"where": "stages.*.downsample.*", "parts": _masked(mask)})
    return rules


def _squeezed(kind: str | None, rank: int | None) -> list[dict[str, Any]]:
    if kind is None:
        return []
    if kind in ("single_head", "mix_head"):
        return [{"use": "truncated", "mode": kind}]
    tensors = {"mix_head_fc_qk": "qk", "mix_head_fc_q": "q", "mix_head_fc_k": "k"}
    if kind not in tensors:
        raise ConfigError(f"svd_type = {kind!r}; ViTCoD has single_head, mix_head, {', '.join(tensors)}.")
    part: dict[str, Any] = {"use": "low_rank", "reconstruction": "released", "start": "released"}
    if rank is not None:
        part["rank"] = rank
    if tensors[kind] != "qk":
        part["tensors"] = tensors[kind]
    return [part]


def _masked(mask: str | None) -> list[dict[str, Any]]:
    return [] if mask is None else [{"use": "mask", "file": mask}]


def structured_start(args: Args, sections: Sections, notes: list[str]) -> None:
    """model_kwargs weight_init, sin_pe, pseudo_input1, pseudo_input2, init_once of structured_init's fork of timm."""
    kwargs = sections["model"].get("kwargs", {})
    wanted = {name: kwargs.pop(name) for name in ("weight_init", "sin_pe", "init_once", *PSEUDO) if name in kwargs}
    if wanted.get("sin_pe"):
        sections["model"]["positions"] = "sincos"
    if "weight_init" not in wanted:
        return
    start = _start_named(str(wanted["weight_init"] or ""))
    if isinstance(start, dict) and start["use"] == "impulse_optimised":
        start |= _optimisation(wanted)
    sections["init"] = start


def _optimisation(wanted: dict[str, Any]) -> dict[str, Any]:
    """Settings of the released optimisation, as far as they are given."""
    settings = {ours: wanted[theirs] for theirs, ours in PSEUDO.items() if theirs in wanted}
    if "init_once" in wanted:
        settings["shared"] = bool(wanted["init_once"])
    return settings


def _start_named(word: str) -> str | dict[str, Any]:
    """`mimetic0.7_0.7`, `impulse3`, or one of timm's own words."""
    plain = {"": "timm", "skip": "skip", "jax": "jax", "moco": "moco"}
    if word == "jax_nlhb":
        return {"use": "jax", "negative_log_head_bias": True}
    if word in plain:
        return plain[word]
    if found := re.fullmatch(r"mimetic([\d.]+)_([\d.]+)", word):
        alpha, beta = (float(number) for number in found.groups())
        return {"use": "mimetic", "variant": "released", "alpha": alpha, "beta": beta, "base": "skip"}
    if found := re.fullmatch(r"impulse(\d+)", word):
        return {"use": "impulse_optimised", "kernel": int(found.group(1)), "tolerance": 0, "base": "skip"}
    raise ConfigError(f"weight_init = {word!r}; known: skip, jax, jax_nlhb, moco, mimetic<a>_<b>, impulse<size>.")
