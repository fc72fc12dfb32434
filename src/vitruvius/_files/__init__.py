"""Files that are whole or absent; paths may be fsspec URLs.

Local writes are atomic (temporary file in the same folder, fsync, `os.replace`); object stores put whole objects.
"""

from vitruvius._files._arrays import is_array, read_arrays, read_mask_arrays
from vitruvius._files._lock import Lock
from vitruvius._files._mirror import Mirror, fetch, place_of
from vitruvius._files._paths import (
    MadeFolder,
    StrPath,
    append_line,
    atomic_write_bytes,
    atomic_write_text,
    check_new_file,
    ensure_writable,
    exists,
    explained,
    is_url,
    join,
    read_bytes,
    read_json,
    read_text,
    sweep,
)
from vitruvius._files._sealed import PREVIOUS, STATE, seal, unseal
from vitruvius._files._store import is_lock
from vitruvius._files._tensors import bytes_of, load_tensors, pack_tensors, save_tensors, unpack_tensors

__all__ = [
    "PREVIOUS",
    "STATE",
    "Lock",
    "MadeFolder",
    "Mirror",
    "StrPath",
    "append_line",
    "atomic_write_bytes",
    "atomic_write_text",
    "bytes_of",
    "check_new_file",
    "ensure_writable",
    "exists",
    "explained",
    "fetch",
    "is_array",
    "is_lock",
    "is_url",
    "join",
    "load_tensors",
    "pack_tensors",
    "place_of",
    "read_arrays",
    "read_bytes",
    "read_json",
    "read_mask_arrays",
    "read_text",
    "save_tensors",
    "seal",
    "sweep",
    "unpack_tensors",
    "unseal",
]
