"""Stores elsewhere, by fsspec: asked again with back-off where that may help, every failure one sentence."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import PurePath, PurePosixPath
from typing import Any, TypeVar

import fsspec

from vitruvius._errors import MissingExtra, RunError
from vitruvius._secrets import redact_text

T = TypeVar("T")
LOCK = ".lock"  # end of the names of files that say who writes a folder (`vitruvius._files.Lock`)
DELAYS = (0.5, 1.0, 2.0, 4.0)  # seconds before each further attempt
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "r2"}  # they have buckets
_TALKATIVE = (
    "gcsfs",
    "gcsfs.retry",
    "google.auth._default",
    "s3fs",
    "aiobotocore",
    "botocore",
)  # they log tracebacks of what is tried again
_CREDENTIALS = (
    "nocredentials", "partialcredentials", "credentialretrieval", "defaultcredentials", "refresherror", "googleauth",
    "unauthorizedsso", "tokenretrieval", "unable to locate credentials", "invalidaccesskeyid", "signaturedoesnotmatch",
    "access key id you provided does not exist", "expiredtoken", "anonymous caller", "invalid credentials",
)  # fmt: skip
_UNREACHABLE = (
    "connecttimeout", "readtimeout", "endpointconnection", "connectionclosed", "clientconnector", "serverdisconnected",
    "could not connect", "cannot connect", "gaierror", "name or service not known", "fstimeout", "proxyconnection",
)  # fmt: skip
_NO_BUCKET = ("nosuchbucket", "bucket does not exist")


def open_url(path: str) -> tuple[Any, str]:
    """The file system of a URL, and the path inside it."""
    scheme = path.split("://", 1)[0]
    try:
        filesystem, inner = fsspec.core.url_to_fs(path)
    except ImportError as error:
        raise MissingExtra(f"the package for {scheme}:// paths", "cloud") from error
    except ValueError as error:
        raise RunError(redact_text(f"cannot open {path}: {error}")) from error
    except Exception as error:  # of a store that looks for credentials when it is opened
        raise RunError(redact_text(f"cannot open {path}: {reason_of(error)}")) from error
    return filesystem, inner


def persist(work: Callable[[], T]) -> T:
    """`work()`, again after a while where it fails for a reason that may pass; the last error is raised."""
    for delay in DELAYS:
        try:
            return quietly(work)
        except Exception as error:
            if not may_pass(error):
                raise
            time.sleep(delay)
    return quietly(work)


def may_pass(error: Exception) -> bool:
    """Whether trying again may help: not where something is missing, forbidden or misspelt."""
    if isinstance(
        error, FileNotFoundError | FileExistsError | PermissionError | RunError | MissingExtra | ValueError | TypeError
    ):
        return False
    return not _says(error, _CREDENTIALS) and not _says(error, _NO_BUCKET)


def has_buckets(filesystem: Any) -> bool:
    """Whether folders are only names there, below a bucket that somebody must have made."""
    protocol = filesystem.protocol
    if isinstance(protocol, str):
        protocol = (protocol,)
    return not OBJECT_STORES.isdisjoint(protocol)


def make_folder(filesystem: Any, folder: str) -> None:
    """Make a folder where folders are made; never a bucket."""
    if not has_buckets(filesystem):
        filesystem.makedirs(folder, exist_ok=True)


def is_lock(path: PurePath) -> bool:
    """Whether a file says who writes a folder or file."""
    return path.name.startswith(".") and path.name.endswith(LOCK)


def list_files(url: str) -> dict[str, str]:
    """Every file below a URL by its path inside, with a stamp that changes with it, locks left out.

    RunError for a missing bucket.
    """
    filesystem, root = open_url(url)
    filesystem.invalidate_cache()
    if not has_buckets(filesystem) and not filesystem.exists(root):
        return {}
    try:
        found = filesystem.find(root, detail=True)
    except FileNotFoundError as error:
        if not has_buckets(filesystem):
            return {}
        bucket = root.partition("/")[0]
        raise RunError(
            redact_text(
                f"cannot open {url}: there is no bucket {bucket!r}. Check its name, or make it first; buckets are "
                "never created here."
            )
        ) from error
    files = {path[len(root) :].lstrip("/"): _stamp(facts) for path, facts in found.items()}
    return {name: stamp for name, stamp in files.items() if not is_lock(PurePosixPath(name))}


def reason_of(error: BaseException) -> str:
    """Why a store has failed, and what to do, in a sentence or two."""
    if _says(error, _CREDENTIALS):
        return "there are no credentials for this store, or it refuses them. Set them as its own tools want them."
    if _says(error, _NO_BUCKET):
        return "there is no such bucket. Check its name, or make it first; buckets are never created here."
    if isinstance(error, PermissionError):
        return "no permission. The credentials in use may not do that."
    if _says(error, _UNREACHABLE) or isinstance(error, ConnectionError | TimeoutError):
        return "the store cannot be reached. Check the network and the address, and call the same command again."
    if isinstance(error, FileNotFoundError) or getattr(error, "errno", None) == errno.ENOENT:
        return "there is no such file."
    words = " ".join(str(error).split()) or type(error).__name__
    return f"{words[:200].rstrip('.')}."


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    """Whether an error, by its classes or its text, says one of these words; so no store's package is imported."""
    text = " ".join([*(kind.__name__ for kind in type(error).__mro__), str(error)]).lower()
    return any(word in text for word in words)


def _stamp(facts: dict[str, Any]) -> str:
    """What tells a file from its next version: its size, and whatever its store says of its contents or time."""
    known = [facts.get(name) for name in ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime", "created")]
    return f"{facts.get('size')} {next((value for value in known if value is not None), '')}"


def quietly(work: Callable[[], T]) -> T:
    """`work()` while the stores' packages log nothing: what fails in the end is said once, by us."""
    with _silence():
        return work()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Several threads may be in here at once: the first one notes the levels, the last one puts them back."""
    with _counting:
        if not _levels:
            for name in _TALKATIVE:
                _levels[name] = logging.getLogger(name).level
                logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        _inside.append(None)
    try:
        yield
    finally:
        with _counting:
            _inside.pop()
            if not _inside:
                for name, level in _levels.items():
                    logging.getLogger(name).setLevel(level)
                _levels.clear()


_counting = threading.Lock()
_inside: list[None] = []
_levels: dict[str, int] = {}
