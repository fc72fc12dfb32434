"""Stores on 127.0.0.1 that the tests start and kill: moto for S3, gcp-storage-emulator for Google Cloud Storage."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BUCKET = "mine"


def require(*packages: str) -> None:
    """Skip, visibly, where the extra `cloud-tests` is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install 'vitruvius[cloud,cloud-tests]'")


def forget_connections(scheme: str) -> None:
    """fsspec keeps a file system for each set of settings; another server is another store."""
    import fsspec

    fsspec.get_filesystem_class(scheme).clear_instance_cache()


class Store:
    """A server that may be killed and come back at the same address, with what it held."""

    scheme = ""

    def kill(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def buckets(self) -> list[str]:
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"{self.scheme}://{BUCKET}/runs/one"


class S3(Store):
    scheme = "s3"

    def __init__(self) -> None:
        self.port = free_port()
        self.server: Any = None

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        self.server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self.server.start()

    def kill(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None

    def client(self) -> Any:
        import boto3

        return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.port}", region_name="us-east-1")

    def buckets(self) -> list[str]:
        return [bucket["Name"] for bucket in self.client().list_buckets()["Buckets"]]


class GCS(Store):
    scheme = "gs"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.server: Any = None

    def start(self) -> None:
        from gcp_storage_emulator.server import create_server

        self.server = create_server("127.0.0.1", self.port, default_bucket=BUCKET, data_dir=str(self.folder))
        self.server.start()

    def kill(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None

    def buckets(self) -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/storage/v1/b") as answer:
            return [bucket["name"] for bucket in json.load(answer)["items"]]


class Hurried:
    """asyncio for gcsfs, which waits half a minute by itself before it gives up."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.01))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[S3]:
    """`folder` is not used: moto remembers in this process."""
    require("moto", "s3fs", "flask", "boto3")
    import s3fs
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    store = S3()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.port}")
    forget_connections("s3")
    store.start()
    try:
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].reset()
        store.client().create_bucket(Bucket=BUCKET)
        yield store
    finally:
        store.kill()
        forget_connections("s3")


@contextmanager
def gcs_server(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[GCS]:
    require("gcp_storage_emulator", "gcsfs")
    import gcsfs.retry

    monkeypatch.setattr(gcsfs.retry, "asyncio", Hurried())
    store = GCS(folder)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{store.port}")
    forget_connections("gs")
    store.start()
    try:
        yield store
    finally:
        store.kill()
        forget_connections("gs")
