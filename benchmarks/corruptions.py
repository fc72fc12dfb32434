"""Corruptions on the fly: 15 × 5 on small images with a DeiT-Tiny-sized model, against one process image by image.

    python -m benchmarks corruptions [--images 10000] [--loop 6]

Images are noise-free random scenes of 32 × 32 pixels; the model is DeiT-Tiny's (12 blocks, width 192, 3 heads) on
patches of 4 with 32-pixel images. Three figures from one run: corruption alone, batched; corruption and model together,
as `evaluate` does; and the same corruptions one image at a time on one core, as the per-image libraries work. Where
imagecorruptions-imaug is installed, it is timed in that way too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import timm
import torch
from torch import Tensor, nn

from vitruvius._processes import choose_device
from vitruvius.corruptions import BENCHMARK, SEVERITIES, corruptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--loop", type=int, default=6, help="images of the loop on one core")
    parser.add_argument("--large", type=int, default=256, help="images of 224 pixels, corrupted only; 0: none")
    parser.add_argument("--without-model", action="store_true", help="corruptions alone")
    options = parser.parse_args()
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
    passes = len(BENCHMARK) * len(SEVERITIES)
    alone = rates(x, options.batch, SEVERITIES)
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    few = x[: options.loop].cpu()
    loop = sum(timed(lambda c=c: [c.apply(few[i : i + 1]) for i in range(len(few))]) for c in grid())
    print(f"{'corruption alone':28s}{passes * len(x) / alone:12,.0f} images/s")
    print(f"{'one core, image by image':28s}{passes * len(few) / loop:12,.0f} images/s, corruption alone")
    print(f"ratio: {len(x) / alone * loop / len(few):.1f}×")
    if theirs := package_seconds(few):
        print(f"{'imagecorruptions, one core':28s}{passes * len(few) / theirs:12,.0f} images/s")
        print(f"ratio: {len(x) / alone * theirs / len(few):.1f}×")
    torch.set_num_threads(torch_threads)
    if options.without_model:
        return
    clean = timed(lambda: run(None, x, model, options.batch))
    both = sum(timed(lambda c=c: run(c, x, model, options.batch)) for c in grid())
    print(f"{'model alone':28s}{len(x) / clean:12,.0f} images/s")
    print(f"{'corruption and model':28s}{passes * len(x) / both:12,.0f} images/s, 15 × 5 in {both:.1f} s")
    print(f"share of the time that the model needs: {passes * clean / both:.0%}")


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
