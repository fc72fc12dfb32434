"""Stores elsewhere, by fsspec: requests are repeated where that may help, and failures explained in a sentence."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from vitruvius._errors import MissingExtra, RunError, VitruviusError
from vitruvius._secrets import redact

T = TypeVar("T")
DELAYS = (0.5, 1.0, 2.0, 4.0)  # seconds before each further attempt
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "r2"}  # they have buckets
TALKATIVE = ("gcsfs", "gcsfs.retry", "google.auth._default", "s3fs", "aiobotocore", "botocore")  # they log tracebacks
CREDENTIALS = (  # parts of the names and texts of the errors of many packages, so that none of them is imported
    "nocredentials", "partialcredentials", "credentialretrieval", "defaultcredentials", "refresherror", "googleauth",
    "unauthorizedsso", "tokenretrieval", "unable to locate credentials", "invalidaccesskeyid", "signaturedoesnotmatch",
    "access key id you provided does not exist", "expiredtoken", "anonymous caller", "invalid credentials",
)  # fmt: skip
UNREACHABLE = (
    "connecttimeout", "readtimeout", "endpointconnection", "connectionclosed", "clientconnector", "serverdisconnected",
    "could not connect", "cannot connect", "gaierror", "name or service not known", "fstimeout", "proxyconnection",
)  # fmt: skip
NO_BUCKET = ("nosuchbucket", "bucket does not exist")
FINAL = (FileNotFoundError, FileExistsError, PermissionError, VitruviusError, ValueError, TypeError)


def is_url(path: object) -> bool:
    """True for `scheme://…`; such paths must stay strings, a `Path` would merge their slashes."""
    return isinstance(path, str) and "://" in path


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
    """`work(filesystem, path)` for the file system of a URL and the path inside it, repeated where that may help."""
    filesystem, path = open_url(url)
    return retry(lambda: work(filesystem, path))


def retry(work: Callable[[], T]) -> T:
    """`work()`, repeated after a while where it fails for a reason that may pass; the last error is raised."""
    with _packages_are_quiet():
        for delay in DELAYS:
            try:
                return work()
            except Exception as error:
                if isinstance(error, FINAL) or _mentions(error, CREDENTIALS + NO_BUCKET):
                    raise
                time.sleep(delay)
        return work()


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
    if _mentions(error, CREDENTIALS):
        return "there are no credentials for this store, or it refuses them. Set them as its own tools want them."
    if _mentions(error, NO_BUCKET):
        return "there is no such bucket. Check its name, or make it first; buckets are never created here."
    if isinstance(error, PermissionError):
        return "no permission. The credentials in use may not do that."
    if _mentions(error, UNREACHABLE) or isinstance(error, ConnectionError | TimeoutError):
        return "the store cannot be reached. Check the network and the address, and call the same command again."
    if isinstance(error, FileNotFoundError) or getattr(error, "errno", None) == errno.ENOENT:
        return "there is no such file."
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text[:200].rstrip('.')}."


def _mentions(error: BaseException, terms: tuple[str, ...]) -> bool:
    """Whether the classes or the text of an error mention one of these terms."""
    text = " ".join([*(kind.__name__ for kind in type(error).__mro__), str(error)]).lower()
    return any(term in text for term in terms)


@contextlib.contextmanager
def _packages_are_quiet() -> Iterator[None]:
    """Inside, the packages of the stores log nothing: what fails in the end is said once, by us."""
    loggers = [logging.getLogger(name) for name in TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
