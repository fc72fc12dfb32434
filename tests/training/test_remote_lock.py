"""A folder elsewhere has one owner among all machines. Servers, processes, host names and kills here are real.

moto takes the condition of S3's PUT (If-None-Match); the GCS emulator ignores that of Google (ifGenerationMatch), so
that the way of stores without conditions is tried with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from other_machines import Machine, require_names
from small_run import contents, rows_of, small_config, small_run
from stores import Store, gcs_server, s3_server
from vitruvius._errors import RunError
from vitruvius._files import Lock, _owners, _remote_lock, _store, fetch
from vitruvius.training import train

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
SERVERS = {"s3": s3_server, "gs": gcs_server}


@pytest.fixture(params=["s3", "gs"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(_store, "DELAYS", (0.01, 0.02))
    monkeypatch.setattr(_owners, "BEAT", 0.2)
    monkeypatch.setattr(_owners, "LOOK", 0.02)
    monkeypatch.setattr(_remote_lock, "SETTLE", 0.1)
    with SERVERS[request.param](monkeypatch, tmp_path / "server") as server:
        yield server


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """Machines that are gone when the test is over."""
    made: list[Machine] = []
    yield made
    for machine in made:
        machine.dies()


def locks_at(url: str) -> list[str]:
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()
    try:
        return sorted(name.rpartition("/")[2] for name in filesystem.ls(root, detail=False) if name.endswith(".lock"))
    except FileNotFoundError:
        return []


def test_a_run_on_another_machine_is_seen_and_taken_over_when_that_machine_dies(
    store: Store, tmp_path: Path, machines: list[Machine]
) -> None:
    require_names()
    other = Machine(store.url, tmp_path / "other", name="far-away")
    machines.append(other)
    other.takes_it()
    told = rf"one is being written by process {other.process.pid} on far-away, since .*Wait for it"
    with pytest.raises(RunError, match=told):
        small_run(store.url)  # type: ignore[arg-type]
    assert not [path for path in Path().rglob("*") if path.is_file()]  # refused before anything is touched
    assert locks_at(store.url) == [".1.lock"]
    other.dies()
    run = small_run(store.url)  # type: ignore[arg-type]
    assert locks_at(store.url) == []
    assert contents(fetch(store.url, Path("copy"))) == contents(run)


def race(url: str, folder: Path, machines: list[Machine]) -> list[str]:
    """What three machines are told that want the same folder at the same moment."""
    machines += [Machine(url, folder / str(number)) for number in range(3)]
    for machine in machines:
        machine.waits()
    for machine in machines:
        machine.says()
    return [machine.hears() for machine in machines]


def test_of_many_machines_at_once_one_has_the_folder(store: Store, tmp_path: Path, machines: list[Machine]) -> None:
    answers = race(store.url, tmp_path, machines)
    assert answers.count("has it") == 1
    assert sum("is being written by process" in answer for answer in answers) == 2


def test_of_many_machines_that_find_a_dead_one_one_takes_over(
    store: Store, tmp_path: Path, machines: list[Machine]
) -> None:
    require_names()
    first = Machine(store.url, tmp_path / "first", name="dead")
    first.takes_it()
    first.dies()
    answers = race(store.url, tmp_path, machines)
    assert answers.count("has it") == 1
    assert sum(answer.startswith("told:") for answer in answers) == 2
    assert locks_at(store.url) == [".1.lock", ".2.lock"]


def test_the_lock_is_in_the_folder_and_no_part_of_the_run(store: Store) -> None:
    with Lock(store.url), Lock(f"{store.url}/"):  # the same process, twice
        filesystem, root = fsspec.core.url_to_fs(store.url)
        note = json.loads(filesystem.cat_file(f"{root}/.1.lock"))
        assert note["pid"] == _owners.myself()["pid"]
        assert {"host", "since", "token", "beats"} <= set(note)
        assert _store.list_files(store.url) == {}
        with pytest.raises(RunError, match="there is nothing at"):
            fetch(store.url, Path("copy"))
    assert locks_at(store.url) == []


class Event:
    """Something that happens to a run after its first epoch."""

    def __init__(self, *what: object) -> None:
        self.what = what

    def epoch_end(self, epoch: int, model: object) -> None:
        if epoch == 0:
            for each in self.what:
                each()  # type: ignore[operator]


def test_a_run_that_was_thought_dead_uploads_nothing_more(store: Store) -> None:
    """Simulated: the other's lock is put there by hand, as a machine does that saw no sign of life."""
    filesystem, root = fsspec.core.url_to_fs(store.url)
    note = {"pid": 7, "host": "elsewhere", "token": "other"}

    def take_over() -> None:
        filesystem.pipe_file(f"{root}/.2.lock", json.dumps(note).encode())

    with pytest.raises(RunError, match="was taken over by process 7 on elsewhere while this process gave no sign"):
        train(small_config(store.url), quiet=True, callbacks=[Event(take_over)])  # type: ignore[arg-type]
    assert locks_at(store.url) == [".2.lock"]  # the other's stays
    assert len(rows_of(fetch(store.url, Path("copy")))) == 1


def test_an_outage_costs_nobody_the_lock_and_what_it_leaves_is_taken_up_by_the_same_process(store: Store) -> None:
    lock = Lock(store.url)
    lock.take()
    store.kill()
    lock.check()  # a store that cannot be asked has not said that another has it
    lock.release()
    store.start()
    assert locks_at(store.url) == [".1.lock"]
    with Lock(store.url):
        assert locks_at(store.url) == [".1.lock", ".2.lock"]
    assert locks_at(store.url) == []


def test_a_store_that_was_emptied_and_taken_anew_while_one_looked_is_not_taken_from_its_new_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Simulated with fsspec's memory: between the look at a dead lock and the next number all numbers begin again."""
    url = "memory://renewed/run"
    filesystem, root = fsspec.core.url_to_fs(url)
    dead = {"pid": 1, "host": "dead", "token": "dead"}
    living = {"pid": 2, "host": "living", "token": "living"}
    filesystem.pipe_file(f"{root}/.1.lock", json.dumps(dead).encode())
    looks = iter([living])

    def look(path: object, owner: dict[str, object], ask: object) -> None:
        if owner["host"] == "living":
            raise RunError("living")
        filesystem.pipe_file(f"{root}/.1.lock", json.dumps(next(looks)).encode())

    monkeypatch.setattr(_remote_lock, "refuse_the_living", look)
    with pytest.raises(RunError, match="living"):
        Lock(url).take()
    assert locks_at(url) == [".1.lock"]


def test_a_store_that_looks_before_it_writes_is_trusted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's memory refuses to make an object that is there, so that nobody waits to see who wrote last."""

    def wait(seconds: float) -> None:
        pytest.fail("the store was not asked to look before it writes")

    monkeypatch.setattr(_remote_lock, "time", SimpleNamespace(sleep=wait))
    url = "memory://conditional/run"
    with Lock(url):
        assert locks_at(url) == [".1.lock"]


def test_a_file_url_and_its_path_are_one_folder(tmp_path: Path, machines: list[Machine]) -> None:
    machines.append(Machine(tmp_path / "run", tmp_path / "here").takes_it())
    with pytest.raises(RunError, match="is being written by process"):
        Lock(f"file://{tmp_path}/run").take()
