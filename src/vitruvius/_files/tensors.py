"""Tensors in safetensors files, written atomically, with metadata and a checksum in the header; and ViTCoD's arrays.

Equal tensors and metadata have equal bytes.

You et al. 2023, "ViTCoD": maps and masks (L, H, N, M) as .npy, one for all layers of a ViT, or for a LeViT a folder
with one per stage; L layers, H heads, N queries, M keys; in masks True = removed.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from vitruvius._errors import CheckpointError, RunError
from vitruvius._files.paths import StrPath, atomic_write_bytes, read_bytes
from vitruvius._secrets import redact

CHECKSUM = "sha256"  # metadata key of `save_tensors`; checked and removed by `load_tensors`


def save_tensors(path: StrPath, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically, with `metadata` and a checksum of the tensors in its header."""
    atomic_write_bytes(path, pack_tensors(tensors, metadata))


def pack_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of such a file; secrets in the metadata are hidden."""
    plain = _separate(tensors)
    data = safetensors.torch.save(plain)
    size = int.from_bytes(data[:8], "little")
    notes = {**redact(dict(metadata or {})), CHECKSUM: _checksum(plain)}
    header = {"__metadata__": dict(sorted(notes.items())), **json.loads(data[8 : 8 + size])}  # its own order is random
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, memoryview(data)[8 + size :]])


def load_tensors(path: StrPath) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors on the CPU, metadata) of a safetensors file; CheckpointError if it is missing or damaged."""
    try:
        data = read_bytes(path)
    except RunError as error:
        raise CheckpointError(str(error)) from error
    return unpack_tensors(data, path)


def unpack_tensors(data: bytes, path: StrPath) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors on the CPU, metadata) of the bytes of such a file; `path` names it in errors."""
    try:
        tensors = safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(_damage(path, data, error)) from error
    size = int.from_bytes(data[:8], "little")
    metadata: dict[str, str] = json.loads(data[8 : 8 + size]).get("__metadata__") or {}
    expected = metadata.pop(CHECKSUM, None)
    if expected is not None and expected != _checksum(tensors):
        raise CheckpointError(f"{path} is damaged: its tensors do not match its checksum. Use an earlier checkpoint.")
    return tensors, metadata


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors that share no memory, as safetensors wants them, by their sorted names."""
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name in sorted(tensors):
        plain = tensors[name].detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        separate[name] = plain.clone() if storage in seen else plain
        seen.add(storage)
    return separate


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of the numbers of a `tensor`, in their order; of any type, which numpy does not know all of."""
    plain = tensor.detach().cpu().contiguous()
    line = plain.as_strided((plain.numel(),), (1,))  # a single number may have any stride and be contiguous
    return line.view(torch.uint8).numpy().data


def _damage(path: StrPath, data: bytes, error: Exception) -> str:
    if data[:2] in (b"PK", b"\x80\x02"):
        return f"{path} is a pickled PyTorch file, not safetensors. Convert it first: vitruvius convert {path}"
    return f"{path} is not a whole safetensors file ({len(data)} bytes: {error}). Use an earlier checkpoint."


# ViTCoD's arrays


def is_array(path: str | Path) -> bool:
    """Whether a path names such arrays: a .npy file, or a folder of them."""
    return Path(path).suffix == ".npy" or (Path(path).suffix == "" and not Path(path).is_file())


def read_arrays(path: str | Path, stem: str) -> dict[str, Tensor]:
    """ViTCoD's array of all layers, or its folder of one array a stage, by our site names."""
    path = Path(path)
    if not path.is_dir():
        return {f"blocks.{i}.attn": layer for i, layer in enumerate(_read_array(path))}
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob(f"{stem}_*.npy")):
        kind, stage = re.fullmatch(rf"{stem}_(dpt|subsample)(\d+)", file.stem).groups()  # type: ignore[union-attr]
        for block, layer in enumerate(_read_array(file)):
            name = f"stages.{stage}.blocks.{block}.attn"
            found[name if kind == "dpt" else f"stages.{int(stage) + 1}.downsample.attn_downsample"] = layer
    if not found:
        raise CheckpointError(f"{path} holds no {stem}_dpt*.npy; expected ViTCoD's arrays of the stages of a LeViT.")
    return found


def read_mask_arrays(path: str | Path) -> dict[str, Tensor]:
    """The same for masks, turned over: True = kept."""
    keep: dict[str, Tensor] = {}
    for name, removed in read_arrays(path, "mask").items():
        if not ((removed == 0) | (removed == 1)).all():
            advice = f"average maps? `vitruvius masks {path}` makes masks of them."
            raise CheckpointError(f"{path} holds other numbers than 0 and 1 at {name!r}: {advice}")
        keep[name] = removed == 0
    return keep


def save_array(path: str | Path, array: np.ndarray) -> None:
    """One .npy file, whole or not at all."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    atomic_write_bytes(path, file.getvalue())


def _read_array(path: Path) -> Tensor:
    """(L, H, N, M)."""
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path} is not one of ViTCoD's arrays: {error}") from error
    if array.ndim != 4:
        raise CheckpointError(f"{path} has shape {array.shape}; expected (layers, heads, queries, keys).")
    return torch.from_numpy(np.ascontiguousarray(array))
