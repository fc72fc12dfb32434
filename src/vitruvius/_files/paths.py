"""Read and write by path, local or an fsspec URL. Files are whole or absent, and every failure is one RunError.

Local writes are atomic (a temporary file in the same folder, fsync, `os.replace`); object stores put whole objects.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from vitruvius._errors import ConfigError, MissingExtra, RunError, VitruviusError
from vitruvius._secrets import redact
from vitruvius._version import __version__

T = TypeVar("T")
StrPath = str | Path
WEIGHTS = ("best.safetensors", "last.safetensors", "state.pt")
OWN = re.compile(  # what training and evaluation write into a run
    r"config\.yaml|metrics\.jsonl|(best|last|last_ema|epoch_\d+|ledger)\.safetensors|state[.\w]*\.pt|report\.json"
)
LOCK = ".lock"  # end of the names of files that say who writes a folder
_BINARY = getattr(os, "O_BINARY", 0)  # Windows would translate line ends
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "r2"}  # they have buckets
TALKATIVE = ("gcsfs", "gcsfs.retry", "google.auth._default", "s3fs", "aiobotocore", "botocore")  # they log tracebacks
REASONS = {  # parts of the names and texts of the errors of many packages, none of which is imported → what to do
    ("credentials", "refresherror", "googleauth", "unauthorizedsso", "tokenretrieval", "invalidaccesskeyid",
     "signaturedoesnotmatch", "access key id you provided", "expiredtoken", "anonymous caller"):
        "there are no credentials for this store, or it refuses them. Set them as its own tools want them.",
    ("nosuchbucket", "bucket does not exist"):
        "there is no such bucket. Check its name, or make it first; buckets are never created here.",
    ("permissionerror",): "no permission. The credentials in use may not do that.",
    ("filenotfounderror", "no such file"): "there is no such file.",
    ("timeout", "connection", "clientconnector", "serverdisconnected", "could not connect", "cannot connect",
     "gaierror", "name or service not known"):
        "the store cannot be reached. Check the network and the address, and call the same command again.",
}  # fmt: skip


def is_url(path: object) -> bool:
    """True for `scheme://…`; such paths must stay strings, a `Path` would merge their slashes."""
    return isinstance(path, str) and "://" in path


def join(folder: StrPath, *names: str) -> StrPath:
    """`folder/name/…`, a Path for local folders and a string for URLs."""
    return "/".join([str(folder).rstrip("/"), *names]) if is_url(folder) else Path(folder).joinpath(*names)


def exists(path: StrPath) -> bool:
    """Whether a file or folder is there; a store that cannot be asked is a RunError."""
    if not is_url(path):
        return Path(path).exists()
    with explained(path, "read"):
        return at_url(str(path), lambda filesystem, inner: bool(filesystem.exists(inner)))


def read_bytes(path: StrPath) -> bytes:
    """The whole file, or a RunError."""
    with explained(path, "read"):
        if not is_url(path):
            if Path(path).is_fifo() and not str(path).startswith("/dev/"):
                raise RunError(f"{path} is a pipe, and reading it would wait forever; expected a file.")
            return Path(path).read_bytes()
        return at_url(str(path), lambda filesystem, inner: filesystem.cat_file(inner))


def read_text(path: StrPath) -> str:
    """The whole file as UTF-8, or a RunError."""
    return read_bytes(path).decode("utf-8")


def read_json(path: StrPath) -> dict[str, Any]:
    """The JSON object in a file, or a RunError that calls it damaged."""
    try:
        content = json.loads(read_text(path))
    except ValueError as error:
        raise RunError(f"{path} is damaged, it is not JSON: {error}. Delete it, or use a whole copy.") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: it holds {type(content).__name__}, expected a JSON object.")
    return content


def atomic_write_bytes(path: StrPath, data: bytes, *, tmp_dir: Path | None = None) -> None:
    """Replace `path` by `data` in one step; on any failure the previous file stays and nothing else is left.

    tmp_dir: a folder on the same disk where the file is written before it is moved, so that a kill leaves nothing
    beside it; default: its own folder.
    """
    with explained(path, "write"):
        if is_url(path):
            at_url(str(path), lambda filesystem, inner: filesystem.pipe_file(inner, data))
        else:
            _replace(Path(path), data, tmp_dir or Path(path).parent)


def atomic_write_text(path: StrPath, text: str) -> None:
    """`atomic_write_bytes` of UTF-8 text, with secrets hidden (`vitruvius._secrets`)."""
    atomic_write_bytes(path, redact(text).encode("utf-8"))


def append_line(path: str | Path, text: str) -> None:
    """Add a line to a local file in one write, with secrets hidden; one that does not fit on the disk is taken back."""
    line = (redact(text).rstrip("\n") + "\n").encode("utf-8")
    with explained(path, "append to"):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _BINARY, 0o666)
        try:
            before = os.fstat(handle).st_size
            try:
                if os.write(handle, line) != len(line):
                    raise OSError(errno.ENOSPC, "only a part of the line was written")
            except OSError:
                os.ftruncate(handle, before)
                raise
        finally:
            os.close(handle)


def check_out(out: StrPath, *inputs: StrPath | None, example: str = "", endings: Sequence[str] = ()) -> None:
    """Refuse a place for results before anything is computed for it: an input, a run's own file, or impossible.

    inputs: what is read, which results must not replace; None and what is no path are left out.
    example: of a file, a name for it, told to whoever names a folder; "" where `out` is a folder.
    endings: of the file's name; any where there are none.
    """
    if is_url(out):
        return
    if "\0" in str(out):
        raise RunError(f"cannot write {str(out)!r}: a path cannot hold a null byte.")
    path = Path(out).expanduser().resolve()
    if any(item is not None and not is_url(item) and Path(item).resolve() == path for item in inputs):
        raise RunError(f"{out} is what is read, and would be overwritten. Choose another place for the result.")
    with explained(out, "write"):
        above = next(folder for folder in path.parents if folder.exists())
        if not above.is_dir():
            raise RunError(f"cannot write {out}: {above} is a file, not a folder. Choose another folder.")
        if _is_run(path) or (OWN.fullmatch(path.name) and any(_is_run(folder) for folder in path.parents[:3])):
            raise RunError(f"{out} belongs to a run, and would no longer be what was trained. Choose another place.")
        if not example:
            return
        if str(out).endswith(("/", os.sep)) or path.is_dir():
            raise RunError(f"{out} is a folder; name the file, e.g. {Path(out) / example}.")
    if endings and path.suffix not in endings:
        raise RunError(f"cannot write {out}: its name must end with {' or '.join(filter(None, endings))}.")


def _is_run(folder: Path) -> bool:
    """Whether a folder holds a trained model, so that what lies in it is not to be replaced."""
    return (folder / "config.yaml").is_file() and any((folder / name).is_file() for name in WEIGHTS)


def ensure_writable(folder: str | Path) -> Path:
    """Make a local folder if need be and prove that a file can be written there, else RunError."""
    folder = Path(folder)
    with explained(folder, "write to"):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}.tmp"
        try:
            write_synced(probe, b"vitruvius")
        finally:
            probe.unlink(missing_ok=True)
    return folder


def discard(folder: Path, *files: str) -> None:
    """Remove these files if the folder holds nothing else; one that was made to be locked goes with its lock."""
    with contextlib.suppress(OSError):  # the folder is gone, or its disk has become read-only
        if all(path.name in files or is_lock(path) for path in folder.iterdir()):
            for file in files:
                (folder / file).unlink(missing_ok=True)


def is_lock(path: Path) -> bool:
    """Whether a file says who writes a folder or file."""
    return path.name.startswith(".") and path.name.endswith(LOCK)


def sweep(folder: str | Path) -> None:
    """Remove temporary files that a killed process left in a local folder."""
    for path in Path(folder).glob(".*.tmp"):
        path.unlink(missing_ok=True)


def claim_folder(folder: Path, record: str, settings: Mapping[str, Any], what: str) -> None:
    """Make a local folder that of `what` with these settings, noted in its file `record`; any other folder is refused.

    One that was begun with the same settings is taken up; what a killed process left in it is removed.
    """
    settings, file = redact(dict(settings)), folder / record
    before = read_json(file) if file.exists() else {}
    for key, value in settings.items():
        if before.get(key, value) != value:
            how = f"{key} was {before[key]!r}, is now {value!r}"
            raise ConfigError(f"{folder} holds {what} made otherwise ({how}). Choose another folder.")
    if not before and folder.exists() and any(not is_lock(file) and file.suffix != ".tmp" for file in folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and holds no {what} of this command. Choose a new or empty folder.")
    ensure_writable(folder)
    sweep(folder)
    atomic_write_text(file, json.dumps({"version": __version__, **before, **settings}, indent=1) + "\n")


@contextlib.contextmanager
def explained(path: StrPath, verb: str) -> Iterator[None]:
    """Any OSError inside, and at a URL any error of its store, as one RunError that says what to do."""
    try:
        yield
    except VitruviusError:
        raise
    except Exception as error:
        if is_url(path):
            raise RunError(redact(f"cannot {verb} {path}: {reason_of(error)}")) from error
        if isinstance(error, OSError):
            raise RunError(redact(f"cannot {verb} {path}: {_reason(error)}")) from error
        raise


def _reason(error: OSError) -> str:
    if error.errno in _FULL:
        return "the disk is full. What was there before is intact; free some space or choose another folder."
    if error.errno in _FORBIDDEN:
        return "no permission. Choose another folder or change its rights."
    if error.errno == errno.ENAMETOOLONG:
        return "the name is too long for the disk. Choose a shorter one."
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "a part of this path is a file, not a folder. Choose another folder."
    if error.errno == errno.ENOENT or isinstance(error, FileNotFoundError):
        return "there is no such file."
    return f"{error.strerror or error}."


def _replace(path: Path, data: bytes, tmp_dir: Path) -> None:
    """Write `data` in `tmp_dir`, then move it to `path`."""
    for folder in (path.parent, tmp_dir):
        folder.mkdir(parents=True, exist_ok=True)
    temporary = tmp_dir / f".{path.name}.{os.getpid()}.tmp"
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)  # noqa: PTH105 (tests replace os.replace)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # make the move itself durable; Windows cannot open folders
        folder_handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder_handle)
        finally:
            os.close(folder_handle)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _BINARY, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)


# stores elsewhere, by fsspec


def open_url(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path inside it."""
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingExtra(f"the package for {url.split('://', 1)[0]}:// paths", "cloud") from error
    except Exception as error:  # an unknown scheme, or a store that looks for credentials when it is opened
        raise RunError(redact(f"cannot open {url}: {reason_of(error)}")) from error
    return filesystem, path


def at_url(url: str, work: Callable[[Any, str], T]) -> T:
    """`work(filesystem, path)` for the file system of a URL and the path inside it; what fails is said once, by us."""
    loggers = [logging.getLogger(name) for name in TALKATIVE]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        return work(*open_url(url))
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def has_buckets(filesystem: Any) -> bool:
    """Whether folders are only names there, below a bucket that somebody must have made."""
    protocols = filesystem.protocol
    return not OBJECT_STORES.isdisjoint([protocols] if isinstance(protocols, str) else protocols)


def make_folder(filesystem: Any, folder: str) -> None:
    """Make a folder where folders are made; never a bucket."""
    if not has_buckets(filesystem):
        filesystem.makedirs(folder, exist_ok=True)


def reason_of(error: BaseException) -> str:
    """Why a store has failed, and what to do, in a sentence or two."""
    text = " ".join(str(error).split())
    mentioned = " ".join([*(kind.__name__ for kind in type(error).__mro__), text]).lower()
    for terms, reason in REASONS.items():
        if any(term in mentioned for term in terms):
            return reason
    return f"{text[:200].rstrip('.') or type(error).__name__}."
