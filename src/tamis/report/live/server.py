"""The server of the live page: loopback alone, and bounds on all that it is sent.

Starlette and uvicorn, because they are small, kept by many, and read HTTP with a parser (h11) that bounds headers;
Python's own http.server says of itself that it is not for this.  What they leave open is closed here: Host and Origin,
the size and the time of a body and of headers, how many wait, and how long a model may take.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tamis.analysis.figures import page_columns
from tamis.report.content import finite
from tamis.report.live.guard import Rate, refusal
from tamis.report.live.looking import Limits, Look, Wish, described, look, portrait
from tamis.report.live.request import read_request
from tamis.report.live.subjects import Subject
from tamis.report.packing import packed
from tamis.report.page import page

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as error:
    raise ImportError("the live page needs a server: pip install 'tamis[explore]'") from error


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What the server takes."""

    body: int = 1 << 18
    """Bytes of a request."""
    characters: int = 1 << 17
    """The most characters of a text."""
    header_bytes: int = 1 << 14
    seconds: float = 10.0
    """For a request to arrive."""
    connections: int = 64
    waiting: int = 24
    """Looks that wait for the one that runs."""
    per_second: float = 60.0
    at_once: int = 240
    """Requests."""
    kept_bytes: int = 1 << 29
    """Bytes of weights that pages may still ask for."""


