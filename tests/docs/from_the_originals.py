"""A number of each block of docs/from_the_originals.md, and the same by the original's formula: (ours, by hand).

Called in a folder where the commands of the block have been run. B batch, H heads, N tokens, D width of a head.
"""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from small_run import all_images
from vitruvius import load_model
from vitruvius._files import load_tensors
from vitruvius._processes import Process
from vitruvius._registry import read_spec
from vitruvius._yaml import read_yaml
from vitruvius.attacks import PGD
from vitruvius.evaluation import load_ledger
from vitruvius.listing import find_recipe
from vitruvius.request import open_request
from vitruvius.surgery import record
from vitruvius.training import read_recipe
from vitruvius.training.session import open_session

Pair = tuple[float, float]


def tokens(model: nn.Module, count: int = 5) -> Tensor:
    """What could enter the first block, (1, N, C)."""
    return torch.randn(1, count, model.model.embed_dim, generator=torch.Generator().manual_seed(0))


def heads_of(attention: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (1, H, N, D) by timm's layout of qkv."""
    q, k, v = attention.qkv(x).reshape(1, x.shape[1], 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    return q, k, v


def merged(attention: nn.Module, out: Tensor) -> float:
    """The norm of what the layer answers, from the heads' outputs (1, H, N, D)."""
    return float(attention.proj(out.transpose(1, 2).flatten(2)).norm())


@torch.no_grad()
def robust_attention(home: Path) -> Pair:
    """Robust/softmax.py, four iterations, λ = 4; and 1e-6 as the rate of every epoch."""
    rows = [json.loads(line) for line in (home / "runs/rpc_as_there/metrics.jsonl").read_text().splitlines()]
    assert {row["lr"] for row in rows} == {1e-6}
    model = load_model("runs/rpc_as_there").eval()
    attention = model.model.blocks[0].attn
    x = tokens(model)
    assert attention.qkv.weight.shape[0] == 2 * x.shape[-1]
    k, v = nn.functional.linear(x, attention.qkv.weight, attention.qkv.bias).chunk(2, -1)
    k, v = (part.reshape(1, 5, attention.num_heads, -1).transpose(1, 2) for part in (k, v))
    mu = (k.shape[2] * x.shape[-1] / 4) / k.abs().sum((-1, -2), keepdim=True)
    low = y = torch.zeros_like(k)
    for _ in range(4):
        z = k - low + y / mu
        sparse = z.sign() * (z.abs() - 4 * mu).clamp(min=0)
        clean = k - sparse - y / mu
        low = (clean @ clean.transpose(-1, -2) * k.shape[-1] ** -0.5).softmax(-1) @ v
        y = y + mu * (k - low - sparse)
    return float(attention(x).norm()), merged(attention, low)


@torch.no_grad()
def scaled_by_a_matrix(home: Path) -> Pair:
    """Scaled_Attention/softmax.py: A (I − S) V."""
    model = load_model("runs/scaled_matrix").eval()
    attention = model.model.blocks[0].attn
    matrix = attention.core.parts["scaled"].matrix
    x = tokens(model, matrix.shape[-1])
    q, k, v = heads_of(attention, x)
    matrix.copy_(0.1 * torch.randn(matrix.shape, generator=torch.Generator().manual_seed(1)))
    out = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ (torch.eye(x.shape[1]) - matrix) @ v
    return float(attention(x).norm()), merged(attention, out)


@torch.no_grad()
def scaled_by_alpha(home: Path) -> Pair:
    """The same with --s_scalar: S is α times the symmetric map of the keys."""
    model = load_model("runs/scaled_alpha").eval()
    attention = model.model.blocks[0].attn
    attention.core.parts["scaled"].alpha.fill_(0.3)
    x = tokens(model)
    q, k, v = heads_of(attention, x)
    matrix = 0.3 * (k @ k.mT * k.shape[-1] ** -0.5).softmax(-1)
    out = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ (torch.eye(5) - matrix) @ v
    return float(attention(x).norm()), merged(attention, out)


def calibration_without_the_last_bin(home: Path) -> Pair:
    """calibration_tools.py: bins of 100 images by confidence; the last one takes the rest and is left out."""
    folder = home / "runs/rpc_deit_tiny/evaluation/shifts/imagenet-a"
    report = json.loads((folder / "report.json").read_text())
    columns = load_ledger(folder)["imagenet-a"]
    order = columns["confidence"].argsort()
    confidence, right = columns["confidence"][order].double(), columns["correct"][order].double()
    bins = [(0, 100), (100, len(right))]
    total = sum(
        (end - start) / len(right) * (confidence[start:end].mean() - right[start:end].mean()) ** 2
        for start, end in bins[:-1]
    )
    return report["parts"][0]["calibration"]["rms_as_released"], math.sqrt(total)


def accuracy_under_their_pgd(home: Path) -> Pair:
    """CleverHans on normalised images: 20 steps of 0.15 ε against the model's own answers, not clipped."""
    with open_request("runs/rpc_deit_tiny", ["data.root=imagenet"], images=2, labels=False, alone=True) as request:
        x, y, ids = all_images(request.loader.with_ids())
        pixels = request.model
    model, x = pixels.model, (x - pixels.mean) / pixels.std
    attack = PGD(eps=0.1, bounds=(-torch.inf, torch.inf))
    point, answer = attack.start(x, attack.dice(ids)), model(x).argmax(1)
    for _ in range(20):
        point = point.detach().requires_grad_()
        grad = torch.autograd.grad(cross_entropy(model(point), answer), point)[0]
        point = x + (point + 0.15 * 0.1 * grad.sign() - x).clamp(-0.1, 0.1)
    right = (model(point).argmax(1) == y).double().mean()
    (file,) = (home / "runs/attacked_by_pgd").rglob("normalised_predicted_*.safetensors")
    assert torch.equal(load_tensors(file)[0]["prediction"], model(point).argmax(1))
    return float(read("runs/attacked_by_pgd/table.csv")[0]["accuracy"]), float(right)


def squeezed(attention: nn.Module, z: Tensor, name: str) -> Tensor:
    """q or k (1, H, N, D) after one linear map of the heads down and one up."""
    state = attention.core.parts["low_rank"].state_dict()
    heads_last = z.flatten(2).transpose(1, 2)  # (1, N D, H)
    for layer in "01":
        heads_last = nn.functional.linear(heads_last, state[f"{name}.{layer}.weight"], state[f"{name}.{layer}.bias"])
    return heads_last.transpose(1, 2).reshape(z.shape)


@torch.no_grad()
def heads_through_the_auto_encoder(home: Path) -> Pair:
    """timm/vision_transformer.py, mix_head_fc_qk."""
    model = load_model("runs/low_rank_as_there").eval()
    attention = model.model.blocks[0].attn
    x = tokens(model)
    q, k, v = heads_of(attention, x)
    logits = squeezed(attention, q, "q") @ squeezed(attention, k, "k").mT * q.shape[-1] ** -0.5
    return float(attention(x).norm()), merged(attention, logits.softmax(-1) @ v)


@torch.no_grad()
def average_map(home: Path) -> Pair:
    """--need_weight: softmax maps summed over augmented training batches, divided by how many images there were."""
    overrides = ["data.root=imagenet", "data.aug_repeats=3"]
    with open_request("runs/1_low_rank_deit_base", overrides, images=2, split="augmented", alone=True) as request:
        total, images = torch.zeros(()), 0
        for x, *_ in request.loader:
            with record(request.model) as seen:
                request.model(x)
            heads = seen["blocks.0.attn"]
            total = total + (heads.q @ heads.k.mT * heads.scale).softmax(-1).sum(0)
            images += len(x)
    maps, _ = load_tensors(home / "runs/maps_as_there.safetensors")
    return float(maps["blocks.0.attn"].norm()), float((total / images).norm())


def kept_keys(home: Path) -> Pair:
    """gen_mask.py, info: the keys that hold 0.58 of a row, and one more; the class token's row and column stay."""
    maps, _ = load_tensors(home / "runs/maps_deit_base.safetensors")
    kept = pairs = 0
    for map_ in maps.values():
        for head in map_.double().numpy():
            keep = np.zeros_like(head, dtype=bool)
            for row, values in enumerate(head):
                order = np.argsort(-values)
                count = int(np.searchsorted(np.cumsum(values[order]), 0.58)) + 1
                keep[row, order[: min(count + 1, len(values))]] = True
            keep[0], keep[:, 0] = True, True
            kept, pairs = kept + keep.sum(), pairs + keep.size
    masks, _ = load_tensors(home / "runs/masks_as_there.safetensors")
    ours = [keep for name, keep in masks.items() if ":" not in name]
    return sum(int(keep.sum()) for keep in ours) / sum(keep.numel() for keep in ours), kept / pairs


@torch.no_grad()
def masked_attention(home: Path) -> Pair:
    """Logits of removed pairs are −∞."""
    model = load_model("runs/2_masked_deit_base").eval()
    attention = model.model.blocks[0].attn
    keep = attention.core.parts["mask"].keep
    x = tokens(model, keep.shape[-1])
    q, k, v = heads_of(attention, x)
    logits = squeezed(attention, q, "q") @ squeezed(attention, k, "k").mT * q.shape[-1] ** -0.5
    out = logits.masked_fill(~keep, -torch.inf).softmax(-1) @ v
    return float(attention(x).norm()), merged(attention, out)


def start_of(recipe: str, *words: str) -> tuple[nn.Module, object]:
    """The model of a recipe before its first update, and its task."""
    small = ["data.dataset=fake", "data.num_classes=10", "data.workers=0", "train.device=cpu", "train.precision=fp32"]
    session = open_session(read_recipe(find_recipe(recipe), [*small, *words]), Process(device=torch.device("cpu")))
    return session.model, session.task


@torch.no_grad()
def mimetic_product(home: Path) -> Pair:
    """mimetic0.7_0.7: values and projection are √S factors of 0.4 Z − 0.4 I, so their product's diagonal is −0.4."""
    model, _ = start_of("structured/cifar10_mimetic", "data.batch_size=2")
    attention = model.model.blocks[0].attn
    values = attention.qkv.weight[-attention.proj.weight.shape[0] :]
    return float((values @ attention.proj.weight).diagonal().mean()), -0.4


def peak_rate(home: Path) -> Pair:
    """timm's train.py: --lr-base 0.004 --lr-base-size 4096, and the square root of the ratio for AdamW."""
    rates = [
        json.loads(line)["lr"] for line in (home / "runs/imagenet_impulse3/metrics.jsonl").read_text().splitlines()
    ]
    config = read_yaml(home / "runs/imagenet_impulse3/config.yaml")
    assert rates
    return config["train"]["lr"], 0.004 * math.sqrt(config["data"]["batch_size"] / 4096)


def standardised(z: Tensor) -> Tensor:
    """Of each token over the width of its head, as the model is trained."""
    return (z - z.mean(-1, keepdim=True)) / z.std(-1, keepdim=True)


@torch.no_grad()
def reconstruction_error(home: Path) -> Pair:
    """Reconstruction/softmax.py of the study: mean |‖φ(q)‖² − ‖h‖²| with standardised q and k, over layers."""
    rows = [json.loads(line) for line in (home / "runs/reconstruction/analysis.jsonl").read_text().splitlines()]
    row = next(row for row in rows if (row["statistic"], row["batch"]) == ("error", "validation"))
    session = open_session(read_recipe("runs/reconstruction/config.yaml"), Process(device=torch.device("cpu")))
    x, _, _ = all_images(session.val_loader.with_ids())
    with record(model := load_model("runs/reconstruction").eval()) as seen:
        model(x[:2])
    errors = []
    for q, k, v, *_ in seen.values():
        q, k = standardised(q), standardised(k)
        exponents = (q @ k.mT / math.sqrt(q.shape[-1])).exp()
        phi2 = (q.square().sum(-1) / math.sqrt(q.shape[-1])).exp() / exponents.sum(-1) ** 2
        h2 = (exponents / exponents.sum(-1, keepdim=True) @ v).square().sum(-1)
        errors.append((phi2 - h2).abs().mean())
    return row["mean"], float(torch.stack(errors).mean())


@torch.no_grad()
def projected_norm(home: Path) -> Pair:
    """scripts/norms.py: exp(q·q / 8 − 2 logsumexp(q·k / 8)), with √64 whatever the width of a head."""
    rows = read("runs/reconstruction/analysis/table.csv")
    ours = [float(row["mean"]) for row in rows if (row["statistic"], row["site"]) == ("phi2", "blocks.0.attn")]
    with open_request("runs/reconstruction", ["data.root=imagenet"], images=2, labels=False, alone=True) as request:
        x, _, _ = all_images(request.loader.with_ids())
        with record(request.model) as seen:
            request.model(x)
    q, k = (standardised(part.double()) for part in seen["blocks.0.attn"][:2])
    return sum(ours) / len(ours), float((q.square().sum(-1) / 8 - 2 * (q @ k.mT / 8).logsumexp(-1)).exp().mean())


def training_attack(home: Path) -> Pair:
    """src/attacks.py, pgd with one step: from x + U(−ε, ε), 1.5 ε along the sign, clipped to ball and image."""
    config = read_yaml(home / "runs/xcit_as_there/config.yaml")
    _, settings = read_spec(config["task"]["attack"], where="attack")
    eps, step = 4 / 255, as_number(settings["step_size"])
    model = load_model("runs/xcit_as_there").eval()
    attack = PGD(eps=eps, steps=settings["steps"], step_size=step)
    x, y, ids = (
        torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
        torch.tensor([1, 2]),
        torch.arange(2),
    )
    start = attack.start(x, attack.dice(ids)).requires_grad_()
    grad = torch.autograd.grad(cross_entropy(model(start), y, reduction="sum"), start)[0]
    moved = (x + (start + 1.5 * eps * grad.sign() - x).clamp(-eps, eps)).clamp(0, 1)
    return float(attack(model, x, y, ids=ids).detach().norm()), float(moved.detach().norm())


def last_step(home: Path) -> Pair:
    """--attack-eps 8 with one step: 1.5 ε."""
    config = read_yaml(home / "runs/finetune_flowers_xcit_s12/config.yaml")
    return 255 * as_number(read_spec(config["task"]["attack"], where="attack")[1]["step_size"]), 1.5 * 8 / 1


def trades_loss(home: Path) -> Pair:
    """src/attacks.py, trades: cross-entropy of x plus 6 times the divergence of the answer at x′ from that at x."""
    words = ["model.weights=null", "model.kwargs.depth=1", "model.kwargs.embed_dim=32", "model.kwargs.num_heads=2"]
    model, task = start_of("light/finetune_cifar10_xcit_s12", *words, "data.batch_size=2", "data.smoothing=0")
    generator = torch.Generator().manual_seed(0)
    x, noise, y = (
        torch.rand(2, 3, 32, 32, generator=generator),
        torch.rand(2, 3, 32, 32, generator=generator),
        torch.tensor([1, 2]),
    )
    model.eval()
    task.disturb = lambda *_: noise
    task.inner.eps = 8 / 255
    clean, moved = model(x), model(noise)
    by_hand = cross_entropy(clean, y) + 6 * kl_div(moved.log_softmax(1), clean.softmax(1), reduction="batchmean")
    return float(task(x, y)["loss"].detach()), float(by_hand.detach())


def accuracy_under_200_steps(home: Path) -> Pair:
    """validate.py --attack pgd --attack-steps 200: steps of 1.5 ε / 200."""
    with open_request("runs/xcit_s12_linf4", ["data.root=imagenet"], labels=False, alone=True) as request:
        x, y, ids = all_images(request.loader.with_ids())
        model = request.model
    eps, attack = 4 / 255, PGD(eps=4 / 255)
    point = attack.start(x, attack.dice(ids))
    for _ in range(200):
        point = point.detach().requires_grad_()
        grad = torch.autograd.grad(cross_entropy(model(point), y, reduction="sum"), point)[0]
        point = (x + (point + 1.5 * eps / 200 * grad.sign() - x).clamp(-eps, eps)).clamp(0, 1)
    ledger = load_ledger(home / "runs/xcit_s12_linf4/evaluation")
    assert any("apgd" in spec and "restarts=5" in spec for spec in ledger)
    (spec,) = [spec for spec in ledger if "steps=200" in spec and "step_size" in spec]
    return float(ledger[spec]["loss"].mean()), float(cross_entropy(model(point), y).detach())


def loss_of_the_longest_attack(home: Path) -> Pair:
    """attack_effectiveness.py on their checkpoint of epoch 0; the gap is |L_k − L_K| / L_K."""
    (summary,) = (home / "runs/their_effectiveness").rglob("summary.csv")
    rows = read(summary)
    assert [(row["epoch"], row["attack"], row["attack_steps"]) for row in rows] == [
        ("0", "pgd", "1"),
        ("0", "pgd", "2"),
    ]
    short, long = (float(row["adv_loss"]) for row in rows)
    return float(read("runs/their_effectiveness/table.csv")[0]["loss_gap"]), abs(short - long) / long


def stretched_perturbation(home: Path) -> Pair:
    """imagenet_perturbations: (x′ − x + ε) / 2 ε."""
    moved, pushed = (load_tensors(home / f"{name}.safetensors")[0] for name in ("examples", "perturbations"))
    with open_request("runs/xcit_s12_linf4", ["data.root=imagenet"], images=2, labels=False, alone=True) as request:
        x, _, _ = all_images(request.loader.with_ids())
    eps = 4 / 255
    return float(pushed["images"].norm()), float(((moved["images"] - x + eps) / (2 * eps)).norm())


def as_number(value: object) -> float:
    above, _, below = str(value).partition("/")
    return float(above) / float(below or 1)


def read(path: str | Path) -> list[dict[str, str]]:
    with Path(path).open() as file:
        return list(csv.DictReader(file))
