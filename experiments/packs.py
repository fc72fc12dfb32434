"""Packs bring a campaign home from another machine: its files but weights and states, in pieces; unfinished runs too.

Unpacked, a sweep knows which of its runs are finished and resumes the others.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

PIECE = 15  # MiB of one file of a pack
WEIGHTS = ("best.safetensors", "last.safetensors")
HEAVY = ("maps.safetensors", "maps.partial")  # left out of a pack, as weights and states are


def pack(folder: Path, out: Path, *, weights: list[str], piece: int = PIECE) -> list[str]:
    """Write a campaign as NAME.tar.gz in pieces; what was written, with sizes."""
    if not folder.is_dir():
        raise SystemExit(f"{folder} is not a folder; expected that of a sweep or a study.")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file in packed_files(folder, weights):
            archive.add(file, arcname=f"{folder.name}/{file.relative_to(folder).as_posix()}")
    data = buffer.getvalue()
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob(f"{folder.name}.tar.gz.*"):
        old.unlink()
    said = []
    for number, start in enumerate(range(0, len(data), piece * 2**20)):
        part = out / f"{folder.name}.tar.gz.{number:02d}"
        part.write_bytes(data[start : start + piece * 2**20])
        said.append(f"{part} {part.stat().st_size / 2**20:.1f} MiB")
    return said


def packed_files(folder: Path, weights: list[str]) -> Iterator[Path]:
    """What a pack holds of a campaign: everything but locks, states, maps and weights, but for those asked for."""
    wanted = {weights_of(folder / name) for name in weights}
    for file in sorted(folder.rglob("*")):
        is_plain = file.is_file() and not file.is_symlink() and ".lock" not in file.name
        if is_plain and (file in wanted or not is_heavy(file)):
            yield file


def is_heavy(file: Path) -> bool:
    """Maps, states, images of an attack under way, and weights of any kind: best, last, averaged, kept."""
    of_run = file.suffix == ".safetensors" and (file.parent / "config.yaml").is_file()
    return of_run or file.suffix == ".pt" or file.name in HEAVY or file.parent.name in ("kept", "points")


def weights_of(run: Path) -> Path:
    """The best weights of a run, else its last ones."""
    for name in WEIGHTS:
        if (run / name).is_file():
            return run / name
    raise SystemExit(f"{run.parent} has no weights of {run.name}.")


def unpack(piece: Path, folder: Path) -> Path:
    """Join the pieces of a pack and lay its files under a folder; the campaign's folder there."""
    stem, _, number = piece.name.rpartition(".")
    if not stem.endswith(".tar.gz") or not number.isdigit():
        raise SystemExit(f"{piece} is not a piece of a pack; expected NAME.tar.gz.00.")
    parts = sorted(piece.parent.glob(f"{stem}.[0-9][0-9]"))
    numbers = [int(part.name[-2:]) for part in parts]
    if numbers != list(range(len(parts))):
        raise SystemExit(f"{piece.parent} lacks a piece of {stem}: it has {numbers}.")
    data = io.BytesIO(b"".join(part.read_bytes() for part in parts))
    with tarfile.open(fileobj=data, mode="r:gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / stem.removesuffix(".tar.gz")