class RefusedError(Exception):
    """A request that gets no answer but a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Desk:
    """Models, one look at a time, and the weights of the latest looks."""

    def __init__(self, subjects: Sequence[Subject], limits: Limits, bounds: Bounds) -> None:
        self.subjects, self.limits, self.bounds = subjects, limits, bounds
        self.rate = Rate(bounds.per_second, bounds.at_once)
        self._kept: OrderedDict[str, Look] = OrderedDict()
        self._waiting = 0
        # One thread: models are changed while they are looked at, and two at once would only slow each other down.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="look")

    async def look(self, run: int, wish: Wish, gone: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        """The answer to a request; who has left meanwhile is not worked for."""
        if self._waiting > self.bounds.waiting:
            raise RefusedError(503, "too many are asking at once: try again in a moment")
        self._waiting += 1
        try:
            return await self._in_turn(run, wish, gone)
        finally:
            self._waiting -= 1

    async def _in_turn(self, run: int, wish: Wish, gone: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        left = threading.Event()

        def work() -> tuple[Look, dict[str, Any]] | None:
            if left.is_set():
                return None
            seen = look(self.subjects[run], wish, self.limits)
            return seen, described(self.subjects[run], seen)

        job = loop.run_in_executor(self._worker, work)
        while not (await asyncio.wait([job], timeout=0.5))[0]:
            if await gone():
                left.set()
        found = await job
        if found is None:
            raise RefusedError(499, "nobody waits for this any more")
        name = self._keep(found[0])
        return {"id": name, "run": run, **found[1]}

    def weights(self, name: str, site: str) -> bytes:
        """Those of one layer of a look, as the page unpacks them."""
        seen = self._kept.get(name)
        if seen is None or site not in seen.weights:
            raise RefusedError(410, "these weights are gone: ask again")
        self._kept.move_to_end(name)
        return packed(seen.weights[site])

    def _keep(self, seen: Look) -> str:
        name = secrets.token_urlsafe(12)
        self._kept[name] = seen
        while len(self._kept) > 1 and sum(one.size for one in self._kept.values()) > self.bounds.kept_bytes:
            self._kept.popitem(last=False)
        return name


def application(
    subjects: Sequence[Subject], limits: Limits | None = None, bounds: Bounds | None = None, title: str = "Tamis"
) -> Callable[..., Awaitable[None]]:
    """The page and its two requests, as an ASGI application."""
    limits, bounds = limits or Limits(), bounds or Bounds()
    desk = Desk(subjects, limits, bounds)
    opened = page(live_content(subjects, limits, title), live=True)

    async def home(request: Request) -> Response:
        return HTMLResponse(opened)

    async def ask(request: Request) -> Response:
        body = await asyncio.wait_for(_bounded(request, bounds.body), bounds.seconds)
        run, wish = read_request(body, subjects, bounds.characters)
        return JSONResponse(finite(await desk.look(run, wish, request.is_disconnected)))

    async def weights(request: Request) -> Response:
        data = desk.weights(request.path_params["look"], request.path_params["site"])
        return Response(await asyncio.to_thread(zlib.compress, data, 1), media_type="application/octet-stream")

    routes = [
        Route("/", home),
        Route("/api/look", ask, methods=["POST"]),
        Route("/api/weights/{look}/{site}", weights),
    ]
    return _guarded(Starlette(routes=routes, exception_handlers=EXPLAINED), desk.rate)


def live_content(subjects: Sequence[Subject], limits: Limits, title: str) -> dict[str, Any]:
    """The page before anything was typed."""
    bounds = {"tokens": limits.tokens, "written": limits.written}
    runs = [portrait(subject) for subject in subjects]
    return {
        "title": title, "overview": False, "live": bounds, "columns": page_columns(), "sentences": [], "runs": runs,
    }  # fmt: skip


async def _bounded(request: Request, most: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise RefusedError(413, f"a request may have {most:,} bytes")
    return bytes(body)


App = Callable[..., Awaitable[None]]


def _explained(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def explain(request: Request, error: Exception) -> Response:
        return _message(error.status if isinstance(error, RefusedError) else status, str(error))

    return explain


async def _too_slow(request: Request, error: Exception) -> Response:
    return _message(408, "the request took too long to arrive")


async def _went_wrong(request: Request, error: Exception) -> Response:
    return _message(500, f"this went wrong: {type(error).__name__}: {error}")


EXPLAINED: dict[Any, Any] = {
    RefusedError: _explained(400),
    ValueError: _explained(400),
    TimeoutError: _too_slow,
    ClientDisconnect: _too_slow,
    Exception: _went_wrong,
}
"""Errors as messages: those of the request, of the model's input, and of nobody's making."""


def _guarded(app: App, rate: Rate) -> App:
    """Refuse who may not ask, before anything of the request is read."""

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if (reason := refusal(scope["method"], scope["path"], headers)) is not None:
            await _message(403, reason)(scope, receive, send)
        elif not rate.take():
            await _message(429, "too many requests: slow down")(scope, receive, send)
        else:
            await app(scope, receive, _with_headers(send))

    return guarded


def _with_headers(send: Any) -> Any:
    """Nothing is kept by the browser, framed by another page, or taken for what it is not."""
    own = [
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
        (b"x-frame-options", b"DENY"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-resource-policy", b"same-origin"),
    ]

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *own]}
        await send(message)

    return sending


def _message(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)


class _Patient(H11Protocol):
    """Closes connections whose headers do not arrive in time, which uvicorn leaves open."""

    seconds = Bounds.seconds

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._patience = self.loop.call_later(self.seconds, self._stalled)

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._patience.cancel()
        self._patience = self.loop.call_later(self.seconds, self._stalled)

    def _stalled(self) -> None:
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()


class LiveServer:
    """A running page: `address` is where, `wait` returns when it is stopped, `stop` stops it."""

    def __init__(self, app: App, port: int = 0, bounds: Bounds | None = None) -> None:
        bounds = bounds or Bounds()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("127.0.0.1", port))
            self._socket.listen(128)  # who comes before the server runs waits
        except OSError as error:
            self._socket.close()
            raise OSError(f"port {port} of this machine cannot be had: {error.strerror}; name another") from error
        protocol = type("Patient", (_Patient,), {"seconds": bounds.seconds})
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="off",
                log_level="warning",
                server_header=False,
                limit_concurrency=bounds.connections,
                timeout_keep_alive=int(bounds.seconds),
                timeout_graceful_shutdown=2,
                h11_max_incomplete_event_size=bounds.header_bytes,
            )
        )
        self._thread = threading.Thread(target=self._serve, daemon=True, name="tamis-explore")
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/"

    def wait(self) -> None:
        while self._thread.is_alive():
            self._thread.join(0.5)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()

    def _serve(self) -> None:
        # Not by `run`, which would take the signals of the program that it is in.
        asyncio.run(self._server.serve([self._socket]))

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
