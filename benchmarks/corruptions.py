"""Corruptions on the fly: 15 × 5 on small images with a DeiT-Tiny-sized model, against one process image by image.

    python -m benchmarks corruptions [--images 10000] [--loop 6]
    python -m benchmarks corruptions --against-original 5          224 pixels on one core, by turns with the original

Images are noise-free random scenes of 32 × 32 pixels; the model is DeiT-Tiny's (12 blocks, width 192, 3 heads) on
patches of 4 with 32-pixel images. One run gives the same corruptions batched and one image at a time on one core, as
the per-image libraries work (where imagecorruptions-imaug is installed, it is timed in that way too); and a table of
what an evaluation spends: corruption alone, model alone, and both, as `evaluate` does. All is warmed up before it is
timed. On an accelerator the two may overlap, so that their shares come to more than 100 %.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import timm
import torch
from torch import Tensor, nn

from vitruvius._processes import choose_device
from vitruvius.corruptions.base import BENCHMARK, SEVERITIES, corruptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--loop", type=int, default=6, help="images of the loop on one core")
    parser.add_argument("--large", type=int, default=256, help="images of 224 pixels, corrupted only; 0: none")
    parser.add_argument(
        "--against-original",
        type=int,
        default=0,
        metavar="ROUNDS",
        help="only: 15 images of 224 pixels on one core, by turns with imagecorruptions-imaug",
    )
    parser.add_argument("--without-model", action="store_true", help="corruptions alone")
    options = parser.parse_args()
    if options.against_original:
        against_original(options.against_original)
        return
    device = choose_device()
    small = scenes(options.images, 32, device)
    model = timm.create_model("deit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10).to(device).eval()
    print(
        f"torch {torch.__version__}, {name_of(device)}, {options.images} images of 32 × 32, batches of {options.batch}"
    )
    report(small, model, options)
    if options.large:
        print(f"\n{options.large} images of 224 × 224, corruption alone")
        rates(scenes(options.large, 224, device), 64, SEVERITIES)


def report(x: Tensor, model: nn.Module, options: argparse.Namespace) -> None:
    alone = rates(x, options.batch, SEVERITIES)
    compare_with_loops(x, alone, options.loop)
    if not options.without_model:
        share_of_time(x, model, options.batch, alone)


def compare_with_loops(x: Tensor, alone: float, loop: int) -> None:
    """Seconds `alone` of all corruptions in batches, against one core that takes image by image."""
    few, threads, passes = x[:loop].cpu(), torch.get_num_threads(), len(grid())
    torch.set_num_threads(1)
    own = sum(timed(lambda c=c: [c.apply(few[i : i + 1]) for i in range(len(few))]) for c in grid())
    theirs = package_seconds(few)
    torch.set_num_threads(threads)
    print(f"\n{'corruption alone':28s}{passes * len(x) / alone:12,.0f} images/s")
    for name, seconds in (("one core, image by image", own), ("imagecorruptions, one core", theirs)):
        if seconds:
            rate, ratio = passes * len(few) / seconds, len(x) / alone * seconds / len(few)
            print(f"{name:28s}{rate:12,.0f} images/s; in batches {ratio:.1f}×")


def against_original(rounds: int, count: int = 15) -> None:
    """Processor seconds of each corruption at 224 pixels, tensors in and out, by turns with the original's code."""
    from imagecorruptions import corrupt

    torch.set_num_threads(1)
    x = scenes(count, 224, torch.device("cpu"))
    ids = torch.arange(count)

    def original(name: str, severity: int) -> Tensor:
        pixels = [(image * 255).round().byte().movedim(0, -1).numpy() for image in x]
        moved = [torch.from_numpy(corrupt(image, severity=severity, corruption_name=name)) for image in pixels]
        return torch.stack([image.movedim(-1, 0).float() / 255 for image in moved])

    print(f"{'224 × 224, one core':28s}{'ours, ms':>10s}{'original, ms':>14s}{'original / ours':>17s}")
    for name in BENCHMARK:
        pairs = []
        for severity in (1, 3, 5) * rounds:
            made = corruptions[name](severity=severity)
            ours = processor_seconds(lambda made=made: made.apply(x, ids=ids))
            pairs.append((ours, processor_seconds(lambda n=name, s=severity: original(n, s))))
        ours, theirs = (statistics.median(column) * 1e3 / count for column in zip(*pairs[3:] or pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs[3:] or pairs)
        print(f"{name:28s}{ours:10.2f}{theirs:14.2f}{ratio:17.2f}", flush=True)


def processor_seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def share_of_time(x: Tensor, model: nn.Module, batch: int, alone: float) -> None:
    """What 15 × 5 passes over the images cost: the corruptions, the model, and both one after the other."""
    run(None, x[:batch], model, batch)  # warm up
    asked = both = 0.0
    for place, corruption in enumerate(grid()):
        if place % len(SEVERITIES) == 0:  # among the others, so that both see the same machine
            asked += len(SEVERITIES) * timed(lambda: run(None, x, model, batch))
        both += timed(lambda c=corruption: run(c, x, model, batch))
    print(f"\n{'15 × 5 passes':28s}{'seconds':>10s}{'images/s':>12s}{'of both':>10s}")
    for name, seconds in (("corruption alone", alone), ("model alone", asked), ("corruption and model", both)):
        print(f"{name:28s}{seconds:10.2f}{len(grid()) * len(x) / seconds:12,.0f}{seconds / both:10.0%}")


def package_seconds(x: Tensor) -> float:
    """Seconds of imagecorruptions for 15 × 5 on some images, 0 where it is not installed."""
    try:
        from imagecorruptions import corrupt
    except ImportError:
        return 0.0
    images = [(image * 255).round().byte().movedim(0, -1).numpy() for image in x]
    corrupt(images[0], severity=1, corruption_name="glass_blur")  # compiles
    corrupt(images[0], severity=3, corruption_name="glass_blur")
    pairs = [(name, severity) for name in BENCHMARK for severity in SEVERITIES]
    return sum(
        timed(lambda n=n, s=s: [corrupt(image, severity=s, corruption_name=n) for image in images]) for n, s in pairs
    )


def rates(x: Tensor, batch: int, severities: tuple[int, ...]) -> float:
    """Seconds of all corruptions, printing a line for each."""
    total = 0.0
    for name in BENCHMARK:
        made = [corruptions[name](severity=severity) for severity in severities]
        run(made[-1], x[:batch], None, batch)  # warm up
        seconds = sum(timed(lambda c=c: run(c, x, None, batch)) for c in made)
        print(f"{name:28s}{len(made) * len(x) / seconds:12,.0f} images/s")
        total += seconds
    return total


def grid() -> list[Callable[..., Tensor]]:
    return [corruptions[name](severity=severity) for name in BENCHMARK for severity in SEVERITIES]


@torch.inference_mode()
def run(corruption: Callable[..., Tensor] | None, x: Tensor, model: nn.Module | None, batch: int) -> None:
    for start in range(0, len(x), batch):
        images = x[start : start + batch]
        if corruption is not None:
            images = corruption(None, images, None, ids=torch.arange(start, start + len(images)))
        if model is not None:
            model(images)


def timed(work: Callable[[], object]) -> float:
    wait()
    begun = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begun


def wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"


def scenes(count: int, size: int, device: torch.device) -> Tensor:
    """(count, 3, size, size) smooth random scenes at 8-bit levels."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 6, 6, generator=generator).to(device)
    fine = nn.functional.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1)
    return (fine * 255).round() / 255


if __name__ == "__main__":
    main()
