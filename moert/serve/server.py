"""The server: models by name, the ASGI application of all interfaces, its start and its end."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from moert import __version__
from moert.chat.conversation import Asked
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.engine.settings import EngineSettings
from moert.errors import RunError
from moert.machine import held_bytes
from moert.pack.errors import PackError
from moert.serve import anthropic, ollama, openai, responses
from moert.serve.answers import body_of, whole
from moert.serve.fields import FLAG, TABLES, TEXT, Field, Refused, read, required
from moert.serve.metrics import metrics_text
from moert.serve.worker import MOST_WAITING, Worker

_LOG = logging.getLogger("moert.serve")
GRACE_S = 10.0
_MOST_CONNECTIONS = 512
_PAUSE_S = 0.01
Failed = Callable[[BaseException], Response]
"""A function that returns the response for an error."""


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server. `packs`: their folders by name; `api_key`: which clients have to send; `origins`: which
    pages of other hosts may call it ("*": all); `most_waiting`: clients at a time."""

    packs: Mapping[str, Path]
    engine: EngineSettings = field(default_factory=EngineSettings)
    defaults: GenerationSettings = field(default_factory=GenerationSettings)
    api_key: str | None = None
    origins: Sequence[str] = ()
    most_waiting: int = MOST_WAITING


class Server:
    """The models of a server, of which one is in memory at a time, and the paths under which clients find them."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings, self.defaults = settings, settings.defaults
        self.names = list(settings.packs)
        self.created = int(time.time())
        self.conversations = responses.Conversations()
        self._open: tuple[str, Worker] | None = None
        self._opening: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    @property
    def worker_there(self) -> Worker | None:
        """The worker of the model that is in memory."""
        return None if self._open is None else self._open[1]

    @property
    def name_there(self) -> str | None:
        return None if self._open is None else self._open[0]

    def check(self, name: str) -> None:
        """Raises Refused for a name that no model has."""
        if name not in self.names:
            known = ", ".join(self.names)
            raise Refused(f"there is no model {name[:80]!r}: this server has {known}", "model", 404)

    def open(self, name: str) -> Worker:
        """Opens a model in place of the one that is in memory. Raises the errors of Engine.open."""
        if self._open is not None:
            before, self._open = self._open[1], None
            before.close(GRACE_S)
            before.engine.close()
        engine = Engine.open(self.settings.packs[name], self.settings.engine, notify=_LOG.warning)
        worker = Worker(engine, self.settings.most_waiting)
        self._open = name, worker
        return worker

    async def worker(self, name: str | None) -> tuple[str, Worker]:
        """Returns the name and the worker of a model, by default the first one; another one leaves memory when its
        answers have ended. Raises Refused, or the errors of Engine.open."""
        name = self.names[0] if name is None else name.removesuffix(":latest")
        self.check(name)
        if self._open is not None and self._open[0] == name:
            return self._open
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._open is None or self._open[0] != name:
                await self.loop.run_in_executor(None, self.open, name)
            assert self._open is not None
            return self._open

    def close(self) -> None:
        """Ends the model in memory: its answers have GRACE_S seconds to end by themselves."""
        if self._open is not None:
            (_, worker), self._open = self._open, None
            worker.close(GRACE_S)
            worker.engine.close()

    def guarded(
        self, work: Callable[[Request], Awaitable[Any]], failed: Failed, open_to_all: bool = False
    ) -> Callable[[Request], Awaitable[Any]]:
        """Returns the endpoint of one path: checks the key, calls `work` for the response, `failed` for an error."""

        async def endpoint(request: Request) -> Any:
            try:
                if not open_to_all:
                    self._check_key(request)
                return await work(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except (Refused, RunError, PackError, MemoryError) as error:
                return failed(error)
            except Exception as error:
                _LOG.exception("%s", request.url.path)
                return failed(error)

        return endpoint

    def _check_key(self, request: Request) -> None:
        key = self.settings.api_key
        if key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        given = given or request.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(), key.encode()):
            raise Refused("the API key is missing or wrong", status=401)

    def app(self) -> ASGIApp:
        """Returns the application of all interfaces."""
        own = [
            Route("/", self.guarded(_page, openai.failed, open_to_all=True), methods=["GET"]),
            Route("/health", self.guarded(partial(_health, self), openai.failed, open_to_all=True), methods=["GET"]),
            Route("/metrics", self.guarded(partial(_metrics, self), openai.failed), methods=["GET"]),
            Route("/props", self.guarded(partial(_props, self), openai.failed), methods=["GET"]),
            Route("/slots", self.guarded(partial(_slots, self), openai.failed), methods=["GET"]),
            Route("/tokenize", self.guarded(partial(_tokenize, self), openai.failed), methods=["POST"]),
            Route("/detokenize", self.guarded(partial(_detokenize, self), openai.failed), methods=["POST"]),
        ]
        made = [each.routes(self) for each in (openai, responses, anthropic, ollama)]
        app = Starlette(
            routes=[*own, *(route for routes in made for route in routes)], exception_handlers={HTTPException: _unknown}
        )
        if not self.settings.origins:
            return app
        from starlette.middleware.cors import CORSMiddleware

        return CORSMiddleware(app, self.settings.origins, allow_methods=["GET", "POST"], allow_headers=["*"])


async def _unknown(request: Request, error: Exception) -> Response:
    """Answers for a path or a method that the server lacks."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    words = "there is no such path" if status == 404 else "this path takes another method"
    return openai.failed(Refused(f"{request.method} {request.url.path[:80]}: {words}", status=status))


