"""Runs elsewhere: worked on in a folder here, copied as they go, taken up on another machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

from small_run import assert_same_run, contents, small_run, stopped_run
from vitruvius._errors import RunError
from vitruvius._files import RemoteCopy, local_path
from vitruvius.cli import main
from vitruvius.models import load_model
from vitruvius.training import fetch


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place elsewhere; the working folder is empty."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    place = f"memory://bucket-{tmp_path.name}/run" if request.param == "memory" else f"file://{tmp_path}/elsewhere/run"
    return place


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_remote_run_goes_on_on_another_machine(
    parallel: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("train.save_every=1", "train.model_ema=true", "tracking=[csv]", f"train.parallel={parallel}")
    unbroken = small_run(tmp_path / "unbroken", *settings)
    stopped_run(monkeypatch, url, 7, *settings)  # type: ignore[arg-type]
    shutil.rmtree("runs")  # the other machine has nothing
    run = small_run(url, *settings)  # type: ignore[arg-type]
    assert run == local_path(url)
    assert_same_run(run, unbroken)
    copy = fetch(url, Path("copy"))
    assert contents(copy) == contents(run)
    assert (copy / "state.previous.pt").exists()
    assert load_model(copy).num_classes == 10
    shards = {name for name in files_at(url) if name.startswith("shards/")}  # old ones are gone there, too
    assert shards == {str(path.relative_to(run)) for path in run.glob("shards/*/*")}


def files_at(url: str) -> dict[str, bytes]:
    filesystem, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(root).lstrip("/"): filesystem.cat_file(path) for path in filesystem.find(root)}


def write(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_what_has_changed_is_uploaded_states_first_and_metrics_last(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put, get, uploaded = RemoteCopy._put, RemoteCopy._get, []

    def recording(self: RemoteCopy, name: str) -> None:
        uploaded.append(name)
        put(self, name)

    monkeypatch.setattr(RemoteCopy, "_put", recording)
    run = Path("run")
    names = ("metrics.jsonl", "best", "deep/c", "wandb/x", "state.pt", "config.yaml", ".lock")
    write(run, dict.fromkeys(names, "1"))
    RemoteCopy(url, run).upload()
    assert uploaded == ["config.yaml", "state.pt", "best", "deep/c", "wandb/x", "metrics.jsonl"]
    arrived: list[str] = []
    monkeypatch.setattr(RemoteCopy, "_get", lambda self, name, file: (arrived.append(name), get(self, name, file)))
    RemoteCopy(url, Path("another")).download()
    assert sorted(arrived) == sorted(uploaded)
    assert arrived[-1] == "metrics.jsonl"
    uploaded.clear()
    (run / "state.pt").replace(run / "state.previous.pt")
    write(run, {"state.pt": "2"})
    RemoteCopy(url, run).upload()  # another process
    assert uploaded == ["state.pt"]
    assert files_at(url)["state.pt"] == b"2"
    assert files_at(url)["state.previous.pt"] == b"1"
    assert ".lock" not in files_at(url)


def test_files_of_one_size_and_one_moment_are_not_taken_for_each_other(url: str) -> None:
    """On a disk whose clock is coarse, best and last weights may differ in their bytes alone."""
    run = Path("run")
    write(run, {"best": "best", "last": "last"})
    for name in ("best", "last"):
        os.utime(run / name, ns=(10**18, 10**18))
    copy = RemoteCopy(url, run)
    copy.upload()
    (run / "new").write_text("good")
    os.utime(run / "new", ns=(10**18, 10**18))
    (run / "new").replace(run / "best")
    copy.upload()
    assert files_at(url) == {"best": b"good", "last": b"last"}


def test_a_copy_never_replaces_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="is not empty; name a new folder"):
        fetch("memory://bucket/run", tmp_path)
    assert fetch(tmp_path) == tmp_path


def test_the_copy_of_a_url_has_a_speaking_place_without_passwords() -> None:
    assert local_path("s3://bucket/a/b") == Path("runs/remote/s3/bucket/a/b")
    assert local_path("ftp://me:secret@host/../a") == Path("runs/remote/ftp/host/a")
    with pytest.raises(RunError, match="names no folder"):
        local_path("gs://")


# what is here and what is there


@pytest.mark.parametrize(("here", "there", "wins"), [(3, 2, "here"), (2, 2, "here"), (2, 3, "there"), (0, 1, "there")])
def test_the_run_that_has_come_farther_stays_and_nothing_else_is_lost(
    here: int, there: int, wins: str, url: str
) -> None:
    """By finished epochs; without a state nothing can be trained further, so that what is there is taken."""
    for name, epochs in (("there", there), ("here", here)):
        write(Path(name), {"state.pt": name, "last": name, "metrics.jsonl": "{}\n" * epochs, name: "mine"})
    RemoteCopy(url, Path("there")).upload()
    if here == 0:
        (Path("here") / "state.pt").unlink()
    assert RemoteCopy(url, Path("here")).download()
    assert {name: (Path("here") / name).read_text() for name in ("state.pt", "last")} == {
        "state.pt": wins,
        "last": wins,
    }
    assert (Path("here") / "here").read_text() == "mine"
    assert (Path("here") / "there").read_text() == "mine"
    RemoteCopy(url, Path("here")).upload()
    assert files_at(url)["state.pt"] == wins.encode()


def test_only_what_has_changed_there_is_downloaded_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(Path("there"), {"state.pt": "large", "last": "1", "deep/rows": "1"})
    there = RemoteCopy(url, Path("there"))
    there.upload()
    copy = fetch(url, states=False)
    assert sorted(path.name for path in copy.rglob("*") if path.is_file()) == ["last", "rows"]
    (copy / "deep" / "rows").write_text("1, and mine")
    write(Path("there"), {"last": "22"})
    there.upload()
    fetch(url, states=False)
    assert (copy / "last").read_text() == "22"
    assert (copy / "deep" / "rows").read_text() == "1, and mine"
    monkeypatch.setattr(type(fsspec.core.url_to_fs(url)[0]), "get_file", lambda *_, **__: pytest.fail("downloaded"))
    fetch(url, states=False)


def test_a_download_that_fails_touches_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(Path("there"), {"first": "new", "second": "new"})
    RemoteCopy(url, Path("there")).upload()
    write(Path("here"), {"first": "old"})
    filesystem = type(fsspec.core.url_to_fs(url)[0])
    get = filesystem.get_file

    def failing(self: Any, path: str, *arguments: Any, **settings: Any) -> Any:
        if path.endswith("second"):
            raise PermissionError("no")
        return get(self, path, *arguments, **settings)

    monkeypatch.setattr(filesystem, "get_file", failing)
    with pytest.raises(RunError, match="no permission"):
        RemoteCopy(url, Path("here")).download()
    assert {path.name: path.read_text() for path in Path("here").iterdir()} == {"first": "old"}
    assert sorted(path.name for path in Path().iterdir()) == [".there.copy.json", "here", "there"]


def test_an_upload_that_fails_is_left_for_the_next_save(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Simulated: a store that fails so many times. True outages are in test_stores.py."""
    filesystem = type(fsspec.core.url_to_fs(url)[0])
    put, failures = filesystem.put_file, 1

    def failing(self: Any, *arguments: Any, **settings: Any) -> Any:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise ConnectionResetError("reset by peer")
        return put(self, *arguments, **settings)

    monkeypatch.setattr(filesystem, "put_file", failing)
    copy = RemoteCopy(url, Path("run"))
    write(copy.folder, {"a": "1"})
    copy.upload(required=False)
    assert "the store cannot be reached" in caplog.text
    copy.upload()
    assert files_at(url) == {"a": b"1"}
    write(copy.folder, {"a": "22"})
    failures = 1
    with pytest.raises(RunError, match="is whole; the same command uploads it"):
        copy.upload()
    copy.upload()
    assert files_at(url) == {"a": b"22"}


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
    copy = local_path(remote)
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
    assert main(["evaluate", remote, "--out", "s3://bucket/out"]) == 2
    assert "s3://bucket/out is a URL; name a file or folder of this machine" in capsys.readouterr().err
    assert not Path("s3:").exists()


def test_a_remote_run_of_which_nothing_came_leaves_nothing_there(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_run(monkeypatch, url, 1)  # type: ignore[arg-type]
    filesystem, root = fsspec.core.url_to_fs(url)
    assert not filesystem.exists(root) or filesystem.find(root) == []
    assert not [path for path in Path().rglob("*") if path.is_file()]
    small_run(url, "seed=3")  # type: ignore[arg-type]
