"""What the package promises about speed on a CPU, all ratios in one go, as Markdown.

    python -m benchmarks cpu [--seconds 0.5] [--only attention autoattack …] [--out FILE.md]

Processor seconds on one thread, ours and the other's by turns, medians. A ratio is the other's time over ours: above 1
ours is faster. torchattacks, foolbox, imagecorruptions and pyautoattack are measured where they are installed; a dash
stands where one is not. Models without trained weights are random ones of the size that is named, with labels of their
own; `--seconds` is how long each pair is measured at least.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_dataset, create_loader
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, CheckpointSaver, accuracy, update_summary
from torch import Tensor, nn

import vitruvius
from vitruvius.attacks import APGD, DDN, FGSM, MIFGSM, PGD, APGDTargeted, AutoAttack, Carlini, FABTargeted, Square
from vitruvius.models.base import PixelModel

sys.path.insert(0, str(Path(__file__).parent))
from autoattack_cpu import VITS, original, timed
from autoattack_cpu import load as load_attacked

Work = Callable[[], object]


class Row(NamedTuple):
    """A pair that was measured; seconds of one call."""

    what: str
    ours: float | None
    other: float | None
    goal: str = ""
    note: str = ""

    def cells(self) -> str:
        times = [f"{1e3 * seconds:.4g} ms" if seconds is not None else "–" for seconds in (self.ours, self.other)]
        ratio = f"{self.other / self.ours:.2f}" if self.ours and self.other else "–"
        return f"| {self.what} | {' | '.join(times)} | {ratio} | {self.goal} | {self.note} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--out", type=Path, help="write the Markdown here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started
    warnings.simplefilter("ignore")  # others' about their own code
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n")

    say(describe_machine())
    begun = spent()
    for name in options.only:
        section = SECTIONS[name]
        say(f"\n## {(section.__doc__ or name).splitlines()[0].rstrip('.')}\n")
        say("| | ours | other | ratio | goal | |\n|---|---:|---:|---:|---:|---|")
        for row in section(options.seconds):
            say(row.cells())
    say(f"\n{spent() - begun:.0f} processor seconds in all.")


def describe_machine() -> str:
    names = ("timm", "numpy", "torchattacks", "foolbox", "imagecorruptions", "imagecorruptions-imaug", "pyautoattack")
    known = ["torch " + torch.__version__]
    for name in names:
        try:
            known.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            known.append(f"{name} –")
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    able = [name for name, there in torch.cpu.get_capabilities().items() if there is True]
    return (
        f"vitruvius {vitruvius.__version__}, Python {platform.python_version()}, {', '.join(known)}; "
        f"{model}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; {' '.join(able)}"
    )


# measuring


def spent() -> float:
    """Processor seconds of this process and of those that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def by_turns(seconds: float, *works: Work, warm_up: int = 1, least: int = 1) -> list[float]:
    """Median seconds of one call of each, in turn until so many seconds are over."""
    taken: list[list[float]] = [[] for _ in works]
    begun, turn = spent(), 0
    while turn < warm_up + least or spent() - begun < seconds:
        for mine, work in zip(taken, works, strict=True):
            before = spent()
            work()
            if turn >= warm_up:
                mine.append(spent() - before)
        turn += 1
    return [statistics.median(mine) for mine in taken]


def there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def images(count: int, size: int) -> Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def forward(model: nn.Module, x: Tensor) -> Work:
    def work() -> Tensor:
        with torch.no_grad():
            answer: Tensor = model(x)
        return answer

    return work


def gradient(model: nn.Module, x: Tensor) -> Work:
    """Of the images, as an attack wants it."""

    def work() -> object:
        pixels = x.clone().requires_grad_()
        return torch.autograd.grad(model(pixels).float().logsumexp(1).sum(), pixels)

    return work


def training_step(model: nn.Module, x: Tensor) -> Work:
    """Forward and backward to the weights, of a copy."""
    model = copy.deepcopy(model).requires_grad_()
    weights = list(model.parameters())
    return lambda: torch.autograd.grad(model(x).float().logsumexp(1).sum(), weights)


WAYS = {"gradient": gradient, "training step": training_step, "forward": forward}


# the sections


