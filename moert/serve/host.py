"""The models of a server by name, and who may call it."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from moert.engine.archive import Folder
from moert.engine.budget import MemoryLimit
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.engine.regulator import Others
from moert.engine.settings import EngineSettings
from moert.errors import BudgetTooSmall, ChatImpossible, RunError, TokenizerMissing, command_line
from moert.pack.errors import PackError
from moert.pack.messages import in_one_line
from moert.serve.fields import Refused
from moert.serve.sharing import Need, Sharing, need_of
from moert.serve.worker import LEAVES, MOST_WAITING, Worker

_LOG = logging.getLogger("moert.serve")
GRACE_S = 10.0
"""Seconds that answers have to end by themselves when the server ends."""
T = TypeVar("T")
Failed = Callable[[BaseException], Response]
"""A function that returns the response for an error."""


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server. `packs`: their folders by name; `api_key`: which clients have to send; `origins`: which
    pages of other hosts may call it ("*": all); `most_waiting`: clients at a time; `folder`: for states of
    conversations that leave memory."""

    packs: Mapping[str, Path]
    engine: EngineSettings = field(default_factory=EngineSettings)
    defaults: GenerationSettings = field(default_factory=GenerationSettings)
    api_key: str | None = None
    origins: Sequence[str] = ()
    most_waiting: int = MOST_WAITING
    folder: Folder | None = None


@dataclass
class _Wanted:
    """A model that waits to come into memory, or for more of it. `waiting`: requests that wait with it."""

    done: asyncio.Future[None]
    waiting: int = 0
    least_bytes: int = 0

    def end(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None) if error is None else self.done.set_exception(error)


def _opened(path: Path, settings: EngineSettings, others: Others | None) -> Engine:
    engine = Engine.open(path, settings, notify=_LOG.warning, others=others)
    with suppress(TokenizerMissing, ChatImpossible):  # now, not in the middle of answers
        _ = engine.text.tokenizer, engine.speaker
    return engine


def _closed(worker: Worker, grace_s: float | None = None) -> None:
    worker.close(grace_s)
    worker.engine.close()


