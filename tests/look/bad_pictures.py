"""Files that are no picture, or not one that may be opened."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image


def png(width: int, height: int, pixels: bytes = b"") -> bytes:
    """A grey PNG that says it is so large, whatever it holds."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = zlib.compress(pixels, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def photograph() -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "JPEG")
    return file.getvalue()


def bad_files() -> dict[str, bytes]:
    """By name; each must get one sentence."""
    whole = photograph()
    file = io.BytesIO()
    Image.open(io.BytesIO(whole)).save(file, "PNG")
    return {
        "empty.jpg": b"",
        "text.png": b"I am no picture.",
        "page.jpg": b"<html><body>404 Not Found</body></html>",
        "drawing.svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        "script.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
        "truncated.jpg": whole[: len(whole) // 2],
        "truncated.png": file.getvalue()[:2000],
        "header.jpg": whole[:20],
        "bytes.png": file.getvalue()[:60] + b"\0" * 500,
        "bomb.png": png(30_000, 30_000, b"\0" * 100_000),
        "hundred.png": png(10_000, 10_000, b""),
        "huge.png": png(2**31 - 1, 2**31 - 1),
        "nothing.png": png(0, 0),
        "line.png": png(20_000, 3, b"\0" * 20_001 * 3),
        "hollow.png": png(5_000, 5_000, b""),
    }


def write_all(folder: Path) -> list[Path]:
    for name, data in bad_files().items():
        (folder / name).write_bytes(data)
    return [folder / name for name in bad_files()]
