"""The server: the ASGI application of all interfaces, its start and its end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from moert import __version__
from moert.engine.engine import Engine
from moert.errors import RunError
from moert.machine import held_bytes
from moert.serve import anthropic, ollama, openai, responses
from moert.serve.answers import body_of, whole
from moert.serve.fields import FLAG, IDS, TABLES, TEXT, Form, Refused, required
from moert.serve.host import GRACE_S, Host, ServerSettings
from moert.serve.metrics import metrics_text
from moert.serve.openapi import description
from moert.serve.tools import Tools
from moert.serve.worker import Worker

T = TypeVar("T")
_MOST_CONNECTIONS = 512
IDLE_S = 30.0
"""Seconds that a connection may hold its place without a request."""
_PAUSE_S, _LOOK_S = 0.01, 0.1


def application(host: Host) -> ASGIApp:
    """Returns the application of all interfaces."""
    own: list[tuple[str, str, Callable[[Host, Request], Awaitable[Any]]]] = [
        ("GET", "/metrics", _metrics), ("GET", "/props", _props), ("GET", "/slots", _slots),
        ("POST", "/tokenize", _tokenize), ("POST", "/detokenize", _detokenize),
    ]  # fmt: skip
    routes = [
        Route("/", host.guarded(_page, openai.failed, open_to_all=True), methods=["GET"]),
        Route("/health", host.guarded(partial(_health, host), openai.failed, open_to_all=True), methods=["GET"]),
        *(Route(path, host.guarded(partial(work, host), openai.failed), methods=[way]) for way, path, work in own),
        *(route for interface in (openai, responses, anthropic, ollama) for route in interface.routes(host)),
    ]
    described = description(routes, {"/tokenize": _TOKENIZE, "/detokenize": _DETOKENIZE}, host.names)
    routes.append(Route("/openapi.json", host.guarded(partial(_described, described), openai.failed), methods=["GET"]))
    app = Starlette(routes=routes, exception_handlers={HTTPException: _unknown})
    if not host.settings.origins:
        return app
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(app, host.settings.origins, allow_methods=["GET", "POST"], allow_headers=["*"])


async def _unknown(request: Request, error: Exception) -> Response:
    """Answers for a path or a method that the server lacks."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    words = "there is no such path" if status == 404 else "this path takes another method"
    answer = openai.failed(Refused(f"{request.method} {request.url.path[:80]}: {words}", status=status))
    answer.headers.update((isinstance(error, HTTPException) and error.headers) or {})  # the methods that there are
    return answer


async def _page(request: Request) -> Response:
    return HTMLResponse(files("moert.serve").joinpath("page.html").read_text(encoding="utf-8"))


async def _described(found: Any, request: Request) -> Response:
    return whole(found)


async def _health(host: Host, request: Request) -> Response:
    if not host.alive:
        raise Refused("an engine has ended: start the server again", status=503)
    there = list(host.there)
    return whole({
        "status": "ok", "model": there[-1] if there else None, "models": there,
        "waiting": [{"model": name, "requests": count} for name, count in host.wanted],
    })  # fmt: skip


async def _metrics(host: Host, request: Request) -> Response:
    found = await _of_each(host, lambda worker, engine: (engine.stats(best=False), worker))
    return Response(metrics_text(found, host.wanted), media_type="text/plain; version=0.0.4")


async def _of_each(host: Host, work: Callable[[Worker, Engine], T]) -> dict[str, T]:
    """Returns results of the workers in memory by name; of one that leaves meanwhile there is none."""
    found = dict[str, T]()
    for name, worker in host.there.items():
        with suppress(Refused):
            found[name] = await asyncio.wrap_future(worker.call(partial(work, worker)))
    return found


async def _props(host: Host, request: Request) -> Response:
    name, worker = await host.worker(request.query_params.get("model"))
    engine, spec = worker.engine, worker.engine.spec
    stats = await asyncio.wrap_future(worker.call(lambda engine: engine.stats(best=False)))
    return whole({
        "model": name, "version": __version__, "context": spec.max_positions, "vocabulary": spec.vocab_size,
        "memory_limit_bytes": engine.memory_limit_bytes, "memory_share_bytes": host.share_bytes(name),
        "held_bytes": held_bytes(),
        "most_waiting": host.settings.most_waiting,
        "stats": stats.to_dict(),
    })  # fmt: skip


async def _slots(host: Host, request: Request) -> Response:
    found, only = await _of_each(host, lambda worker, engine: worker.slots()), request.query_params.get("model")
    if only is not None:
        host.check(only)
    slots = [{"model": name, **each} for name, those in found.items() for each in those if only in (None, name)]
    return whole([{**each, "id": at} for at, each in enumerate(slots)])


_TOKENIZE = Form({
    "model": TEXT, "content": TEXT, "messages": TABLES, "tools": TABLES, "add_special": FLAG, "with_pieces": FLAG
})  # fmt: skip


