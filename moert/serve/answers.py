"""HTTP around answers: bodies within limits, streams that a client may leave, answers as a whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moert.serve.fields import Refused, parsed
from moert.serve.worker import Ticket, Worker

MOST_BYTES = 8 << 20
"""Of a body; as many as a conversation that is rendered may have."""
BODY_S = 60.0
ALIVE_S = 10.0
PLACE = "x-queue-place"
"""Header with the first place of a request among those that wait for memory; 0 for one that ran at once."""
_EVENTS = "text/event-stream"
T = TypeVar("T")


async def body_of(request: Request) -> dict[str, Any]:
    """Returns the JSON object that a client has sent. Raises Refused."""
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MOST_BYTES:
        raise Refused(f"the body has {length} bytes, at most {MOST_BYTES} are read", status=413)
    try:
        return parsed(await asyncio.wait_for(_received(request), BODY_S))
    except asyncio.TimeoutError:
        raise Refused(f"the body has not come within {BODY_S:g} s", status=408) from None


async def _received(request: Request) -> bytes:
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > MOST_BYTES:
            raise Refused(f"the body has over {MOST_BYTES} bytes", status=413)
    return bytes(found)


def line(value: Any) -> bytes:
    """Returns a value in one line of JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def event(value: Any, name: str | None = None) -> bytes:
    """Returns a server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + (value if isinstance(value, bytes) else line(value)) + b"\n\n"


def whole(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a response in JSON."""
    return Response(line(value), status, dict(headers or {}), "application/json")


def refusal(value: Any, status: int) -> Response:
    """Returns a response that tells an error; of one that passes, when to try again."""
    return whole(value, status, {"retry-after": "1"} if status == 429 else None)


async def _gone(receive: Receive) -> None:
    """Waits until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of `work`, which is cancelled where the client leaves. Raises ClientDisconnect then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class Streamed:
    """A response in pieces as they come. The result of `alive` is sent where none has come for ALIVE_S seconds; `leave`
    is called at the end, also where the client has left."""

    def __init__(
        self, pieces: AsyncIterator[bytes], headers: Mapping[str, str], alive: Callable[[], bytes],
        leave: Callable[[], None],
    ) -> None:  # fmt: skip
        self._pieces, self._headers, self._alive, self._leave = pieces, headers, alive, leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        gone = asyncio.ensure_future(_gone(receive))
        ahead = asyncio.ensure_future(anext(self._pieces, None))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while True:
                done, _ = await asyncio.wait({ahead, gone}, timeout=ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if gone in done:
                    return
                body = ahead.result() if done else self._alive()
                if body is None:
                    break
                if done:
                    ahead = asyncio.ensure_future(anext(self._pieces, None))
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # the client has left
            pass
        finally:
            self._leave()
            for each in (ahead, gone):
                each.cancel()
            await asyncio.gather(ahead, gone, return_exceptions=True)


async def answered(
    request: Request, worker: Worker, ticket: Ticket, streams: bool, stream: Callable[[], AsyncIterator[bytes]],
    answer: Callable[[], Awaitable[Any]], alive: bytes = b": \n\n", kind: str = _EVENTS,
) -> Any:  # fmt: skip
    """Returns the response to a ticket, in pieces or whole, with its first place in the queue for memory as a header; a
    stream of events tells its place again while it waits. The ticket ends where the client leaves. Raises the errors of
    Ticket.accepted and Ticket.events."""

    def still() -> bytes:
        return b": place %d in the queue\n\n" % ticket.place if ticket.place and kind == _EVENTS else alive

    try:
        await unless_gone(request, ticket.accepted())
        place = {PLACE: str(ticket.place)}
        if streams:
            headers = {"content-type": kind, "cache-control": "no-cache", **place}
            return Streamed(stream(), headers, still, partial(worker.leave, ticket))
        return whole(await unless_gone(request, answer()), headers=place)
    except BaseException:
        worker.leave(ticket)
        raise
