"""The live page: answers to those who know its address, refuses all else, keeps nothing, ends with its command."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_pictures import bad_files, photograph

pytest.importorskip("uvicorn", reason="the live page needs the extra `live`")
pytest.importorskip("starlette", reason="the live page needs the extra `live`")

from vitruvius.evaluation.threats import make_threat
from vitruvius.look.looking import Variant
from vitruvius.look.serving import ATTACKS, MAX_BYTES, SHOWN, Desk, Replaced, make_app, threat_of
from vitruvius.models import create_model

TOKEN = "0123456789abcdef"


class Server:
    """The application on a port of its own, in a thread."""

    def __init__(self, variant: Variant) -> None:
        import uvicorn

        self.door = socket.socket()
        self.door.bind(("127.0.0.1", 0))
        self.port = self.door.getsockname()[1]
        self.desk = Desk(variant, [])
        config = uvicorn.Config(make_app(self.desk, TOKEN, self.port), log_level="error", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.door]})

    def __enter__(self) -> Server:
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        self.door.close()

    def ask(
        self, path: str, body: Any = None, *, method: str = "POST", token: str = TOKEN, **headers: str
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, f"/{token}/{path}", body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def look(self, **question: Any) -> list[dict[str, Any]]:
        status, text = self.ask("look", json.dumps(question))
        assert status == 200, text
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(Variant("digits", create_model("vitruvius/vit_digits"), ())) as made:
        yield made


@pytest.fixture
def desk() -> Desk:
    return Desk(Variant("digits", create_model("vitruvius/vit_digits"), ()), [])


@pytest.fixture
def picture(server: Server) -> int:
    status, text = server.ask("picture?name=dog.jpg", photograph())
    assert status == 200
    number: int = json.loads(text)["picture"]
    return number


def test_a_picture_is_looked_at_as_the_page_asks(server: Server, picture: int) -> None:
    *told, last = server.look(picture=picture, threat="pgd", eps=8, attention="rpc", sparsity=0.5)
    views = last["shown"]["views"]
    assert [view["model"] for view in views] == ["digits"] * 2 + ["rpc"] * 2 + ["digits, 50 % pruned"] * 2
    assert [view["threat"] for view in views] == ["", "pgd(eps=8/255)"] * 3
    assert len(told) > 5
    assert all("progress" in line for line in told)


def test_the_page_knows_what_it_may_offer(server: Server) -> None:
    status, html = server.ask("", method="GET")
    assert status == 200
    assert TOKEN not in html, "it is in the address alone"
    live = json.loads(html.split('id="data">')[1].split("</script>")[0])["live"]
    assert {"pgd", "fgsm", "fog"} <= set(live["threats"])
    assert "rpc" in live["attentions"]


@pytest.mark.parametrize("threat", [*ATTACKS, *SHOWN])
def test_every_threat_that_is_offered_can_be_made(threat: str) -> None:
    assert make_threat(threat_of({"threat": threat, "eps": 2.5}) or "")


@pytest.mark.parametrize(
    ("path", "method", "token", "headers"),
    [
        ("", "GET", "wrong", {}),
        ("", "GET", "", {}),
        ("", "GET", TOKEN[:-1], {}),
        ("look", "POST", "wrong", {}),
        ("picture", "POST", "wrong", {}),
        ("look", "POST", TOKEN, {"Origin": "https://example.org"}),
        ("look", "POST", TOKEN, {"Origin": "null"}),
        ("picture", "POST", TOKEN, {"Origin": "http://127.0.0.1:1"}),
        ("", "GET", TOKEN, {"Host": "evil.example.org"}),
        ("look", "POST", TOKEN, {"Host": "127.0.0.1.example.org"}),
    ],
)
def test_strangers_are_refused(server: Server, path: str, method: str, token: str, headers: dict[str, str]) -> None:
    status, text = server.ask(path, b"{}" if method == "POST" else None, method=method, token=token, **headers)
    assert status in (403, 404)
    if status == 403:
        assert list(json.loads(text)) == ["error"]


@pytest.mark.parametrize("name", bad_files())
def test_a_bad_upload_gets_a_sentence(server: Server, name: str) -> None:
    before = dict(server.desk.pictures)
    status, text = server.ask(f"picture?name={name}", bad_files()[name])
    assert status == 400
    assert name in json.loads(text)["error"]
    assert server.desk.pictures == before


def test_fifty_megabytes_are_refused_whether_their_size_is_said_or_not(server: Server) -> None:
    status, text = server.ask("picture", None, **{"Content-Length": str(50_000_000)})
    assert (status, "25 MB" in text) == (400, True)

    def parts() -> Iterator[bytes]:
        for _ in range(50):
            yield b"\0" * 1_000_000

    try:
        status, text = server.ask("picture", parts(), **{"Transfer-Encoding": "chunked"})
        assert (status, "25 MB" in text) == (400, True)
    except (BrokenPipeError, ConnectionResetError):  # it has hung up before all was sent
        pass
    assert MAX_BYTES == 25_000_000


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({"picture": 999}, "no longer here"),
        ({"picture": None}, "no longer here"),
        ({"picture": [1]}, "no longer here"),
        ({"threat": "autoattack"}, "offers no attack"),
        ({"threat": "pgd", "eps": 500}, "out of range"),
        ({"attention": "rcp"}, "rpc"),
        ({"sparsity": 2}, "sparsity"),
    ],
)
def test_a_question_that_makes_no_sense_gets_a_sentence(
    server: Server, picture: int, question: dict[str, Any], said: str
) -> None:
    assert said in server.look(**{"picture": picture, **question})[-1]["error"]


@pytest.mark.parametrize("body", [b"", b"no json", b"[1]", b"\xff", b"{" * 5000, b" " * 20_000])
def test_what_is_no_question_is_refused(server: Server, body: bytes) -> None:
    status, text = server.ask("look", body)
    assert status == 400
    assert json.loads(text)["error"]


def test_a_second_question_replaces_the_first(server: Server, picture: int) -> None:
    answers: dict[str, Any] = {}

    def first() -> None:
        answers["first"] = server.look(picture=picture, threat="square", eps=0.1)

    thread = threading.Thread(target=first)
    thread.start()
    while not server.desk._one.locked():
        time.sleep(0.002)
    answers["second"] = server.look(picture=picture)
    thread.join(30)
    assert answers["first"][-1] == {"error": ""}
    assert "shown" in answers["second"][-1]


def test_a_replaced_question_stops_at_its_next_step(desk: Desk) -> None:
    number = desk.take(photograph(), "dog.jpg")
    steps: list[float] = []

    def tell(done: float, total: float | None, text: str) -> None:
        steps.append(done)
        if len(steps) == 4:
            desk.stop()

    with pytest.raises(Replaced):
        desk.ask({"picture": number, "threat": "pgd", "eps": 2}, tell)
    assert len(steps) == 4


def test_old_pictures_are_forgotten(desk: Desk) -> None:
    numbers = [desk.take(photograph(), "dog.jpg") for _ in range(12)]
    assert list(desk.pictures) == numbers[-8:]


def test_a_model_without_a_head_answers_too() -> None:
    model = create_model("vitruvius/vit_digits", num_classes=0)
    desk = Desk(Variant("features", model, ()), [])
    found = desk.ask({"picture": desk.take(photograph(), "dog.jpg"), "threat": "fog"}, lambda *_: None)
    assert [len(view.layers) for view in found.views] == [4, 4] or all(view.layers for view in found.views)
    assert torch.is_tensor(found.views[0].pixels)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=str)
def test_the_command_ends_with_its_terminal_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vitruvius", "look", "vitruvius/vit_digits", "--serve"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        port, token = address.removeprefix("http://127.0.0.1:").strip("/").split("/")
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
        connection.request("POST", f"/{token}/picture", photograph())
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(number)
        assert process.wait(15) in (0, -signal.SIGHUP)
        assert "Traceback" not in process.stderr.read()  # type: ignore[union-attr]
    left = [path for path in tmp_path.rglob("*") if "wandb" not in path.name]  # which timm imports if it is there
    assert left == []
