"""How fast is our APGD-CE, exact and fast, against the plain float32 structure of the original?

    python benchmarks/autoattack.py                  DeiT-Tiny at 224 where there is a GPU, the digits CNN on a CPU
    python benchmarks/autoattack.py --images 1024 --survivors 0.1 0.5 1.0 --ways exact fast fast+compile
    python benchmarks/autoattack.py --gradients --survivors     gradients alone: how fast is each view of the model?

One run, the same weights and images for all. The reference keeps full batches for 100 iterations, as the original does:
every image is searched to the end whether it is broken or not. What we save depends on how many images break, so it is
measured at several shares of survivors: images are drawn from a pool so that this share stays robust to the reference.
The GPU model is trained for some seconds against FGSM on synthetic patterns, because nobody searches long on a model
that has no robustness at all.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius.attacks._compiled import compile_model
from vitruvius.attacks._lower_precision import Autocast, bfloat16_view
from vitruvius.attacks._models import frozen, loss_and_grad
from vitruvius.attacks.apgd import APGD, Ascent, AscentState
from vitruvius.attacks.autoattack import AutoAttack
from vitruvius.attacks.base import CE, LINF

STEPS = 100
WAYS = ("exact", "fast", "exact+compile", "fast+compile")


class Problem(NamedTuple):
    """A model, a pool of images it gets right, and a radius at which some of them fall."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    eps: float
    batch_size: int


