"""Runs at s3:// and gs://, against real servers on 127.0.0.1 that are killed and come back.

The servers need the extras `cloud` and `cloud-tests`; where they are missing these tests are skipped and say so. What
needs no server is tested with fsspec's memory in test_remote_run.py.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from small_run import RECIPE, SMALL, assert_same_run, contents, rows_of, small_config, small_run
from stores import Store, forget_connections, gcs_server, s3_server
from vitruvius._errors import RunError
from vitruvius._files import local_path
from vitruvius.cli import main
from vitruvius.training import fetch, train

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
SERVERS = {"s3": s3_server, "gs": gcs_server}


@pytest.fixture(params=["s3", "gs"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A server with one empty bucket; the working folder is empty."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with SERVERS[request.param](monkeypatch, tmp_path / "server") as server:
        yield server


def said_by(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that answers a mistake."""
    assert main(words) == 1
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("vitruvius: ")]
    assert "Traceback" not in err
    assert len(lines) == 1
    return lines[0]


class Outage:
    """Kills a store after the first epoch and brings it back after another."""

    def __init__(self, store: Store, *, back_after: int | None) -> None:
        self.store = store
        self.back_after = back_after

    def epoch_end(self, epoch: int, model: nn.Module) -> None:
        if epoch == 0:
            self.store.kill()
        if epoch == self.back_after:
            self.store.start()


def test_a_run_survives_an_outage_of_its_store_and_goes_on_elsewhere(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A true outage: the server is stopped while the run trains."""
    settings = ("train.epochs=3",)
    unbroken = small_run(tmp_path / "unbroken", *settings)
    with caplog.at_level(logging.WARNING):
        run = train(small_config(store.url, *settings), quiet=True, callbacks=[Outage(store, back_after=1)])  # type: ignore[arg-type]
    assert_same_run(run, unbroken)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("vitruvius")]
    assert said
    assert "the store cannot be reached" in said[0]
    assert f"Training continues in {run}; the next save tries again." in said[0]
    assert not any(record.exc_info for record in caplog.records)
    copy = fetch(store.url, Path("copy"))
    assert contents(copy) == contents(run)
    shutil.rmtree("runs")  # another machine
    again = small_run(store.url, *settings)  # type: ignore[arg-type]
    assert contents(again) == contents(copy)


def test_what_could_not_be_uploaded_is_uploaded_by_the_same_command(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    small_run(store.url, "train.epochs=1")  # type: ignore[arg-type]
    longer = ("train.epochs=2",)
    place = local_path(store.url)
    shutil.rmtree(place)
    place.with_name(f".{place.name}.copy.json").unlink()
    url = f"{store.url}-longer"
    with pytest.raises(RunError, match=r"the store cannot be reached.*is whole; the same command uploads it"):
        train(small_config(url, *longer), quiet=True, callbacks=[Outage(store, back_after=None)])  # type: ignore[arg-type]
    assert len(rows_of(local_path(url))) == 2
    before = contents(local_path(url))
    store.start()
    run = small_run(url, *longer)  # type: ignore[arg-type]
    assert contents(run) == before  # the newer copy was here, and stayed
    assert contents(fetch(url, Path("copy"))) == before


def test_a_mistyped_bucket_is_one_line_and_never_created(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{store.scheme}://mistyped/run"
    said = said_by(capsys, "train", str(RECIPE), *SMALL, f"out={url}", "--quiet")
    assert "there is no bucket 'mistyped'" in said
    assert "there is no bucket 'mistyped'" in said_by(capsys, "evaluate", url)
    assert store.buckets() == ["mine"]
    assert not list(Path().rglob("*.yaml"))


def test_a_store_that_cannot_be_reached_is_one_line(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.kill()
    for words in (["train", str(RECIPE), *SMALL, f"out={store.url}", "--quiet"], ["report", store.url]):
        assert "the store cannot be reached" in said_by(capsys, *words)
    assert not list(Path().rglob("*.yaml"))


def test_nothing_at_a_url_is_one_line(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"there is nothing at {store.url}; expected a run folder" in said_by(capsys, "evaluate", store.url)
    assert not list(Path().iterdir())


def test_no_credentials_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with s3_server(monkeypatch, tmp_path) as store:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        forget_connections("s3")
        for words in (["train", str(RECIPE), *SMALL, f"out={store.url}", "--quiet"], ["evaluate", store.url]):
            assert "there are no credentials for this store" in said_by(capsys, *words)
