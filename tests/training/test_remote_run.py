"""Runs elsewhere: worked on in a local mirror, uploaded as they go, taken up on another machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

from small_run import assert_same_run, contents, small_run
from vitruvius._errors import RunError
from vitruvius._files import Mirror, place_of
from vitruvius.models import load_model
from vitruvius.training import _epoch, fetch


class Stop(Exception):
    pass


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place elsewhere; the working folder is empty."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    place = f"memory://bucket-{tmp_path.name}/run" if request.param == "memory" else f"file://{tmp_path}/elsewhere/run"
    return place


def test_a_remote_run_goes_on_on_another_machine(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("train.save_every=1", "train.model_ema=true", "tracking=[csv]")
    unbroken = small_run(tmp_path / "unbroken", *settings)
    batch, seen = _epoch.train_batch, 0

    def stopping(*arguments: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == 7:
            raise Stop
        return batch(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(_epoch, "train_batch", stopping)
        with pytest.raises(Stop):
            small_run(url, *settings)  # type: ignore[arg-type]
    shutil.rmtree("runs")  # the other machine has nothing
    run = small_run(url, *settings)  # type: ignore[arg-type]
    assert run == place_of(url)
    assert seen == 7
    assert_same_run(run, unbroken)
    copy = fetch(url, Path("copy"))
    assert contents(copy) == contents(run)
    assert load_model(copy).num_classes == 10


def test_a_mirror_uploads_what_has_changed_and_copies_what_was_renamed(url: str) -> None:
    mirror = Mirror(url, Path("mirror"))
    folder = mirror.pull()
    (folder / "deep").mkdir()
    for name in ("b", "a", "deep/c"):
        (folder / name).write_text(name)
    assert mirror.push("b") == ["b", "a", "deep/c"]
    assert mirror.push() == []
    (folder / "a").rename(folder / "old")
    (folder / "a").write_text("new")
    assert mirror.push("old") == ["old", "a"]
    filesystem, root = fsspec.core.url_to_fs(url)
    assert filesystem.cat_file(f"{root}/old") == b"a"
    again = Mirror(url, Path("again")).pull()
    assert sorted(str(path.relative_to(again)) for path in again.rglob("*") if path.is_file()) == [
        "a",
        "b",
        "deep/c",
        "old",
    ]


def test_a_copy_never_replaces_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="is not empty; name a new folder"):
        fetch("memory://bucket/run", tmp_path)
    assert fetch(tmp_path) == tmp_path


def test_the_mirror_of_a_url_has_a_speaking_place_without_passwords() -> None:
    assert place_of("s3://bucket/a/b") == Path("runs/remote/s3/bucket/a/b")
    assert place_of("ftp://me:secret@host/../a") == Path("runs/remote/ftp/host/a")
    with pytest.raises(RunError, match="names no folder"):
        place_of("gs://")
