"""The live page of `look`: on this machine only, for whoever knows its address; nothing is written to a disk.

The address holds a random token. A picture is sent to `picture` and kept in memory; `look` answers in lines of JSON:
how far it is, then what the page shows, or an error. A new question stops the one before it.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import secrets
import socket
import threading
import webbrowser
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from vitruvius._errors import ConfigError, DataError, RunError, VitruviusError
from vitruvius._registry import require
from vitruvius.attention.base import attentions
from vitruvius.look.looking import Look, Variant, compare, has_head, look_at
from vitruvius.look.page import payload, render
from vitruvius.look.pictures import Picture, decode, prepare

MAX_BYTES = 25_000_000  # of an uploaded picture
MAX_QUESTION = 10_000  # bytes of a question
KEPT = 8  # pictures in memory
ATTACKS = ("pgd", "fgsm", "apgd", "square")
STEPS = {"pgd": ",steps=10", "apgd": ",steps=10", "square": ",queries=200"}
NEED_A_FILE = ("mask", "sparse_softmax")
SHOWN = ("fog", "gaussian_noise", "jpeg_compression", "motion_blur")  # corruptions that the page offers
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
logger = logging.getLogger(__name__)


class Replaced(Exception):
    """Another question has come; raised wherever the old one stands."""


class Desk:
    """The pictures that were brought, and one question at a time about them.

    variant: the model, on its device and in eval mode.
    """

    def __init__(self, variant: Variant, pictures: Sequence[Picture]) -> None:
        self.variant = variant
        self.pictures: OrderedDict[int, Picture] = OrderedDict(enumerate(pictures))
        self.next = len(pictures)
        self._asked = 0
        self._one = threading.Lock()

    def take(self, data: bytes, name: str) -> int:
        """Decode and keep a picture; its number. The oldest of many is forgotten."""
        image = decode(io.BytesIO(data), name)
        number, self.next = self.next, self.next + 1
        self.pictures[number] = Picture(name, prepare(image, self.variant.model.data_config))
        while len(self.pictures) > KEPT:
            self.pictures.popitem(last=False)
        return number

    def ask(self, question: dict[str, Any], tell: Callable[[float, float | None, str], object]) -> Look:
        """Look as the page asks; `Replaced` as soon as another question has come. `tell` hears how far it is."""
        self._asked += 1
        mine = self._asked

        def progress(done: float, total: float | None, text: str = "", /) -> None:
            if mine != self._asked:
                raise Replaced
            tell(done, total, text)

        with self._one:
            progress(0, None, "Looking")
            number = question.get("picture")
            if not isinstance(number, int) or number not in self.pictures:
                raise DataError("this picture is no longer here; drop it in again.")
            picture = self.pictures[number]
            threat, sparsity = threat_of(question), float(question.get("sparsity") or 0)
            attention = question.get("attention") or ()
            found = compare([self.variant], [picture], attention=attention, sparsity=sparsity or None)
            return look_at(
                found, [picture], threat=threat, gradients=bool(question.get("gradients")), progress=progress
            )

    def stop(self) -> None:
        """End the question that is being answered."""
        self._asked += 1


def threat_of(question: dict[str, Any]) -> str | None:
    """`pgd:eps=2/255,steps=10` from what the page says."""
    name = question.get("threat")
    if not name:
        return None
    if name in SHOWN:
        return f"{name}:severity=3"
    if name not in ATTACKS:
        raise ConfigError(f"the page offers no attack {name!r}.")
    eps = float(question.get("eps") or 0)
    if not 0 <= eps <= 64:
        raise ConfigError(f"eps = {eps}/255 is out of range; the page goes from 0 to 64.")
    return f"{name}:eps={eps:g}/255{STEPS.get(name, '')}"


def make_app(desk: Desk, token: str, port: int) -> Any:
    """The application: a page, a door for pictures, a door for questions; everything else is refused.

    token: what a request must know. port: of this machine, which requests must name as their host and origin.
    """
    require("starlette", "live")
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    hosts = (f"127.0.0.1:{port}", f"localhost:{port}")

    def _error(text: str, status: int) -> Response:
        return JSONResponse({"error": text}, status, headers=HEADERS)

    def guarded(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """`handler` for requests of this page that know the token; what it refuses is said in the answer."""

        async def answer(request: Request) -> Response:
            host, origin = request.headers.get("host"), request.headers.get("origin")
            if host not in hosts or (origin and origin not in [f"http://{host}" for host in hosts]):
                return _error("this page answers only requests of its own, from 127.0.0.1.", 403)
            if not secrets.compare_digest(request.path_params["token"].encode(), token.encode()):
                return _error("wrong or missing token; open the address that the command printed.", 403)
            try:
                return await handler(request)
            except ValueError as error:  # also ours, and JSON's
                return _error(str(error), 400)

        return answer

    async def body_of(request: Request, most: int) -> bytes:
        """The whole body; no more than `most` bytes are ever held."""
        data = bytearray()
        too_large = DataError(f"this is larger than {most / 1e6:g} MB; make the picture smaller first.")
        if int(request.headers.get("content-length") or 0) > most:
            raise too_large
        async for part in request.stream():
            data += part
            if len(data) > most:
                raise too_large
        return bytes(data)

    async def page(request: Request) -> Response:
        live = {
            "picture": next(reversed(desk.pictures), None),
            "threats": [*(ATTACKS if has_head(desk.variant.model) else ()), *SHOWN],
            "corruptions": SHOWN,
            "attentions": [name for name in attentions if name not in NEED_A_FILE],
            "head": has_head(desk.variant.model),
        }
        return HTMLResponse(render(None, live=live), headers=HEADERS)

    async def take(request: Request) -> Response:
        name = "".join(c for c in request.query_params.get("name", "") if c.isprintable())[-80:] or "picture"
        data = await body_of(request, MAX_BYTES)
        return JSONResponse({"picture": await asyncio.to_thread(desk.take, data, name)}, headers=HEADERS)

    async def answer(request: Request) -> Response:
        question = json.loads(await body_of(request, MAX_QUESTION))
        if not isinstance(question, dict):
            raise ConfigError("a question is an object of JSON.")
        return StreamingResponse(_lines(desk, question), media_type="application/x-ndjson", headers=HEADERS)

    return Starlette(
        routes=[
            Route("/{token}/", guarded(page)),
            Route("/{token}/picture", guarded(take), methods=["POST"]),
            Route("/{token}/look", guarded(answer), methods=["POST"]),
        ]
    )


async def _lines(desk: Desk, question: dict[str, Any]) -> AsyncIterator[str]:
    """How far the answer is, then the answer or an error, a line each."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def put(line: dict[str, Any] | None) -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(lines.put_nowait, line)

    def work() -> None:
        try:
            put({"shown": payload(desk.ask(question, lambda *told: put({"progress": told})))})
        except Replaced:
            put({"error": ""})
        except VitruviusError as error:
            put({"error": " ".join(str(error).split())})
        except Exception as error:  # of a part or an attack: the page says it and goes on
            logger.warning("look: %s: %s", type(error).__name__, error)
            put({"error": f"{type(error).__name__}: {error}"})
        finally:
            put(None)

    threading.Thread(target=work, daemon=True).start()
    while (line := await lines.get()) is not None:
        yield json.dumps(line) + "\n"