def attention(seconds: float) -> Iterator[Row]:
    """A ViT against timm in float32: in bfloat16 with attention by products, and in float32 (on AMD by oneDNN)"""
    for name, (make, size, batch) in VITS.items():
        plain, x = make(), images(batch, size)
        lower = vitruvius.rewire(copy.deepcopy(plain), "softmax").bfloat16()
        exact = PixelModel(copy.deepcopy(plain))
        for what, way in WAYS.items():
            mine, same, other = by_turns(seconds, way(lower, x.bfloat16()), way(exact, x), way(plain, x))
            yield Row(f"{name}, bfloat16: {what}", mine, other, "> 1")
            yield Row(f"{name}, float32: {what}", same, other, "≥ 1")


def rpc(seconds: float) -> Iterator[Row]:
    """Robust attention with two iterations, and `record`, against a plain pass (DeiT-Tiny, float32)

    Both by themselves, and both in PixelModel, where linear layers are faster and attention is more of a pass.
    """
    make, size, batch = VITS["DeiT-Tiny, 224 px"]
    plain, x = make(), images(batch, size)
    ours = vitruvius.rewire(copy.deepcopy(plain), {"use": "rpc", "iterations": 2})
    in_pixels = PixelModel(ours), PixelModel(plain)
    for what, way in WAYS.items():
        works = [way(model, x) for model in (ours, plain, *in_pixels)]
        mine, other, fast, beside = by_turns(seconds, *works)
        yield Row(f"rpc: {what}", mine, other, "" if what == "gradient" else "≥ 0.85")
        yield Row(f"rpc in PixelModel, beside timm: {what}", fast, other, "≥ 0.85")
        yield Row(f"rpc in PixelModel, beside softmax there: {what}", fast, beside)

    def recorded() -> None:
        with torch.no_grad(), vitruvius.record(plain):
            plain(x)

    mine, other = by_turns(seconds, recorded, forward(plain, x))
    yield Row("record", mine, other, "≥ 0.91")


WHOLE = (  # model, radius in linf, images, ways, goal
    ("cnn", 0.15, 20, {"exact": "≥ 2"}),
    ("cnn", 0.15, 200, {"exact": "≥ 2"}),
    ("zoo/vit_digits_adversarial", 0.1, 20, {"exact": "≥ 1.4", "auto": "≥ 1.4"}),
    ("zoo/vit_digits_adversarial", 0.3, 200, {"exact": "≥ 1.4"}),
    ("zoo/vit_cifar10_robust", 6 / 255, 20, {"exact": "≥ 1", "auto": "≥ 1.8"}),
)
IN_PART = (  # all images stand
    ("dim 192, 6 blocks, 32 px", 1e-4, 4, {"exact": "≥ 1", "auto": "≥ 2.2"}),
    ("DeiT-Tiny, 224 px", 1e-4, 1, {"exact": "", "auto": "≥ 2.2"}),
)


def autoattack(seconds: float) -> Iterator[Row]:
    """AutoAttack through `evaluate` against the original, the same images

    Whole searches, except where one image takes minutes: there toward one class instead of nine, with 500 queries.
    """
    part = {"steps": 100, "targets": 1, "queries": 500}
    for rows, effort in ((WHOLE, None), (IN_PART, part)):
        for name, eps, count, ways in rows:
            yield from attacked(*load_attacked(name, count), name, eps, effort, ways)


def attacked(
    model: nn.Module, x: Tensor, y: Tensor, name: str, eps: float, effort: dict[str, int] | None, ways: dict[str, str]
) -> Iterator[Row]:
    """One run of each: a search takes seconds and repeats itself."""
    forward(model, x)()  # what a first pass prepares is nobody's
    attack = original("linf", eps, effort)
    theirs = attack and timed(attack, model, x, y)
    for way, goal in ways.items():
        stages = {"version": "custom", "attacks": stages_of(eps, effort)} if effort else {}
        mine = timed(AutoAttack(eps=eps, precision=way, **stages), model, x, y)
        note = f"{sum(mine['robust'])} robust; original –"
        if theirs is not None:
            differ = sum(a != b for a, b in zip(mine["robust"], theirs["robust"], strict=True))
            note = f"{sum(mine['robust'])} robust; original {sum(theirs['robust'])}, {differ} differ"
        what = f"{name}, {len(x)} images at {eps:.2g}, {way}" + (", in part" if effort else "")
        yield Row(what, mine["seconds"], theirs and theirs["seconds"], goal, note)