class Host:
    """The models of a server, those in memory and those that wait for it, and who may call them.

    A model comes into memory when it is asked for, and the one that was used longest ago leaves where its room is
    needed: one without requests first; else its answers end before, and new ones wait in the same queue as models that
    are not in memory. Who came first there is loaded first.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings, self.defaults = settings, settings.defaults
        self.names = list(settings.packs)
        self.created = int(time.time())
        self._sharing = Sharing(settings.engine) if len(self.names) > 1 else None
        self._needs: dict[str, Need] = {}
        self._there: dict[str, Worker] = {}  # the one that was used last behind the others
        self._wanted: dict[str, _Wanted] = {}  # the first one first
        self._leaving: set[str] = set()
        self._loader: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    @property
    def there(self) -> dict[str, Worker]:
        """The workers of the models in memory by name, the one that was used last behind the others."""
        return dict(self._there)

    @property
    def alive(self) -> bool:
        """Whether the engines of all models that stay in memory run."""
        return all(worker.alive for name, worker in self._there.items() if name not in self._leaving)

    @property
    def wanted(self) -> list[tuple[str, int]]:
        """The models that wait to come into memory, or for more of it, the first one first, and the number of requests
        that wait for each."""
        return [(name, each.waiting) for name, each in self._wanted.items()]

    def share_bytes(self, name: str) -> int | None:
        """Returns the share of a model in the memory limit, beside the process itself; None where it has all."""
        return None if self._sharing is None else self._sharing.shares.get(name) or None

    def check(self, name: str) -> None:
        """Raises Refused for a name that no model has."""
        if name not in self.names:
            known = ", ".join(self.names)
            raise Refused(f"there is no model {name[:80]!r}: this server has {known}", "model", 404)

    def open(self, name: str) -> None:
        """Opens a model beside those in memory, for which there is room. Raises the errors of Engine.open."""
        path, settings, folder = self.settings.packs[name], self.settings.engine, self.settings.folder
        sharing, most = self._sharing, self.settings.most_waiting
        if sharing is None:
            engine = _opened(path, settings, None)
            engine.fill()
            self._there[name] = Worker(engine, most, folder)
        else:
            if sharing.limit_bytes is not None:
                settings = settings.but(memory=MemoryLimit(sharing.limit_bytes))
            turn, others = partial(sharing.turn, name), sharing.others(name)
            with turn():
                engine = _opened(path, settings, others)
            enlarge = None if sharing.limit_bytes is None else partial(self._enlarge, name)
            self._there[name] = Worker(engine, most, folder, turn, enlarge)
        if folder is not None and not self._there[name].engine.spec.continues:
            _LOG.warning("%s reads with an encoder: nothing of it goes to %s", name, folder.path)

    async def worker(self, name: str | None) -> tuple[str, Worker]:
        """Returns the name and the worker of a model, by default the first one, once it is in memory. Raises Refused,
        or the errors of Engine.open."""
        name = self.names[0] if name is None else name.removesuffix(":latest")
        self.check(name)
        self._loop = self.loop
        while name not in self._there or name in self._leaving:
            wanted = self._want(name)
            wanted.waiting += 1
            try:
                await asyncio.shield(wanted.done)
            finally:
                wanted.waiting -= 1
        self._there[name] = self._there.pop(name)
        return name, self._there[name]

    def _want(self, name: str, least_bytes: int = 0) -> _Wanted:
        """Returns the place of a model in the queue for memory. Raises Refused where the server ends."""
        if self._ending:
            raise Refused(LEAVES, status=503)
        if name not in self._wanted:
            self._wanted[name] = _Wanted(self.loop.create_future())
        wanted = self._wanted[name]
        wanted.least_bytes = max(wanted.least_bytes, least_bytes)
        if self._loader is None or self._loader.done():
            self._loader = self.loop.create_task(self._load())
        return wanted

    def _enlarge(self, name: str, least_bytes: int, then: Callable[[], None]) -> None:
        """Makes room for a request of a model that needs a process of `least_bytes`; called by its worker's thread."""

        def over(done: asyncio.Future[None]) -> None:
            done.exception()  # which the next try meets
            then()

        def want() -> None:
            with suppress(Refused):
                self._want(name, least_bytes).done.add_done_callback(over)

        if self._loop is not None:
            self._loop.call_soon_threadsafe(want)

    async def _load(self) -> None:
        """Brings models into memory until none waits."""
        while self._wanted:
            name, wanted = next(iter(self._wanted.items()))
            error: Exception | None = None
            try:
                if name in self._there or wanted.waiting:
                    await self._fit(name, wanted.least_bytes)
            except (BudgetTooSmall, Refused) as found:
                error = found
            except Exception as found:  # of the pack or the server's settings, which are not the client's
                _LOG.error("%s: %s", name, in_one_line(str(found)))
                error = Refused(f"the model {name} can't be loaded: the server's log says why", status=500)
            del self._wanted[name]
            wanted.end(error)
            while wanted.waiting:  # each of them gets its model before it could leave again
                await asyncio.sleep(0)

    async def _fit(self, name: str, least_bytes: int) -> None:
        """Brings a model into memory, with a share for requests that need a process of `least_bytes`; others leave
        where there is no room beside them. Raises the errors of Engine.open."""
        sharing = self._sharing
        if sharing is None:
            await self._in_thread(self.open, name)
            return
        need, more = await self._need(name), least_bytes - sharing.base_bytes
        need = Need(max(need.least, more), max(need.most, more))
        while True:
            needs = {each: await self._need(each) for each in self._there} | {name: need}
            planned = sharing.plan(needs)
            if planned is not None or len(needs) == 1:
                try:
                    await self._share(planned or {})
                    if name not in self._there:
                        await self._in_thread(self.open, name)
                    return
                except BudgetTooSmall:
                    if len(needs) == 1:
                        raise
                except Exception:
                    await self._share(sharing.plan({each: needs[each] for each in self._there}) or {})
                    raise
            await self._close(self._leaver(name))

    def _leaver(self, name: str) -> str:
        """Returns the model that leaves for another one: one without requests, or one whose requests all have their
        room, or any; of several the one that was used longest ago."""
        others = [each for each in self._there if each != name and each not in self._leaving]
        return min(others, key=lambda each: (self._there[each].unfinished > 0, each in self._wanted))

    async def _need(self, name: str) -> Need:
        assert self._sharing is not None
        if name not in self._needs:
            work = partial(need_of, self.settings.packs[name], self.settings.engine, self._sharing.base_bytes)
            self._needs[name] = await self._in_thread(work)
        return self._needs[name]

    async def _share(self, planned: dict[str, int]) -> None:
        """Gives shares to models in memory, once the requests that run fit into theirs. Raises BudgetTooSmall."""
        assert self._sharing is not None
        if self._sharing.limit_bytes is None:
            return
        self._sharing.shares = planned
        for name, worker in self.there.items():
            promised = self._sharing.promised_bytes(name)

            def refit(engine: Engine, promised: int = promised) -> None:
                engine.refit(promised)

            try:
                await asyncio.wrap_future(worker.call(refit))
            except BudgetTooSmall:
                await asyncio.wrap_future(worker.call(refit, alone=True))

    async def _close(self, name: str) -> None:
        """Has a model leave memory once its answers have ended."""
        self._leaving.add(name)
        asked = self._wanted.pop(name, None)
        if asked is not None and len(self._leaving) == 1:  # its requests that wait for more room come before it goes
            await self._fit(name, asked.least_bytes)
            asked.end(None)
        await self._in_thread(self._there[name].close)
        assert self._sharing is not None
        await self._in_thread(self._sharing.leave, name, self._there.pop(name).engine.close)
        self._leaving.discard(name)
        if self._ending:
            raise Refused(LEAVES, status=503)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self.loop.run_in_executor(None, partial(work, *arguments))

    def close(self) -> None:
        """Ends the models in memory: their answers have GRACE_S seconds to end by themselves."""
        self._ending, until_s = True, time.monotonic() + GRACE_S
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send_away)
        workers = [*self._there.values()]
        for worker in workers:
            worker.end()
        for worker in workers:
            _closed(worker, max(0.0, until_s - time.monotonic()))

    def _send_away(self) -> None:
        for wanted in self._wanted.values():
            wanted.end(Refused(LEAVES, status=503))

    def cut(self) -> None:
        """Ends the answers of models that are closing where they are."""
        for worker in self.there.values():
            worker.cut()

    def guarded(
        self, work: Callable[[Request], Awaitable[Any]], failed: Failed, open_to_all: bool = False
    ) -> Callable[[Request], Awaitable[Any]]:
        """Returns the endpoint of one path: checks the key, calls `work` for the response, `failed` for an error."""

        async def endpoint(request: Request) -> Any:
            try:
                if not open_to_all:
                    self._check_key(request)
                with command_line(None):
                    return await work(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except (Refused, RunError, PackError, MemoryError) as error:
                return failed(error)
            except Exception as error:
                _LOG.exception("%s", in_one_line(request.url.path))
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