def serve(
    variant: Variant,
    pictures: Sequence[Picture],
    *,
    port: int = 0,
    open_browser: bool = False,
    announce: Callable[[str], object] = logger.info,
) -> None:
    """Answer at 127.0.0.1 until the command is ended.

    variant: the model. pictures: that are there from the start. port: 0: a free one. open_browser: show the page.
    announce: told the address.
    """
    if not 0 <= port < 65536:
        raise ConfigError(f"--port {port} is not a port; give a number from 1 to 65535, or none for a free one.")
    uvicorn: Any = require("uvicorn", "live")
    require("starlette", "live")
    door = socket.socket()
    with door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind(("127.0.0.1", port))
            door.listen()  # who comes before the server has started waits
        except OSError as error:
            raise RunError(f"port {port} cannot be used ({error.strerror}); leave --port out for a free one.") from None
        port = door.getsockname()[1]
        token = secrets.token_hex(16)
        address = f"http://127.0.0.1:{port}/{token}/"
        desk = Desk(variant, pictures)
        config = uvicorn.Config(make_app(desk, token, port), log_level="error", timeout_graceful_shutdown=1)
        announce(address)
        if open_browser:
            webbrowser.open(address)
        with suppress(KeyboardInterrupt):  # how a live page is ended
            uvicorn.Server(config).run(sockets=[door])
        desk.stop()