def stages_of(eps: float, effort: dict[str, int]) -> tuple[Any, ...]:
    steps, targets = effort["steps"], effort["targets"]
    return (
        APGD(eps=eps, steps=steps),
        APGDTargeted(eps=eps, steps=steps, targets=targets),
        FABTargeted(eps=eps, steps=steps, targets=targets),
        Square(eps=eps, queries=effort["queries"]),
    )


def attacks(seconds: float) -> Iterator[Row]:
    """Attacks of one strength beside torchattacks and foolbox, 64 digits"""
    for name in ("cnn", "vit"):
        model, x, y = load_attacked(name, 60)
        x, y = torch.cat([x, x[:4]]), torch.cat([y, y[:4]])
        for what, ours, libraries in pairs_of(model, x, y):
            for library in ("torchattacks", "foolbox"):
                theirs = libraries.get(library)
                if theirs is not None:
                    mine, other = by_turns(seconds, ours, theirs, least=3)
                    yield Row(f"{name}: {what} beside {library}", mine, other, "≥ 1")
                elif not there(library):
                    yield Row(f"{name}: {what} beside {library}", None, None, "≥ 1", "not installed")


def pairs_of(model: nn.Module, x: Tensor, y: Tensor) -> Iterator[tuple[str, Work, dict[str, Work]]]:
    """An attack of ours, and the same of the libraries that have it."""
    eps, few = 0.1, slice(16)
    torchattacks = importlib.import_module("torchattacks") if there("torchattacks") else None
    foolbox = importlib.import_module("foolbox") if there("foolbox") else None
    wrapped = foolbox and foolbox.PyTorchModel(model, bounds=(0, 1))

    def of(
        library: Any, make: Callable[[Any], Any], x: Tensor = x, y: Tensor = y, eps: float | None = eps
    ) -> Work | None:
        if library is None:
            return None
        made = make(library)
        return (lambda: made(wrapped, x, y, epsilons=eps)) if library is foolbox else lambda: made(x, y)

    def row(ours: Any, x: Tensor = x, y: Tensor = y, **theirs: Work | None) -> tuple[Work, dict[str, Work]]:
        return lambda: ours(model, x, y), {name: work for name, work in theirs.items() if work is not None}

    yield (
        "FGSM",
        *row(
            FGSM(eps=eps),
            torchattacks=of(torchattacks, lambda t: t.FGSM(model, eps=eps)),
            foolbox=of(foolbox, lambda f: f.attacks.LinfFastGradientAttack()),
        ),
    )
    yield (
        "PGD-20",
        *row(
            PGD(eps=eps, steps=20, step_size=0.01),
            torchattacks=of(torchattacks, lambda t: t.PGD(model, eps=eps, alpha=0.01, steps=20)),
            foolbox=of(foolbox, lambda f: f.attacks.LinfPGD(abs_stepsize=0.01, steps=20)),
        ),
    )
    yield (
        "MI-FGSM-10",
        *row(
            MIFGSM(eps=eps, steps=10),
            torchattacks=of(torchattacks, lambda t: t.MIFGSM(model, eps=eps, alpha=0.01, steps=10)),
        ),
    )
    nearest: dict[str, Any] = {"x": x[few], "y": y[few], "eps": None}
    yield (
        "DDN-50",
        *row(DDN(steps=50), x[few], y[few], foolbox=of(foolbox, lambda f: f.attacks.DDNAttack(steps=50), **nearest)),
    )
    settings: dict[str, Any] = {"binary_search_steps": 5, "steps": 100, "stepsize": 0.05, "initial_const": 0.01}
    yield "CW, 5 × 100", *row(
        Carlini(steps=100, search_steps=5, lr=0.05), x[few], y[few],
        foolbox=of(foolbox, lambda f: f.attacks.L2CarliniWagnerAttack(**settings), **nearest),
    )  # fmt: skip