class Measured(NamedTuple):
    seconds: float
    robust: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, help="default 512 on a GPU, 100 on a CPU")
    parser.add_argument("--survivors", type=float, nargs="*", default=[0.1, 0.5, 1.0])
    parser.add_argument("--ways", nargs="+", default=["exact", "fast"], choices=WAYS, help="compiling takes a minute")
    parser.add_argument("--gradients", action="store_true", help="first measure gradients of the views alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    problem = patterns(options.device) if options.device != "cpu" else digits()
    images = options.images or (512 if options.device != "cpu" else 100)
    print(f"{problem.name}, eps {problem.eps:.4g}, batches of {problem.batch_size}, {images} images", flush=True)
    if options.gradients:
        measure_gradients(problem, options.ways)
    if not options.survivors:
        return
    halves = sort_pool(problem)
    rows = [row(problem, *mixture(halves, images, share), options) for share in options.survivors]
    print_table(rows)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


# The reference: the original's structure, written plainly.


def reference(model: nn.Module, x: Tensor, y: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    """APGD-CE in Linf, 100 iterations on all images; which ones it fooled, (B,) bool."""
    noise = 2 * torch.rand(x.shape, generator=generator, device=x.device) - 1
    point = (x + eps * noise / noise.flatten(1).abs().amax(1).view(-1, 1, 1, 1)).clamp(0, 1)
    loss, grad, fooled = loss_and_gradient(model, point, y)
    best, best_grad, best_loss, checked_loss = point.clone(), grad.clone(), loss.clone(), loss.clone()
    reduced, step = torch.ones_like(fooled), torch.full_like(loss, 2 * eps).view(-1, 1, 1, 1)
    losses, previous = torch.zeros(STEPS, len(x), device=x.device), point.clone()
    window, due = int(0.22 * STEPS), int(0.22 * STEPS)
    for i in range(STEPS):
        drift, previous, inertia = point - previous, point.clone(), 0.25 if i else 0.0
        climbed = torch.min(torch.max(point + step * grad.sign(), x - eps), x + eps).clamp(0, 1)
        point = point + (climbed - point) * (1 - inertia) + drift * inertia
        point = torch.min(torch.max(point, x - eps), x + eps).clamp(0, 1)
        loss, grad, wrong = loss_and_gradient(model, point, y)
        fooled |= wrong
        losses[i] = loss
        better = (loss > best_loss).nonzero().squeeze(1)
        best[better], best_grad[better], best_loss[better] = point[better], grad[better], loss[better]
        if i + 1 == due:
            earlier = losses[i - window : i] if i >= window else torch.cat([torch.zeros_like(losses[:1]), losses[:i]])
            rises = (losses[i + 1 - window : i + 1] > earlier).sum(0)
            stalled = (rises <= 0.75 * window) | (~reduced & (checked_loss >= best_loss))
            reduced, checked_loss, back = stalled, best_loss.clone(), stalled.nonzero().squeeze(1)
            step[back] /= 2
            point[back], grad[back] = best[back].clone(), best_grad[back].clone()
            window = max(window - int(0.03 * STEPS), int(0.06 * STEPS))
            due += window
    return fooled


def loss_and_gradient(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.detach().requires_grad_()
    logits = model(x)
    loss = F.cross_entropy(logits, y, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), x)
    return loss.detach(), grad.detach(), logits.detach().argmax(1) != y


# What is measured.


def row(problem: Problem, x: Tensor, y: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and survivors of the reference and of ours, on the same images."""
    measured = {"reference": timed(x, lambda: run_reference(problem, x, y), runs=1)}
    print("reference", measured["reference"], sep="; ", flush=True)
    for name in options.ways:
        precision, *compiling = name.split("+")
        settings = {"precision": precision, "batch_size": problem.batch_size, "compile": bool(compiling)}
        attack = AutoAttack(eps=problem.eps, version="custom", attacks=("apgd-ce",), **settings)
        stages: list[Any] = []

        def search(attack: AutoAttack = attack, stages: list[Any] = stages) -> int:
            outcome = attack.run(problem.model, x, y)
            stages[:] = [f"{s.label} {s.searched} → −{s.broken} in {s.seconds:.2f} s" for s in outcome.stages]
            return int(outcome.robust.sum())

        measured[name] = timed(x, search, runs=1 if name == "exact" else 2)
        print(name, measured[name], *stages, sep="; ", flush=True)
    first = measured["reference"]
    return {
        "images": len(x),
        "gradient images/s of the reference": len(x) * (STEPS + 1) / first.seconds,
        **{name: {**m._asdict(), "times": first.seconds / m.seconds} for name, m in measured.items()},
    }


def run_reference(problem: Problem, x: Tensor, y: Tensor) -> int:
    generator = torch.Generator(x.device).manual_seed(0)
    parts = zip(x.split(problem.batch_size), y.split(problem.batch_size), strict=True)
    return len(x) - sum(int(reference(problem.model, a, b, problem.eps, generator).sum()) for a, b in parts)


def timed(x: Tensor, search: Callable[[], int], runs: int = 2) -> Measured:
    """Seconds of the best run; where the first may compile and tune there are two. On a CPU, of the processor."""
    seconds, clock = [], time.perf_counter if x.is_cuda else time.process_time
    for _ in range(runs):
        begun = clock()
        robust = search()
        if x.is_cuda:
            torch.cuda.synchronize()
        seconds.append(clock() - begun)
    return Measured(min(seconds), robust)


def sort_pool(problem: Problem) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The pool's images that the reference fells, and those it does not."""
    generator = torch.Generator(problem.x.device).manual_seed(0)
    parts = zip(problem.x.split(problem.batch_size), problem.y.split(problem.batch_size), strict=True)
    fooled = torch.cat([reference(problem.model, a, b, problem.eps, generator) for a, b in parts])
    print(f"of {len(fooled)} images in the pool the reference fells {int(fooled.sum())}", flush=True)
    return (problem.x[fooled], problem.y[fooled]), (problem.x[~fooled], problem.y[~fooled])


def mixture(
    pool: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], images: int, share: float
) -> tuple[Tensor, Tensor]:
    """That many images of which this share survives, drawn from both halves of the pool, with repetition if need be."""
    survivors = round(images * share)
    drawn = []
    for (x, y), count in zip(pool, (images - survivors, survivors), strict=True):
        if count and not len(x):
            raise SystemExit(f"the pool has no images of one kind, {count} are needed; choose another eps.")
        rows = torch.arange(count, device=x.device) % max(len(x), 1)
        drawn.append((x[rows], y[rows]))
    order = torch.randperm(images, generator=torch.Generator().manual_seed(0)).to(drawn[0][0].device)
    return torch.cat([x for x, _ in drawn])[order], torch.cat([y for _, y in drawn])[order]


def print_table(rows: list[dict[str, Any]]) -> None:
    names = [key for key, value in rows[0].items() if isinstance(value, dict)]
    print(
        "\n| survivors of the reference | gradient images/s | " + " | ".join(f"{n}: s, ×, robust" for n in names) + " |"
    )
    print("|---" * (len(names) + 2) + "|")
    for r in rows:
        cells = [f"{r[n]['seconds']:.2f}, {r[n]['times']:.2f}, {r[n]['robust']}" for n in names]
        speed = r["gradient images/s of the reference"]
        print(f"| {r['reference']['robust']} of {r['images']} | {speed:.0f} | " + " | ".join(cells) + " |")


# Where the time goes.


def measure_gradients(problem: Problem, ways: list[str]) -> None:
    """Gradient images per second of each view of the model, and of a whole step of Auto-PGD, at a full batch."""
    x, y = (t.repeat(-(-problem.batch_size // len(t)), *[1] * (t.ndim - 1))[: problem.batch_size] for t in problem[2:4])
    with frozen(problem.model), torch.no_grad():
        views = {
            "float32": problem.model,
            "bfloat16": bfloat16_view(problem.model, x),
            "autocast": Autocast(problem.model),
        }
        for way, name in (("fast+compile", "bfloat16"), ("exact+compile", "float32")):
            if way in ways:
                views[f"{name}, compiled"] = compile_model(views[name], x)
        for name, view in views.items():
            rates = {}
            for what, fused in (("gradient", None), ("step", False), ("fused step", True)):
                if fused and "compiled" not in name:
                    continue
                leg = Ascent(LINF, problem.eps, STEPS, lambda z, y, _: CE(z, y), stops=False, compiled=bool(fused))
                state = leg.begin(x, y, y, x)

                def once(
                    view: nn.Module = view, leg: Ascent = leg, state: AscentState = state, alone=fused is None
                ) -> Any:
                    return loss_and_grad(view, x, lambda z: CE(z, y)) if alone else leg.advance(view, state)

                rates[what] = len(x) / repeat(x, once)
            print(f"{name}: " + ", ".join(f"{what} {rate:.0f} images/s" for what, rate in rates.items()), flush=True)
            if x.is_cuda:
                print(f"  as a CUDA graph: {graphed(view, x, y)}", flush=True)


def graphed(view: nn.Module, x: Tensor, y: Tensor) -> str:
    """Gradient images per second without any launching by the host."""
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                loss_and_grad(view, x, lambda z: CE(z, y))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss_and_grad(view, x, lambda z: CE(z, y))
        return f"{len(x) / repeat(x, graph.replay):.0f} images/s"
    except RuntimeError as error:
        return str(error).split("\n")[0]


def repeat(x: Tensor, once: Callable[[], Any], times: int = 20) -> float:
    """Seconds of one call, after three to warm up."""
    for left in range(times + 3):
        if left == 3:
            torch.cuda.synchronize() if x.is_cuda else None
            begun = time.perf_counter()
        once()
    torch.cuda.synchronize() if x.is_cuda else None
    return (time.perf_counter() - begun) / times


# The problems.


def digits() -> Problem:
    """The adversarially trained CNN of the golden files and its images, on a CPU."""
    from safetensors.torch import load_file

    tensors = load_file(Path(__file__).parents[1] / "tests" / "golden" / "aa_model_cnn.safetensors")
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)).eval()
    model.load_state_dict({key[4:]: value for key, value in tensors.items() if key.startswith("net.")})
    torch.set_num_threads(1)
    return Problem("digits CNN, 8 × 8", model, tensors["x"], tensors["y"], 0.15, 100)


def patterns(device: str, classes: int = 10, steps: int = 250, batch: int = 256, pool: int = 512) -> Problem:
    """DeiT-Tiny at 224, trained for a moment against FGSM on soft patterns of all contrasts."""
    import timm

    begun = time.perf_counter()
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", num_classes=classes).to(device)
    shapes = F.interpolate(torch.rand(classes, 3, 7, 7, device=device) - 0.5, size=224, mode="bicubic")
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)
    model.train()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 3e-4 * min(1, (step + 1) / 50)
        x, y = draw(shapes, batch)
        with torch.autocast(x.device.type, torch.bfloat16):
            _, grad, _ = loss_and_gradient(model, x, y)
            moved = (x + 4 / 255 * min(1, step / 100) * grad.sign()).clamp(0, 1)
            loss = F.cross_entropy(model(moved).float(), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    x, y = draw(shapes, pool)
    with torch.no_grad():
        right = model.eval()(x).argmax(1) == y
    seconds, share = time.perf_counter() - begun, 100 * right.float().mean().item()
    print(f"trained in {seconds:.0f} s: loss {loss.item():.3f}, {share:.1f} % right", flush=True)
    return Problem(
        "DeiT-Tiny, 224 × 224", model, x[right], y[right], radius(model, x[right][:128], y[right][:128]), 256
    )


def radius(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The largest of some radii at which at least a third of the images outlast a short attack."""
    for eps in (16 / 255, 8 / 255, 4 / 255, 2 / 255, 1 / 255):
        outcome = AutoAttack(eps=eps, version="custom", attacks=(APGD(eps=eps, steps=10),)).run(model, x, y)
        if float(outcome.robust.float().mean()) > 1 / 3:
            return eps
    return 0.5 / 255


def draw(shapes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Patterns of random contrast under noise: faint ones break, strong ones stay robust."""
    y = torch.randint(len(shapes), (count,), device=shapes.device)
    contrast = torch.rand(count, 1, 1, 1, device=shapes.device) * 0.6
    noise = 0.1 * torch.randn(count, *shapes.shape[1:], device=shapes.device)
    return (0.5 + contrast * shapes[y] + noise).clamp(0, 1), y


if __name__ == "__main__":
    main()
