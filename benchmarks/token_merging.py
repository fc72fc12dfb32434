"""Token merging on a pretrained ViT: images per second, and accuracy of its features, over the tokens merged per block.

    python -m benchmarks token_merging --pack images.npz --archives train_a.tar train_b.tar val.tar
    python -m benchmarks token_merging --weights vit_small_patch14_dinov2.safetensors --images images.npz

The first command packs so many JPEGs of each class of image folders (`train/<class>/…`, `val/<class>/…`, in tar files)
into one file, the second measures. Nothing is trained but the judges of the class token (after the last norm): the
labels of the 10 nearest training images by cosine, and a logistic regression. bfloat16 on an accelerator, float32 on a
CPU. Rates are those of the forward pass alone, from pixels on the device: every row is timed several times in turn,
and the median counts. Where CUDA graphs can be recorded, their rate stands beside: what the GPU needs, without the
host that launches it.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tarfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import vitruvius

MODEL = "vit_small_patch14_dinov2"
NEIGHBOURS = 10
Row = dict[str, Any]


class Images(NamedTuple):
    """Decoded pictures and their classes."""

    pixels: Tensor  # (B, 3, size, size), uint8
    labels: np.ndarray
    trains: np.ndarray  # whether each is a training image


def main() -> None:
    options = read_options()
    if options.pack:
        return pack(options.archives, options.pack, options.train_images, options.val_images)
    if not (options.weights and options.images):
        raise SystemExit("give --weights FILE and --images FILE, or --pack FILE and --archives FILE … to make images.")
    rows = measure(options)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help=f"safetensors with the keys of timm's {MODEL}, no head")
    parser.add_argument("--images", type=Path, help="a file that --pack wrote")
    parser.add_argument("--r", type=int, nargs="+", default=[0, 4, 8, 12, 16, 20], help="tokens merged in each block")
    parser.add_argument("--plain", action="store_true", help="also with proportional=false")
    parser.add_argument("--batch", type=int, help="default: 256 on an accelerator, 16 on a CPU")
    parser.add_argument("--rounds", type=int, default=5, help="of timing, whose median counts")
    parser.add_argument("--device", help="default: the accelerator, or the CPU without one")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--pack", type=Path, help="write this file and stop")
    parser.add_argument("--archives", type=Path, nargs="+", default=[], help="tar files of image folders")
    parser.add_argument("--train-images", type=int, default=100, help="of each class, to pack")
    parser.add_argument("--val-images", type=int, default=200, help="of each class, to pack")
    return parser.parse_args()


# ---- images in one file ----


def pack(archives: list[Path], target: Path, train_images: int, val_images: int) -> None:
    """The first JPEGs of each class of both splits, as they are, in one npz."""
    limits = {"train": train_images, "val": val_images}
    found: Counter[tuple[str, str]] = Counter()
    pictures: list[bytes] = []
    places: list[tuple[str, str]] = []
    for place, picture in _members(archives):
        if found[place] < limits.get(place[0], 0):
            found[place] += 1
            pictures.append(picture)
            places.append(place)
    if not pictures:
        raise SystemExit("no JPEG under train/<class>/ or val/<class>/ in --archives.")
    classes = sorted({name for _, name in places})
    np.savez(
        target,
        jpegs=np.frombuffer(b"".join(pictures), np.uint8),
        ends=np.cumsum([len(picture) for picture in pictures]),
        labels=np.array([classes.index(name) for _, name in places]),
        trains=np.array([split == "train" for split, _ in places]),
        classes=np.array(classes),
    )
    megabytes = target.stat().st_size / 2**20
    print(f"{target}: {len(pictures)} images of {len(classes)} classes, {megabytes:.1f} MiB")


def _members(archives: list[Path]) -> Iterator[tuple[tuple[str, str], bytes]]:
    """(split, class) and bytes of every JPEG."""
    for archive in archives:
        with tarfile.open(archive) as tar:
            for member in tar:
                folders = Path(member.name).parts
                file = tar.extractfile(member)
                if file is not None and len(folders) >= 3 and folders[-1].lower().endswith((".jpg", ".jpeg")):
                    yield (folders[-3], folders[-2]), file.read()


def read_images(path: Path, size: int) -> Images:
    with np.load(path) as stored:
        jpegs, ends, labels, trains = (stored[name] for name in ("jpegs", "ends", "labels", "trains"))
    pictures = [piece.tobytes() for piece in np.split(jpegs, ends[:-1])]
    with ThreadPoolExecutor() as threads:
        pixels = list(threads.map(lambda picture: _decode(picture, size), pictures))
    return Images(torch.stack(pixels), labels, trains)


def _decode(picture: bytes, size: int) -> Tensor:
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(image)).movedim(-1, 0)


# ---- the model and what is asked of it ----


class Subject:
    """The pretrained model on its device, with or without merging."""

    def __init__(self, weights: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.model = vitruvius.create_model(MODEL, num_classes=0, img_size=224)
        vitruvius.models.load_weights(self.model, weights, resample=True)
        self.model.to(device, dtype)
        self.device, self.dtype = device, dtype

    def wear(self, part: str) -> None:
        """Attention as timm has it, or one part."""
        vitruvius.restore(self.model)
        if part != "timm":
            vitruvius.rewire(self.model, part)

    def to_input(self, pixels: Tensor) -> Tensor:
        return pixels.to(self.device).to(self.dtype) / 255

    @torch.no_grad()
    def features(self, pixels: Tensor, batch: int) -> Tensor:
        """Class tokens (B, C), on the CPU."""
        return torch.cat([self.model(self.to_input(some)).float().cpu() for some in pixels.split(batch)])


def measure(options: argparse.Namespace) -> list[Row]:
    device = torch.device(options.device or _best_device())
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    batch = options.batch or (16 if device.type == "cpu" else 256)
    subject = Subject(options.weights, device, dtype)
    images = read_images(options.images, 224)
    counts = f"{int(images.trains.sum())} training and {int((~images.trains).sum())} validation images"
    print(f"{MODEL} at 224 px, {dtype}, batches of {batch}, {_name(device)}; {counts}")
    print(f"torch {torch.__version__}, timm {timm.__version__}, vitruvius {vitruvius.__version__}", flush=True)
    rows = [{"attention": part} for part in _parts(options.r, options.plain)]
    for row in rows:
        subject.wear(row["attention"])
        row |= judge(subject.features(images.pixels, batch), images)
    time_all(subject, rows, images.pixels[:batch], options.rounds)
    show(rows)
    return rows


def _best_device() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None and torch.accelerator.is_available() else "cpu"


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def _parts(merged: list[int], plain: bool) -> list[str]:
    parts = ["timm", *(f"tome:r={r}" for r in merged)]
    if plain:
        parts += [f"tome:r={r},proportional=false" for r in merged if r]
    return parts


# ---- accuracy ----


def judge(features: Tensor, images: Images) -> Row:
    """Accuracy of both judges on the validation images, in per cent."""
    trains, labels = images.trains, images.labels
    found = {
        "knn": _nearest(features[trains], labels[trains], features[~trains]),
        "linear": _regressed(features[trains], labels[trains], features[~trains]),
    }
    return {name: 100 * float((answer == labels[~trains]).mean()) for name, answer in found.items()}


def _nearest(known: Tensor, labels: np.ndarray, asked: Tensor) -> np.ndarray:
    """The class of most of the nearest training images, each counted by its cosine."""
    cosines = torch.nn.functional.normalize(asked, dim=-1) @ torch.nn.functional.normalize(known, dim=-1).mT
    weights, nearest = cosines.topk(NEIGHBOURS, dim=-1)
    votes = torch.zeros(len(asked), int(labels.max()) + 1)
    votes.scatter_add_(1, torch.from_numpy(labels)[nearest], weights)
    return votes.argmax(-1).numpy()


def _regressed(known: Tensor, labels: np.ndarray, asked: Tensor) -> np.ndarray:
    judge = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
    answer: np.ndarray = judge.fit(known.numpy(), labels).predict(asked.numpy())
    return answer


# ---- speed ----


def time_all(subject: Subject, rows: list[Row], pixels: Tensor, rounds: int) -> None:
    """Images per second of every row, launched by the host and, on CUDA, as a graph."""
    x = subject.to_input(pixels)
    for row in rows:
        row["rates"], row["graph_rates"] = [], []
    for _ in range(rounds):
        for row in rows:
            subject.wear(row["attention"])
            eager, graphed = _rates(subject, x)
            row["rates"].append(eager)
            row["graph_rates"].append(graphed)
    for row in rows:
        row["images_per_second"] = statistics.median(row["rates"])
        row["images_per_second_as_graph"] = statistics.median(row["graph_rates"])


@torch.no_grad()
def _rates(subject: Subject, x: Tensor) -> tuple[float, float]:
    calls = 1 if x.device.type == "cpu" else 5
    subject.model(x)
    eager = _rate(lambda: subject.model(x), len(x), calls)
    if x.device.type != "cuda":
        return eager, float("nan")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            subject.model(x)
    except RuntimeError as problem:
        warnings.warn(f"no CUDA graph of this model: {problem}", stacklevel=2)
        return eager, float("nan")
    return eager, _rate(graph.replay, len(x), calls)


def _rate(call: Callable[[], Any], images: int, calls: int) -> float:
    _wait()
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    _wait()
    return images * calls / (time.perf_counter() - begun)


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def show(rows: list[Row]) -> None:
    first = rows[0]
    print(f"{'':34s}images/s  of timm   as a graph  of timm    {NEIGHBOURS}-NN   linear probe")
    for row in rows:
        rate, graph = row["images_per_second"], row["images_per_second_as_graph"]
        print(
            f"{row['attention']:34s}{rate:8.1f}{rate / first['images_per_second']:9.2f}"
            f"{graph:13.1f}{graph / first['images_per_second_as_graph']:9.2f}"
            f"{row['knn']:8.1f} %{row['linear']:12.1f} %"
        )


if __name__ == "__main__":
    main()