def corruptions(seconds: float) -> Iterator[Row]:
    """Corruptions at 224 pixels against imagecorruptions, severities 1, 3 and 5"""
    from vitruvius.corruptions.base import BENCHMARK
    from vitruvius.corruptions.base import corruptions as known

    coarse = torch.rand(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    x = F.interpolate(coarse, size=(224, 224), mode="bicubic").clamp(0, 1).mul(255).round() / 255
    ids = torch.arange(len(x))
    for name in BENCHMARK:
        made = [known[name](severity=severity) for severity in (1, 3, 5)]
        ours = functools.partial(_corrupted, made, x, ids)
        if not there("imagecorruptions"):
            yield Row(name, by_turns(seconds / 2, ours)[0] / 12, None, "≥ 1", "not installed")
            continue
        mine, other = by_turns(seconds, ours, functools.partial(_originals, name, x))
        yield Row(name, mine / 12, other / 12, "≥ 1")


def _corrupted(made: list[Any], x: Tensor, ids: Tensor) -> None:
    for corruption in made:
        corruption.apply(x, ids=ids)


def _originals(name: str, x: Tensor) -> None:
    """Tensors in and out."""
    from imagecorruptions import corrupt

    for severity in (1, 3, 5):
        for image in x:
            pixels = (image * 255).round().byte().movedim(0, -1).numpy()
            torch.from_numpy(corrupt(pixels, severity=severity, corruption_name=name)).movedim(-1, 0).float().div(255)


def training(seconds: float) -> Iterator[Row]:
    """An epoch of `vitruvius train` against one of a bare loop of the same steps, and against one of timm's train.py

    timm's is the loop that its script is by default, written with timm's pieces. Equal in both: 256 files of 32 × 32
    pixels and 64 to validate, batches of 64, timm's augmentation for photographs, label smoothing, AdamW with a cosine
    at every update, no workers, one thread, and after every epoch an evaluation, a checkpoint and a line of metrics.
    """
    many = 7 if seconds >= 0.3 else 4
    for what, recipe, steps, goal in (
        ("natural", "digits/softmax", 0, ""),  # the loop looks at no held-out images
        ("PGD-3", "digits/adversarial", 3, "≥ 0.85"),
    ):
        bare = functools.partial(_bare, "vitruvius/vit_digits", {}, *_digits(), steps)
        yield Row(f"digits, {what}", *per_epoch(many, functools.partial(_train, recipe), bare), goal)
    kwargs = {"embed_dim": 192, "depth": 6, "num_heads": 3, "num_classes": 10}
    model = {"name": "vitruvius/vit_tiny_patch4_32", "kwargs": kwargs}
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (256, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, 256)
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "noise.npz", x_train=pixels, y_train=labels, x_test=pixels[:32], y_test=labels[:32])
        data = {"dataset": "npz", "root": f"{folder}/noise.npz", "workers": 0, "batch_size": 64}
        recipe = {"model": model, "data": data, "task": {"use": "supervised"}}
        x, y = torch.from_numpy(pixels).movedim(-1, 1).float() / 255, torch.from_numpy(labels)
        bare = functools.partial(_bare, model["name"], kwargs, x, y, 0)
        for way, goal in (("fp32", "≥ 1"), ("auto", "≥ 2.5")):
            ours = functools.partial(_train, recipe, precision=way)
            yield Row(f"dim 192, 6 blocks, 32 px, natural, precision={way}", *per_epoch(min(many, 3), ours, bare), goal)
        write_pictures(Path(folder))
        for name, dim, depth in (("dim 96, 4 blocks, 32 px", 96, 4), ("dim 192, 6 blocks, 32 px", 192, 6)):
            exact, auto, timms = (epoch_alone(way, folder, dim, depth) for way in ("fp32", "auto", "timm"))
            yield Row(f"{name}, precision=fp32, beside timm's train.py", exact, timms, "≥ 1")
            yield Row(f"{name}, precision=auto, beside timm's train.py", auto, timms, "≥ 2.5")


def per_epoch(many: int, *ways: Callable[[int], None]) -> list[float]:
    """Seconds of an epoch of each: what more epochs take longer than one."""
    times = by_turns(0, *(functools.partial(train, epochs) for train in ways for epochs in (1, many)))
    return [(more - one) / (many - 1) for one, more in zip(times[::2], times[1::2], strict=True)]


