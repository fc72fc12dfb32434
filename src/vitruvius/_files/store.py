"""Stores elsewhere, by fsspec: what fails there is explained in a sentence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from vitruvius._errors import MissingExtra, RunError
from vitruvius._secrets import redact

T = TypeVar("T")
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