async def _page(request: Request) -> Response:
    return HTMLResponse(files("moert.serve").joinpath("page.html").read_text(encoding="utf-8"))


async def _health(server: Server, request: Request) -> Response:
    return whole({"status": "ok", "model": server.name_there})


async def _metrics(server: Server, request: Request) -> Response:
    _, worker = await server.worker(None) if server.worker_there is None else ("", server.worker_there)
    stats = await asyncio.wrap_future(worker.call(lambda engine: engine.stats()))
    return Response(metrics_text(stats, worker), media_type="text/plain; version=0.0.4")


async def _props(server: Server, request: Request) -> Response:
    name, worker = await server.worker(request.query_params.get("model"))
    engine, spec = worker.engine, worker.engine.spec
    stats = await asyncio.wrap_future(worker.call(lambda engine: engine.stats()))
    return whole({
        "model": name, "version": __version__, "context": spec.max_positions, "vocabulary": spec.vocab_size,
        "memory_limit_bytes": engine.memory_limit_bytes, "held_bytes": held_bytes(),
        "most_waiting": server.settings.most_waiting,
        "stats": stats.to_dict(),
    })  # fmt: skip


async def _slots(server: Server, request: Request) -> Response:
    _, worker = await server.worker(request.query_params.get("model"))
    return whole(await asyncio.wrap_future(worker.call(lambda engine: worker.slots())))


_TOKENIZE: Mapping[str, Field] = {
    "model": TEXT, "content": TEXT, "messages": TABLES, "add_special": FLAG, "with_pieces": FLAG
}  # fmt: skip


async def _tokenize(server: Server, request: Request) -> Response:
    found = read(await body_of(request), _TOKENIZE)
    _, worker = await server.worker(found.get("model"))

    def run(engine: Engine) -> list[int]:
        if "messages" in found:
            return engine.speaker.ids(Asked(openai.messages_of(found["messages"])))
        return engine.text.encode(required(found, "content"), whole=not found.get("add_special", False))

    ids = await asyncio.wrap_future(worker.call(run))
    if not found.get("with_pieces"):
        return whole({"tokens": ids, "count": len(ids)})
    texts = worker.engine.text.pieces(ids)
    pairs = [{"id": number, "piece": text} for number, text in zip(ids, texts, strict=True)]
    return whole({"tokens": pairs, "count": len(ids)})


_DETOKENIZE: Mapping[str, Field] = {
    "model": TEXT,
    "tokens": Field(
        lambda value: isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 31 for each in value),
        "a list of token ids",
    ),
}


async def _detokenize(server: Server, request: Request) -> Response:
    found = read(await body_of(request), _DETOKENIZE)
    _, worker = await server.worker(found.get("model"))
    ids = required(found, "tokens")
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
    made = socket.socket(family, socket.SOCK_STREAM)
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
    its address once it answers. Raises the errors of Engine.open."""
    server = Server(settings)
    server.open(server.names[0])
    try:
        host, port = listening.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        asyncio.run(_run(server, listening, lambda: ready(address)))
    finally:
        server.close()


def application_server(server: Server) -> uvicorn.Server:
    """Returns the server of HTTP for all interfaces."""
    config = uvicorn.Config(
        server.app(), http="h11", ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False,
        server_header=False, limit_concurrency=_MOST_CONNECTIONS, timeout_keep_alive=30,
        timeout_graceful_shutdown=int(GRACE_S) + 5, h11_max_incomplete_event_size=64 << 10,
    )  # fmt: skip
    return uvicorn.Server(config)


async def _run(server: Server, listening: socket.socket, ready: Callable[[], None]) -> None:
    running = application_server(server)
    task = asyncio.ensure_future(running.serve(sockets=[listening]))
    while not running.started and not task.done():
        await asyncio.sleep(_PAUSE_S)
    if running.started:
        ready()
    await task