def write_pictures(folder: Path) -> None:
    """Noise of ten classes as PNG files, 256 to train on and 64 to validate."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 256), ("validation", 64)):
        for number in range(count):
            path = folder / split / f"class{number % 10}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)


def epoch_alone(way: str, folder: str, dim: int, depth: int) -> float:
    """Seconds of an epoch, the median of four after the first, in a process of its own as a command has it.

    way: a precision of ours, or timm. In one process timm's loop would profit from the memory that ours has glibc keep.
    """
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import cpu; "
    program += f"cpu.tell_epochs({way!r}, {folder!r}, {dim}, {depth})"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    ends = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("epoch ")]
    return statistics.median(end - start for start, end in itertools.pairwise(ends))


class TellEpochs:
    """Prints how long this process has computed when an epoch has ended."""

    def epoch_end(self, epoch: int, model: nn.Module) -> None:
        print("epoch", time.process_time(), flush=True)


def tell_epochs(way: str, folder: str, dim: int, depth: int) -> None:
    """Train five epochs on `folder` and print what was spent after each."""
    torch.set_num_threads(1)
    kwargs = {"embed_dim": dim, "depth": depth, "num_heads": 3, "num_classes": 10}
    if way == "timm":
        timm_script(Path(folder), kwargs, epochs=5, told=TellEpochs())
        return
    data = {"dataset": "folder", "root": folder, "workers": 0, "batch_size": 64}
    recipe = {"model": {"name": "vitruvius/vit_tiny_patch4_32", "kwargs": kwargs}, "data": data}
    with tempfile.TemporaryDirectory() as out:
        words = ["train.holdout=0", "train.epochs=5", f"train.precision={way}", f"out={out}/run"]
        vitruvius.train(recipe, words, quiet=True, callbacks=[TellEpochs()])


def timm_script(folder: Path, kwargs: dict[str, Any], epochs: int, told: TellEpochs) -> None:
    """What timm's train.py does on a CPU with `--opt adamw --lr 1e-3 -b 64 -j 0 --sched-on-updates`, by its pieces."""
    net: Any = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, **kwargs)
    loaders = {}
    for split, trains in (("train", True), ("validation", False)):
        pictures = create_dataset("", root=str(folder), split=split, is_training=trains, batch_size=64)
        loaders[split] = create_loader(
            pictures, (3, 32, 32), 64, is_training=trains, interpolation="random" if trains else "bicubic",
            num_workers=0, persistent_workers=False, device=torch.device("cpu"),
        )  # fmt: skip
    batches = loaders["train"]
    optimiser = create_optimizer_v2(net, opt="adamw", lr=1e-3, weight_decay=0.05)
    scheduler, _ = create_scheduler_v2(
        optimiser, num_epochs=epochs, step_on_epochs=False, updates_per_epoch=len(batches)
    )
    train_loss, loss_of = LabelSmoothingCrossEntropy(0.1), nn.CrossEntropyLoss()
    with tempfile.TemporaryDirectory() as out:
        saver = CheckpointSaver(net, optimiser, checkpoint_dir=out, recovery_dir=out)
        for epoch in range(epochs):
            net.train()
            seen, taken, waited, end = AverageMeter(), AverageMeter(), AverageMeter(), time.time()
            for number, (x, y) in enumerate(batches):
                waited.update(time.time() - end)
                loss = train_loss(net(x), y)
                loss.backward()
                optimiser.step()
                optimiser.zero_grad()
                seen.update(loss.item(), len(x))
                taken.update(time.time() - end)
                scheduler.step_update(epoch * len(batches) + number + 1, metric=seen.avg)
                end = time.time()
            net.eval()
            meters = {"loss": AverageMeter(), "top1": AverageMeter(), "top5": AverageMeter()}
            with torch.no_grad():
                for x, y in loaders["validation"]:
                    logits = net(x)
                    answers = (loss_of(logits, y), *accuracy(logits, y, (1, 5)))
                    for meter, value in zip(meters.values(), answers, strict=True):
                        meter.update(value.item(), len(x))
            found = {name: meter.avg for name, meter in meters.items()}
            update_summary(epoch, {"loss": seen.avg}, found, f"{out}/summary.csv", write_header=epoch == 0)
            saver.save_checkpoint(epoch, metric=found["top1"])
            scheduler.step(epoch + 1, found["top1"])
            told.epoch_end(epoch, net)


def _digits() -> tuple[Tensor, Tensor]:
    """As many as a run trains on, which holds the others out to choose an epoch."""
    from vitruvius.data import DataConfig, eval_loader

    size = vitruvius.create_model("vitruvius/vit_digits").data_config
    x, y = (
        torch.cat(parts)
        for parts in zip(*eval_loader(DataConfig(dataset="digits"), input_size=size, split="train"), strict=True)
    )
    return x[:1293], y[:1293]


