"""The models of a server by name, and who may call it."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from moert.engine.archive import Folder
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.engine.settings import EngineSettings
from moert.errors import ChatImpossible, RunError, TokenizerMissing
from moert.pack.errors import PackError
from moert.pack.messages import in_one_line
from moert.serve.fields import Refused
from moert.serve.worker import MOST_WAITING, Worker

_LOG = logging.getLogger("moert.serve")
GRACE_S = 10.0
"""Seconds that answers have to end by themselves when the server ends."""
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


class Host:
    """The models of a server, of which one is in memory at a time, and who may call it."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings, self.defaults = settings, settings.defaults
        self.names = list(settings.packs)
        self.created = int(time.time())
        self._open: tuple[str, Worker] | None = None
        self._opening: asyncio.Lock | None = None
        self._ending: Worker | None = None

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
            before.close()
            before.engine.close()
        engine = Engine.open(self.settings.packs[name], self.settings.engine, notify=_LOG.warning)
        with suppress(TokenizerMissing, ChatImpossible):  # now, not in the middle of answers
            _ = engine.text.tokenizer, engine.speaker
        worker = Worker(engine, self.settings.most_waiting, self.settings.folder)
        if self.settings.folder is not None and not engine.spec.continues:
            _LOG.warning("%s reads with an encoder: nothing of it goes to %s", name, self.settings.folder.path)
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
            self._ending = worker
            worker.close(GRACE_S)
            worker.engine.close()

    def cut(self) -> None:
        """Ends the answers of a model that is closing where they are."""
        if self._ending is not None:
            self._ending.cut()

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
