"""Runs elsewhere: worked on in a local mirror, uploaded as they go, taken up on another machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

from small_run import assert_same_run, contents, small_run
from vitruvius._errors import RunError
from vitruvius._files import Mirror, _store, atomic_write_bytes, place_of, seal, unseal
from vitruvius.cli import main
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


# the newer state wins


def save_state(folder: Path, updates: int, *, salt: int = 0) -> bytes:
    """A state of so many updates; the salt makes its checksum another."""
    data = seal({"updates": updates, "salt": salt})
    atomic_write_bytes(folder / "state.pt", data)
    (folder / "metrics.jsonl").write_text(f"{updates} {salt}")
    return data


def two_copies(url: str, here: int | None, there: int | None, *, salt: int = 0) -> Path:
    """A run that has come so far here and there."""
    if there is not None:
        elsewhere = Mirror(url, Path("elsewhere"))
        elsewhere.pull()
        save_state(Path("elsewhere"), there)
        elsewhere.push()
    if here is not None:
        Path("mirror").mkdir()
        save_state(Path("mirror"), here, salt=salt)
        (Path("mirror") / "notes.txt").write_text("mine")
    return Mirror(url, Path("mirror")).pull()


@pytest.mark.parametrize(
    ("here", "there", "wins"), [(9, 4, 9), (4, 9, 9), (4, None, 4), (None, 4, 4), (4, 4, 4)], ids=str
)
def test_the_newer_state_wins_and_nothing_of_the_other_is_lost(
    here: int | None, there: int | None, wins: int, url: str
) -> None:
    folder = two_copies(url, here, there)
    assert unseal((folder / "state.pt").read_bytes())["updates"] == wins
    assert (folder / "metrics.jsonl").read_text() == f"{wins} 0"
    if here is not None:
        assert (folder / "notes.txt").read_text() == "mine"
    Mirror(url, Path("mirror")).push()
    again = Mirror(url, Path("again")).pull()
    assert unseal((again / "state.pt").read_bytes())["updates"] == wins


def test_two_runs_that_differ_at_the_same_update_are_both_kept(url: str) -> None:
    folder = two_copies(url, 4, 4, salt=1)
    assert (folder / "metrics.jsonl").read_text() == "4 0"
    assert (Path("mirror.local-1") / "metrics.jsonl").read_text() == "4 1"


def test_a_damaged_state_is_older_than_any_other(url: str) -> None:
    two_copies(url, None, 4)
    data = bytearray(save_state(Path("mirror"), 9))
    data[-70] ^= 1
    (Path("mirror") / "state.pt").write_bytes(data)
    assert unseal((Mirror(url, Path("mirror")).pull() / "state.pt").read_bytes())["updates"] == 4


def test_what_has_not_changed_is_not_downloaded_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    two_copies(url, None, 4)
    monkeypatch.setattr(Mirror, "_fetch", lambda self, names, arriving: pytest.fail(str(names)) if names else None)
    Mirror(url, Path("mirror")).pull()


def test_an_upload_is_tried_again_and_then_left_for_the_next_save(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Simulated: a store that fails so many times. True outages are in test_stores.py."""
    monkeypatch.setattr(_store, "DELAYS", (0.001, 0.002))
    filesystem = type(fsspec.core.url_to_fs(url)[0])
    put, failures = filesystem.pipe_file, 2

    def failing(self: Any, *arguments: Any, **settings: Any) -> Any:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise ConnectionResetError("reset by peer")
        return put(self, *arguments, **settings)

    monkeypatch.setattr(filesystem, "pipe_file", failing)
    mirror = Mirror(url, Path("mirror"))
    (mirror.pull() / "a").write_text("1")
    assert mirror.push() == ["a"]  # at the third attempt
    (mirror.folder / "a").write_text("22")
    failures = 3
    assert mirror.push(required=False) == []
    assert "the store cannot be reached" in caplog.text
    failures = 3
    with pytest.raises(RunError, match="is whole; the same command uploads it"):
        mirror.push()
    assert mirror.push() == ["a"]


# a URL is a target of every verb


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("elsewhere")
    run = small_run(folder / "run", "train.epochs=1")
    url = f"memory://{folder.name}/run"
    filesystem, root = fsspec.core.url_to_fs(url)
    for path in run.iterdir():
        filesystem.pipe_file(f"{root}/{path.name}", path.read_bytes())
    return url


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "{url}", "--images", "4"],
        ["attack", "{url}", "--threat", "fgsm:eps=0.1", "--images", "4", "--out", "a.safetensors"],
        ["analyse", "{url}", "norms", "--images", "4"],
        ["study", "eps-sweep", "{url}", "steps=1", "eps=[0.1]", "--images", "4"],
        ["report", "{url}"],
        ["maps", "{url}", "--images", "4"],
        ["export", "{url}", "--format", "safetensors"],
    ],
    ids=lambda words: words[0],
)
def test_a_url_is_a_target_of_every_verb(
    words: list[str], remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([word.replace("{url}", remote) for word in words]) == 0, capsys.readouterr().err
    copy = place_of(remote)
    assert (copy / "config.yaml").exists()
    assert not (copy / "state.pt").exists()  # large, and of no use here
    assert not Path("memory:").exists()


def test_verbs_that_refuse_a_run_say_so_of_a_url_too(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cycles", remote]) == 1
    assert "has no masks" in capsys.readouterr().err
    assert main(["evaluate", remote, "--baseline", remote, "--shift", f"cifar-10-c:{tmp_path}"]) == 1
    assert main(["compress", remote, "--sparsity", "2"]) == 1
    assert main(["masks", "maps.safetensors", "--of", remote]) == 1
    assert main(["evaluate", remote, "--out", "s3://bucket/out"]) == 1
    assert "--out s3://bucket/out is a URL; name a file or folder of this machine" in capsys.readouterr().err
    assert not Path("s3:").exists()


def test_a_remote_run_of_which_nothing_came_leaves_nothing_there(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopping(*_: Any) -> Any:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(_epoch, "train_batch", stopping)
        with pytest.raises(Stop):
            small_run(url)  # type: ignore[arg-type]
    filesystem, root = fsspec.core.url_to_fs(url)
    assert not filesystem.exists(root) or filesystem.find(root) == []
    assert not [path for path in Path().rglob("*") if path.is_file()]
    small_run(url, "seed=3")  # type: ignore[arg-type]