def _train(recipe: Any, epochs: int, precision: str = "fp32") -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"train.epochs={epochs}", "train.warmup_epochs=0", f"train.precision={precision}"]
        vitruvius.train(recipe, [*settings, f"out={folder}/run"], quiet=True)


def _bare(name: str, kwargs: dict[str, Any], x: Tensor, y: Tensor, steps: int, epochs: int) -> None:
    """AdamW on cross-entropy, after PGD with so many steps; no look at other images."""
    model = vitruvius.create_model(name, **kwargs).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 64, shuffle=True, drop_last=True)
    for _ in range(epochs):
        for pixels, wanted in loader:
            moved = pixels
            for _ in range(steps):
                moved = moved.detach().requires_grad_()
                (grad,) = torch.autograd.grad(F.cross_entropy(model(moved), wanted), moved)
                moved = (pixels + (moved.detach() + 0.05 * grad.sign() - pixels).clamp(-0.1, 0.1)).clamp(0, 1)
            optimiser.zero_grad()
            F.cross_entropy(model(moved.detach()), wanted).backward()
            optimiser.step()


def start_up(seconds: float) -> Iterator[Row]:
    """Processes from start to end, against imports"""
    torch_alone, timm_alone = [sys.executable, "-c", "import torch"], [sys.executable, "-c", "import timm"]
    verb = [sys.executable, "-m", "vitruvius"]
    with tempfile.TemporaryDirectory() as folder:
        once = [*verb, "train", "digits/softmax", "train.epochs=1", "train.warmup_epochs=0", f"out={folder}/run"]
        rows = (
            (
                "a run that is not there, beside `import torch`",
                [*verb, "evaluate", f"{folder}/none"],
                torch_alone,
                "≥ 0.67",
            ),
            ("`--help`, beside `import torch`", [*verb, "--help"], torch_alone, "≥ 1 or 300 ms"),
            ("`list`, beside `import torch`", [*verb, "list", "attacks"], torch_alone, "≥ 1"),
            ("`schema`, beside `import torch`", [*verb, "schema"], torch_alone, "≥ 1"),
        )
        for what, ours, other, goal in rows:
            yield Row(what, *by_turns(0, _process(ours), _process(other), least=2), goal)
        (work,) = by_turns(0, functools.partial(_train, "digits/softmax", 1))
        mine, imports = by_turns(0, _process(once), _process(timm_alone), warm_up=0)
        yield Row(
            "train digits/softmax for an epoch, beside `import timm` and its work", mine, imports + work, "≥ 0.77"
        )


def _process(command: list[str]) -> Work:
    return lambda: subprocess.run(command, capture_output=True, check=False)


def growth(seconds: float) -> Iterator[Row]:
    """How cost grows: an image of a large evaluation beside one of a small one, value vectors beside other analyses"""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).eval()
    cost = []
    for count in (20_000, 1_000):
        x, y, ids = torch.rand(count, 3, 2, 2), torch.zeros(count, dtype=torch.long), torch.arange(count)
        batches = list(zip(x.split(100), y.split(100), ids.split(100), strict=True))
        cost.append(by_turns(0, lambda batches=batches: vitruvius.evaluate(model, batches))[0] / count)
    yield Row("`evaluate`, an image of 20,000 beside one of 1,000", *cost, "≥ 0.8")
    make, size, _ = VITS["DeiT-Tiny, 224 px"]
    deit, x = make(), images(1, size)
    others = ("gammas", "eigenvalues", "norms", "reconstruction")

    def analysed(*names: str) -> Work:
        return lambda: vitruvius.analyse(deit, [x], *names, nulls=False)

    yield Row("value vectors beside four other analyses", *by_turns(0, analysed("value_vectors"), analysed(*others)))


SECTIONS: dict[str, Callable[[float], Iterator[Row]]] = {
    "start_up": start_up,
    "attention": attention,
    "rpc": rpc,
    "autoattack": autoattack,
    "attacks": attacks,
    "training": training,
    "corruptions": corruptions,
    "growth": growth,
}


if __name__ == "__main__":
    main()
