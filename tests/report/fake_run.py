"""Run folders as training and evaluation leave them, for tests."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

from vitruvius.analysis.recording import Examples, SiteMaps, save_examples
from vitruvius.corruptions.base import BENCHMARK
from vitruvius.evaluation.base import read_logits
from vitruvius.evaluation.ledger import Ledger
from vitruvius.evaluation.metrics import alexnet
from vitruvius.evaluation.result import wilson
from vitruvius.evaluation.shift_report import reduce_entries
from vitruvius.evaluation.threats import Entry

SITES = 4
HEADS = 3


def write_run(
    folder: Path,
    *,
    parts: list[dict[str, Any]] | None = None,
    seed: int = 0,
    epochs: int = 30,
    robust: float = 0.5,
    patch: int = 1,
    images: int = 6,
    shifts: bool = False,
) -> Path:
    """A small ViT on digits: `robust` says how slowly accuracy falls with ε."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    (folder / "config.yaml").write_text(yaml.safe_dump(_config(parts, seed, epochs, patch), sort_keys=False))
    rows = [_epoch(random, epoch) for epoch in range(epochs)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "report.json").write_text(json.dumps(_evaluation(random, robust)))
    if shifts:
        write_shifts(folder / "evaluation" / "shifts", np.random.default_rng(seed), robust)
    (folder / "model.json").write_text(json.dumps(_model(parts, patch)))
    _write_attention(folder, random, patch, images)
    save_file(_weights(parts), folder / "best.safetensors")
    return folder


def _config(parts: list[dict[str, Any]] | None, seed: int, epochs: int, patch: int) -> dict[str, Any]:
    return {
        "model": {"name": "vit_digits", "weights": None, "patch_size": patch, "num_classes": 10},
        "attention": [{"where": "blocks.*.attn", "parts": parts}] if parts else [],
        "data": {"dataset": "digits", "batch_size": 128},
        "task": {"use": "supervised", "smoothing": 0.1},
        "train": {"epochs": epochs, "lr": 0.002, "optimizer": "adamw", "weight_decay": 0.05, "ema": 0.99},
        "seed": seed,
        "versions": {"python": "3.11.9", "torch": "2.15.0", "timm": "1.0.30", "vitruvius": "0.1.0"},
        "started": "2026-03-14T09:26:53+01:00",
    }


def _epoch(random: np.random.Generator, epoch: int) -> dict[str, float]:
    names = ("train_loss", "train_accuracy", "val_loss", "val_accuracy", "ema_accuracy", "lr", "seconds")
    return {"epoch": epoch, **{name: float(random.random()) for name in names}, "images_per_second": 740.0}


def _evaluation(random: np.random.Generator, robust: float) -> dict[str, Any]:
    n, clean = 360, 0.955 + 0.02 * float(random.random())
    threats = [_threat("clean", "clean", None, clean, n)]
    for steps in (2, 4, 8, 16, 32):
        eps = steps / 255
        spec = f"pgd(eps={steps}/255, steps=10)"
        threats.append(_threat("pgd" if steps == 2 else spec, spec, eps, clean * math.exp(-steps / 40 / robust), n))
    threats.append(_threat("fgsm", "fgsm(eps=16/255)", 16 / 255, clean * math.exp(-16 / 62 / robust), n))
    worst = {**threats[-2], "name": "worst case", "spec": "worst case of all", "eps": None}
    return {"data": "digits/test", "num_images": n, "threats": threats, "worst_case": worst}