async def _tokenize(host: Host, request: Request) -> Response:
    found = _TOKENIZE.read(await body_of(request))
    _, worker = await host.worker(found.get("model"))

    def run(engine: Engine) -> list[int]:
        return engine.text.encode(required(found, "content"), whole=not found.get("add_special", False))

    if "messages" in found:
        talk = Tools.of(worker.engine, found).talk(openai.messages_of(found["messages"]), {})
        ids = await asyncio.wrap_future(worker.ids(talk.asked))
    else:
        ids = await asyncio.wrap_future(worker.call(run))
    if not found.get("with_pieces"):
        return whole({"tokens": ids, "count": len(ids)})
    texts = worker.engine.text.pieces(ids)
    pairs = [{"id": number, "piece": text} for number, text in zip(ids, texts, strict=True)]
    return whole({"tokens": pairs, "count": len(ids)})


_DETOKENIZE = Form({"model": TEXT, "tokens": IDS}, needed=("tokens",))


async def _detokenize(host: Host, request: Request) -> Response:
    found = _DETOKENIZE.read(await body_of(request))
    _, worker = await host.worker(found.get("model"))
    ids = found["tokens"]
    if wrong := [each for each in ids if each >= worker.engine.spec.vocab_size]:
        raise Refused(
            f"tokens has {wrong[0]}: the model has tokens up to {worker.engine.spec.vocab_size - 1}", "tokens"
        )
    text = await asyncio.wrap_future(worker.call(lambda engine: engine.text.decode(ids)))
    return whole({"content": text})


# Start and end --------------------------------------------------------------------------------------------------------


def bound(host: str, port: int) -> socket.socket:
    """Returns a socket that listens. Raises RunError where the address can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # or asyncio leaves Nagle on
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(256)
    except (OSError, OverflowError) as error:
        made.close()
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"can't listen on {host}:{port} ({reason}): give another --host or --port") from None
    return made


def serve(settings: ServerSettings, listening: socket.socket, ready: Callable[[str], None]) -> None:
    """Runs a server until SIGINT or SIGTERM; then answers that run have GRACE_S seconds to end. `ready` is called with
    its address once it answers. Raises the errors of Engine.open, and KeyboardInterrupt or SystemExit
    at the end."""
    host = Host(settings)
    host.open(host.names[0])
    try:
        name, port = listening.getsockname()[:2]
        address = f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
        ended = asyncio.run(_run(host, listening, lambda: ready(address)))
    finally:
        host.close()
    if ended is signal.SIGINT:
        raise KeyboardInterrupt
    if ended is not None:
        raise SystemExit(128 + ended)


class _Connection(H11Protocol):
    """A connection that closes where no request comes whole within IDLE_S seconds, but for its body."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._due is not None:
            self._due.cancel()

    def _wait(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due = asyncio.get_running_loop().call_later(IDLE_S, self._close)

    def _close(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def http_server(host: Host) -> uvicorn.Server:
    """Returns the server of HTTP for all interfaces."""
    config = uvicorn.Config(
        application(host), http=_Connection, ws="none", loop="asyncio", lifespan="off", log_config=None,
        access_log=False, server_header=False, limit_concurrency=_MOST_CONNECTIONS, timeout_keep_alive=int(IDLE_S),
        timeout_graceful_shutdown=int(GRACE_S) + 5, h11_max_incomplete_event_size=64 << 10,
    )  # fmt: skip
    made = uvicorn.Server(config)
    made.capture_signals = nullcontext  # type: ignore[method-assign, assignment] # whoever runs it has handlers
    return made


def on_signals(
    loop: asyncio.AbstractEventLoop, numbers: Sequence[signal.Signals], end: Callable[[signal.Signals], None]
) -> None:
    """Has the loop call `end` with the signal that came, if it is one of `numbers`."""
    for number in numbers:
        try:
            loop.add_signal_handler(number, end, number)
        except NotImplementedError:  # on Windows
            signal.signal(number, lambda got, _: loop.call_soon_threadsafe(end, signal.Signals(got)))


async def _run(host: Host, listening: socket.socket, ready: Callable[[], None]) -> signal.Signals | None:
    """Runs the server until a signal, which is returned; then its answers may end within GRACE_S seconds, or with a
    second signal at once."""
    running, found, loop = http_server(host), list[signal.Signals](), asyncio.get_running_loop()

    def end(number: signal.Signals) -> None:
        running.should_exit, running.force_exit = True, bool(found)
        found.append(number)

    on_signals(loop, (signal.SIGINT, signal.SIGTERM), end)
    task = asyncio.ensure_future(running.serve(sockets=[listening]))
    while not running.started and not task.done():
        await asyncio.sleep(_PAUSE_S)
    if running.started:
        ready()
    while not running.should_exit and not task.done():
        await asyncio.sleep(_LOOK_S)
    ending = loop.run_in_executor(None, host.close)
    while not (task.done() and ending.done()):
        await asyncio.sleep(_PAUSE_S)
        if running.force_exit:
            host.cut()
    await ending
    await task
    return found[0] if found else None
