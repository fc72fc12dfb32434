"""Checkpoints of the papers by name: the table, fetching from a server of this test, and what is refused."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import vitruvius
from vitruvius._errors import CheckpointError, ConfigError, DataError
from vitruvius.cli import main
from vitruvius.converters import published
from vitruvius.converters.published import Published, fetch_published, open_published, published_checkpoints
from vitruvius.models import models
from vitruvius.targets.base import check_numbering, open_target

NAME = "light/small"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Address and folder of a server on this machine."""
    (tmp_path / "served").mkdir()
    handler = partial(Quiet, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}", tmp_path / "served"
        made.shutdown()
        thread.join()


@pytest.fixture
def entry(server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    """A published checkpoint of four classes, in the table and on the server."""
    address, folder = server
    torch.manual_seed(0)
    state = vitruvius.create_model("test_vit", num_classes=4).model.state_dict()
    torch.save({"model": state}, folder / "small.pth")
    made = Published(
        name=NAME, source="light", model="test_vit", classes=4, page=address, url=f"{address}/small.pth",
        statistics={"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)},
    )  # fmt: skip
    monkeypatch.setenv("VITRUVIUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(published, "published_checkpoints", lambda: {NAME: made})
    monkeypatch.setattr("vitruvius.targets.names.published_checkpoints", lambda: {NAME: made})
    return made


def test_the_table_holds_the_22_light_checkpoints_and_what_vitcod_publishes() -> None:
    table = published_checkpoints()
    with_numbers = [name for name, row in table.items() if name.startswith("light/") and "autoattack" in row.stated]
    assert len(with_numbers) == 22
    assert {name for name in table if name.startswith("vitcod/")} == {
        "vitcod/deit_base_low_rank", "vitcod/deit_base_low_rank_sparse"
    }  # fmt: skip
    assert len({row.url for row in table.values() if row.url}) == 22
    for row in table.values():
        known = f"vitruvius/{row.model}" in models or row.model in ("xcit_small_12_p16_224", "convnext_tiny")
        assert known or row.model.startswith("deit_"), row.model


def test_a_name_is_fetched_once_converted_and_remembered(entry: Published, server: tuple[str, Path]) -> None:
    model = vitruvius.load_model(NAME)
    assert (model.num_classes, model.mean.flatten().tolist()) == (4, [0.5, 0.5, 0.5])
    (server[1] / "small.pth").unlink()
    again = vitruvius.load_model(NAME)  # from the cache
    torch.testing.assert_close(again(torch.zeros(1, 3, 160, 160)), model(torch.zeros(1, 3, 160, 160)))


def test_a_wrong_data_root_is_found_before_anything_is_fetched(entry: Published, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        open_target(NAME, ["data.dataset=folder", f"data.root={tmp_path / 'nowhere'}"])
    assert not (tmp_path / "cache").exists()


def test_a_file_that_changed_since_is_refused(entry: Published, tmp_path: Path) -> None:
    path = fetch_published(entry)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="damaged or another file"):
        fetch_published(entry)


def test_a_known_hash_is_checked(entry: Published, server: tuple[str, Path]) -> None:
    right = hashlib.sha256((server[1] / "small.pth").read_bytes()).hexdigest()
    assert fetch_published(replace(entry, sha256=right)).is_file()
    with pytest.raises(CheckpointError, match="expected 0000"):
        fetch_published(replace(entry, sha256="0000"))


def test_a_page_instead_of_a_file_is_recognised(entry: Published, server: tuple[str, Path], tmp_path: Path) -> None:
    (server[1] / "quota.html").write_text("too many people have looked at this file")
    with pytest.raises(CheckpointError, match="answers with a page, not with a file"):
        fetch_published(replace(entry, url=f"{server[0]}/quota.html"))
    assert not list((tmp_path / "cache").glob("*"))


def test_without_a_network_the_error_says_what_to_do(entry: Published) -> None:
    with pytest.raises(CheckpointError, match=r"model\.weights=FILE"):
        fetch_published(replace(entry, url="http://127.0.0.1:9/nothing.pth"))
    with pytest.raises(CheckpointError, match="no address of the file itself"):
        fetch_published(replace(entry, url=None))


def test_a_file_fetched_by_hand_works_the_same(entry: Published, server: tuple[str, Path]) -> None:
    target = open_target(NAME, [f"model.weights={server[1] / 'small.pth'}"], data_needed=False)
    assert target.config.model.name == "test_vit"
    with pytest.raises(ConfigError, match="is a published checkpoint"):
        open_target(NAME, ["model.name=other"], data_needed=False)


def test_a_file_with_other_classes_is_another_checkpoint(entry: Published, server: tuple[str, Path]) -> None:
    other = vitruvius.create_model("test_vit", num_classes=5).model.state_dict()
    torch.save({"model": other}, server[1] / "other.pth")
    with pytest.raises(CheckpointError, match="has 4 classes, this file 5"):
        open_published(NAME, file=server[1] / "other.pth")


class Loader:
    num_classes = 3


def test_fewer_classes_than_the_model_knows_are_refused_for_named_sets_too(entry: Published, tmp_path: Path) -> None:
    words = ["data.dataset=torch/caltech101", f"data.root={tmp_path}"]
    with pytest.raises(ConfigError, match=r"data\.class_map=caltech-102"):
        check_numbering(open_target(NAME, words), Loader())  # type: ignore[arg-type]
    check_numbering(open_target(NAME, [*words, "data.class_map=caltech-102"]), Loader())  # type: ignore[arg-type]


def test_the_command_evaluates_a_published_checkpoint(entry: Published, tmp_path: Path, capsys: Any) -> None:
    words = ["data.dataset=fake", "data.num_classes=4", "data.val_num_samples=4", "data.image_size=160", "device=cpu"]
    assert main(["evaluate", NAME, *words, "data.workers=0", "--out", str(tmp_path / "out")]) == 0
    assert "clean" in capsys.readouterr().out