def write_shifts(folder: Path, random: np.random.Generator, robust: float) -> None:
    """Reports of corruptions, of two natural sets and of images from outside, from ledgers with plausible rows."""
    ledger = Ledger()
    clean = _answers(random, 400, 2.5)
    entries = [Entry(f"{one} {s}", one, None, s) for one in BENCHMARK for s in range(1, 6)]
    for place, entry in enumerate(entries):
        hurt = entry.severity * (0.3 + 0.5 * (place // 5 % 4) / 3) * (1.1 - 0.5 * robust)
        ledger.add(entry.spec, _answers(random, 400, 2.5 - hurt, sure=1.6))
    corrupted = reduce_entries(ledger, entries, name="imagenet-c", baseline=alexnet(), clean_error=0.05, clean=clean)
    corrupted.save(folder / "imagenet-c" / "report.json")
    for name, outside in (("imagenet-a", False), ("imagenet-o", True)):
        ledger.add("imagenet of the same classes", clean)
        ledger.add(name, _answers(random, 300, 0.2 + robust, sure=1.8))
        parts = [Entry(name, name), *([Entry("imagenet of the same classes", "known")] if outside else [])]
        report = reduce_entries(ledger, parts, name=name, outside=[name] if outside else [])
        dataclasses.replace(report, missing=["n01440764"]).save(folder / name / "report.json")


def _answers(random: np.random.Generator, n: int, skill: float, *, sure: float = 1.1) -> dict[str, torch.Tensor]:
    """Rows of a model that finds the right one of ten classes the better the greater its skill."""
    labels = torch.arange(n) % 10
    logits = torch.from_numpy(random.normal(0, 1, (n, 10)))
    logits[torch.arange(n), labels] += skill
    return {"id": torch.arange(n), "label": labels, **read_logits(sure * 1.4 * logits, labels)}


def _threat(name: str, spec: str, eps: float | None, accuracy: float, n: int) -> dict[str, Any]:
    correct = round(accuracy * n)
    low, high = wilson(correct, n)
    row = {"name": name, "spec": spec, "accuracy": correct / n, "low": low, "high": high, "correct": correct, "n": n}
    row |= {"top5": min(1.0, 0.5 + accuracy / 2), "loss": -math.log(max(accuracy, 0.02))}
    return row | ({"eps": eps} if eps else {})


def _model(parts: list[dict[str, Any]] | None, patch: int) -> dict[str, Any]:
    tokens = (8 // patch) ** 2 + 1
    core = " → ".join(part["use"] for part in parts) if parts else "upstream"
    sizes = {"num_heads": HEADS, "num_queries": tokens, "num_keys": tokens, "key_dim": 16, "value_dim": 16, "dim": 48}
    sites = [
        {"name": f"blocks.{i}.attn", "family": "vit", "attends": "tokens", "core": core, **sizes} for i in range(SITES)
    ]
    return {"parameters": 117_514, "sites": sites}


def _weights(parts: list[dict[str, Any]] | None) -> dict[str, np.ndarray]:
    weights = {f"blocks.{i}.attn.qkv.weight": np.zeros((144, 48), np.float32) for i in range(SITES)}
    if parts and parts[0]["use"] == "low_rank":
        weights |= {f"blocks.{i}.attn.core.low_rank.q.weight": np.zeros((2, HEADS), np.float32) for i in range(SITES)}
    return weights


def _write_attention(folder: Path, random: np.random.Generator, patch: int, count: int) -> None:
    digits, side = load_digits(), 8 // patch
    tokens = side**2 + 1
    shape = (count, HEADS, tokens, tokens)
    maps = {f"blocks.{i}.attn": random.dirichlet(np.ones(tokens), shape[:-1]).astype(np.float32) for i in range(SITES)}
    save_file({site: tensor.mean(0) for site, tensor in maps.items()}, folder / "maps.safetensors")
    labels = [str(label) for label in digits.target[:count]]
    grey = (255 / 16 * digits.images[:count, None]).round().astype(np.uint8)
    examples = Examples(
        images=np.broadcast_to(grey, (count, 3, 8, 8)),
        labels=labels,
        predictions=[*labels[:-1], str((int(labels[-1]) + 3) % 10)],
        sites=[SiteMaps(name=name, maps=one, grid=(side, side), num_prefix_tokens=1) for name, one in maps.items()],
        pictures=[str(place) for place in range(count)],
        threats=[""] * count,
    )
    save_examples(folder, examples)
