"""The worker: one thread owns the engine, and runs the requests of all clients together."""

from __future__ import annotations

import asyncio
import copy
import logging
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from moert.chat.conversation import Asked, Part
from moert.chat.renderer import Rendered
from moert.engine.archive import Folder
from moert.engine.constraint import Grammar, Matcher
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings, Piece
from moert.engine.session import Continued, Prompt, Request, Session
from moert.errors import (
    BudgetTooSmall,
    ChatImpossible,
    InputInvalid,
    RunError,
    SettingInvalid,
    TemplateFailed,
    TokenizerMissing,
)
from moert.machine import return_freed
from moert.pack.errors import PackError
from moert.serve import scanning
from moert.serve.calls import ReplyReader, schemas_of
from moert.serve.fields import Refused
from moert.serve.forms import Argued, Called, Ended, Event, Talk, Wish, Wrote

PART_TOKENS = 256
"""Tokens of a prompt that are read in one turn: between two of them, other answers go on, and a client may leave."""
RENDERINGS = 2
"""Chat templates that are rendered at a time, each in a process of its own beside the answers."""
COMPILES = 2
"""Grammars that are compiled at a time, beside the answers."""
_RENDER = "render the model's chat template"
APART_S = 0.02
"""Seconds between two deliveries to one client: a small model's tokens come together, which costs it less."""
MOST_WAITING = 64
_LOG = logging.getLogger("moert.serve")
LEAVES = "the server ends, or another model takes the place of this one: try again"

T = TypeVar("T")


@dataclass(eq=False)
class _Choice:
    """One answer of a ticket. `reader`: of a conversation's reply; None where all text is the answer."""

    ticket: Ticket
    number: int
    request: Request
    reader: ReplyReader | None
    probs: bool = False  # whether log-probabilities are wanted
    told: int = 0  # of them, that were delivered

    def took(self, piece: Piece) -> list[Event]:
        """Returns the events of one more token."""
        events: list[Event] = []
        if self.reader is None:
            if piece.text:
                events.append(Wrote(self.number, "answer", piece.text, self._logprobs()))
        else:
            found = self.reader.push(piece.text)
            if self.request.ended:
                found += self.reader.flush()
            for each in found:
                events += self._event(each)
        if self.request.ended:
            events.append(self.end())
        return events

    def _event(self, found: scanning.Event) -> list[Event]:
        if isinstance(found, scanning.Text):
            part: Part = "thinking" if found.part == "thinking" else "answer"
            return [Wrote(self.number, part, found.text, self._logprobs())] if found.text else []
        if isinstance(found, scanning.CallBegins):
            return [Called(self.number, found.index, f"call_{secrets.token_hex(12)}", found.name)]
        if isinstance(found, scanning.Arguments):
            return [Argued(self.number, found.index, found.text)] if found.text else []
        return []

    def end(self) -> Ended:
        answer = self.request.answer
        return Ended(
            self.number, answer.stop_reason, len(answer.tokens), answer.prompt_tokens, answer.kept_tokens,
            answer.result.stop, answer.time_to_first_token_s, answer.total_s, self._logprobs(),
        )  # fmt: skip

    def _logprobs(self) -> tuple[Any, ...]:
        found = (self.request.answer.logprobs or [])[self.told :] if self.probs else []
        self.told += len(found)
        return tuple(found)


class _Asked(NamedTuple):
    """One request of a ticket, as a session takes it, and the reader of its reply if it is a conversation's."""

    prompt: Prompt
    settings: GenerationSettings
    reader: ReplyReader | None


@dataclass(eq=False)
class Ticket:
    """A client's place in the worker: its events come here, until all answers have ended or something failed."""

    wish: Wish
    _loop: asyncio.AbstractEventLoop
    _events: asyncio.Queue[list[Event] | BaseException] = field(default_factory=asyncio.Queue)
    prompt_tokens: int = 0
    """Of the first prompt, once the ticket is accepted."""
    left: int = 0
    """Answers that have not ended."""
    gone: bool = False
    """Whether the client has left."""
    held: list[Event] = field(default_factory=list)
    """Events that are delivered with those of the next turn."""
    told_s: float = 0.0
    """Time of the last delivery."""
    rendered: Rendered | None = None
    """Its conversation, rendered by the chat template."""
    asked: Sequence[_Asked] = ()
    """Its requests, once they are known."""
    matchers: Mapping[Grammar, Matcher] | None = None
    """The matchers of its grammars, once they are compiled."""
    place: int = 0
    """Its place among the requests that wait for memory, from 1 on; 0 once all its requests run."""
    enlarged: bool = False
    """Whether all the room was made for it that there is."""

    def deliver(self, found: list[Event] | BaseException) -> None:
        """Hands events, or the error that ends the ticket, to the client. Called by the worker's thread."""
        if not self.gone:
            try:
                self._loop.call_soon_threadsafe(self._events.put_nowait, found)
            except RuntimeError:  # the loop has ended
                self.gone = True

    async def accepted(self) -> None:
        """Waits until all requests of the ticket are in the session. Raises the errors of Session.add."""
        found = await self._events.get()
        if isinstance(found, BaseException):
            raise found

    async def events(self) -> AsyncIterator[Event]:
        """Yields the events of an accepted ticket until all answers have ended; pieces that have piled up come as one.
        Raises the errors of Session.turn."""
        left = len(self.wish.prompts) * len(self.wish.settings)
        while left:
            taken = [await self._events.get()]
            while not self._events.empty():
                taken.append(self._events.get_nowait())
            events = list[Event]()
            for found in taken:
                if isinstance(found, BaseException):
                    raise found
                events += found
            for event in _joined(events):
                left -= isinstance(event, Ended)
                yield event


def _joined(events: Iterable[Event]) -> list[Event]:
    """Returns events with pieces of one part of one answer in one."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Wrote) and isinstance(last, Wrote) and last[:2] == event[:2]:
            found[-1] = last._replace(text=last.text + event.text, logprobs=(*last.logprobs, *event.logprobs))
        else:
            found.append(event)
    return found


@dataclass(eq=False)
class _Rendering:
    """A conversation that is rendered beside the answers. `then` is called in the worker's thread, with the text or the
    error."""

    asked: Asked
    then: Callable[[Rendered | Exception], None]
    begun: bool = False
    reserved_bytes: int = 0


Enlarge = Callable[[int, Callable[[], None]], None]
"""A function that makes room in memory, for this many bytes of a process with this engine alone, and then calls."""


class Worker:
    """One thread that owns an engine. `submit`, `call` and `ids` may be called from any thread.

    `turn`: waits for the turn of this engine among others; `enlarge`: makes more room where others share the memory.
    """

    def __init__(
        self, engine: Engine, most_waiting: int = MOST_WAITING, folder: Folder | None = None,
        turn: Callable[[], AbstractContextManager[object]] = nullcontext, enlarge: Enlarge | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._most = engine, most_waiting
        self._turn, self._enlarge = turn, enlarge
        self._renderings: list[_Rendering] = []
        self._crowded = False  # whether none of them has room until an answer ends
        self._short: list[Ticket] = []  # wait for room that others have
        self._compiling: list[Ticket] = []  # wait for their grammars
        self._compilers = threading.Semaphore(COMPILES)
        self._prefixes = engine.prefixes(folder) if engine.spec.continues else None
        self._inbox: queue.SimpleQueue[Callable[[], None] | Ticket | None] = queue.SimpleQueue()
        self._alone: list[Callable[[], None]] = []  # waits until no request runs
        self._tickets: list[Ticket] = []
        self._choices: dict[Request, _Choice] = {}
        self._running = 0  # tickets that wait or run
        self._count = threading.Lock()
        self._closing = False
        self._open: Session | None = None
        self.refused = 0
        self._thread = threading.Thread(target=self._serve, name="moert-serve", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def unfinished(self) -> int:
        """Number of clients whose answers have not ended."""
        return self._running

    @property
    def prefix_bytes(self) -> int:
        """Memory of the prefixes that are kept [bytes]."""
        return 0 if self._prefixes is None else self._prefixes.held_bytes

    def slots(self) -> list[dict[str, Any]]:
        """Returns the state of each answer that runs or waits for memory, with its place among those that wait, 0 for
        one that runs; to be called in the worker's thread."""
        return [
            {
                "id": at, "prompt_tokens": answer.prompt_tokens, "kept_tokens": answer.kept_tokens,
                "new_tokens": len(answer.tokens), "begun": each.request.begun,
                "place": 0 if self._open is None else self._open.place(each.request),
            }
            for at, each in enumerate(self._choices.values())
            for answer in [each.request.answer]
        ]  # fmt: skip

    def submit(self, wish: Wish, loop: asyncio.AbstractEventLoop) -> Ticket:
        """Returns a ticket for the wish of a client. Raises Refused where too many wait, or the server ends."""
        with self._count:
            if self._closing or not self.alive:
                raise Refused(LEAVES, status=503)
            if self._running >= self._most:
                self.refused += 1
                raise Refused(f"{self._running} requests wait or run already: try again later", status=429)
            self._running += 1
        ticket = Ticket(wish, loop)
        self._inbox.put(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Ends all answers of a client, which has left, before their next token."""
        if not ticket.gone:
            ticket.gone = True
            self._inbox.put(lambda: self._cancel(ticket))

    def call(self, work: Callable[[Engine], T], alone: bool = False) -> Future[T]:
        """Runs a function in the worker's thread between two turns, or `alone` when no request runs. Raises Refused
        where the server ends."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(self._engine))
                except BaseException as error:
                    future.set_exception(error)

        with self._count:
            if self._closing:
                raise Refused(LEAVES, status=503)
            self._inbox.put((lambda: self._alone.append(run)) if alone else run)
        return future

    def ids(self, asked: Asked) -> Future[list[int]]:
        """Returns the token ids of a conversation, which is rendered beside the answers. Raises Refused where the
        server ends."""
        future: Future[list[int]] = Future()

        def then(found: Rendered | Exception) -> None:
            try:
                if isinstance(found, Exception):
                    raise found
                future.set_result(self._engine.speaker.ids(found))
            except Exception as error:
                future.set_exception(error)

        with self._count:
            if self._closing or not self.alive:
                raise Refused(LEAVES, status=503)
            self._inbox.put(lambda: self._renderings.append(_Rendering(asked, then)))
        return future

    def end(self) -> None:
        """Takes no more requests; the thread ends behind the answers."""
        with self._count:
            self._closing = True
            self._inbox.put(None)

    def close(self, grace_s: float | None = None) -> None:
        """Ends the thread: answers have `grace_s` seconds to come to their ends, and are cut then; None: they all end
        by themselves."""
        self.end()
        self._thread.join(grace_s)
        if self._thread.is_alive():
            self.cut()
            self._thread.join()

    def cut(self) -> None:
        """Ends all answers where they are."""
        self._inbox.put(self._cut)

    # In the thread ----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        over = False
        while not (over and not self._alone and not self._compiling):
            if not self._alone and not self._tickets and not self._renderings:
                over = not self._take() or over
            while self._alone:
                with self._turn():
                    self._alone.pop(0)()
            if self._tickets or self._renderings:
                over = self._session(over)
        for ticket in self._short:  # their model leaves
            ticket.deliver(Refused(LEAVES, status=503))
            self._done(ticket)

    def _session(self, over: bool) -> bool:
        """Runs requests until all have ended; returns whether the worker is to end then."""
        try:
            with self._engine.session(PART_TOKENS) as session:
                self._open = session
                while self._choices or self._renderings or (self._tickets and not self._alone):
                    with self._turn():
                        runs = self._begin(session)
                        if runs:
                            self._deliver(session.turn())
                    while not self._inbox.empty() or not (runs or self._goes_on):
                        over, runs = not self._take() or over, True
        except (PackError, RunError, MemoryError) as error:
            _LOG.error("%s", error)
            self._fail(error)
        except Exception as error:
            _LOG.exception("a request brought the worker down")
            self._fail(error)
        finally:
            self._open = None
            return_freed()
        return over

    @property
    def _goes_on(self) -> bool:
        """Whether there is more to do while no request runs, before anything comes from outside."""
        return not (self._renderings or self._compiling) or bool(self._tickets and not self._alone)

    def _take(self) -> bool:
        """Takes the next thing from the inbox, or waits for it; returns False for the last one."""
        item = self._inbox.get()
        if isinstance(item, Ticket):
            self._tickets.append(item)
        elif item is not None:
            with self._turn():
                item()
        return item is not None

    def _begin(self, session: Session) -> bool:
        """Adds the requests of waiting tickets to the session, unless something waits to run alone, and begins those
        that fit; returns whether any runs. Begins to render conversations."""
        accepted = list[Ticket]()
        while self._tickets and not self._alone:
            ticket = self._tickets.pop(0)
            if ticket.gone:
                self._done(ticket)
            elif ticket.rendered is None and isinstance(talk := ticket.wish.prompts[0], Talk):
                self._renderings.append(_Rendering(talk.asked, partial(self._rendered, ticket)))
            elif self._ready(ticket) and self._added(session, ticket):
                accepted.append(ticket)
        for rendering in self._renderings[:RENDERINGS]:
            if not rendering.begun and not self._crowded:
                self._render(rendering)
        runs = session.begin()
        self._tell_places(session)
        for ticket in accepted:
            ticket.deliver([])
        return runs

    def _ready(self, ticket: Ticket) -> bool:
        """Returns whether the requests of a ticket can be added; compiles the grammars that they name."""
        if ticket.matchers is not None:
            return True
        try:
            wish = ticket.wish
            ticket.asked = [self._asked(ticket, each, chosen) for each in wish.prompts for chosen in wish.settings]
            grammars = {each.settings.constraint for each in ticket.asked} - {None}
            if not grammars:
                ticket.matchers = {}
                return True
            self._engine.text.tokenizer  # noqa: B018 - loaded by this thread, whose turn it is
        except Exception as error:
            self._refuse(ticket, error)
            return False
        self._compiling.append(ticket)
        threading.Thread(target=self._compile, args=(ticket, grammars), name="moert-compile", daemon=True).start()
        return False

    def _compile(self, ticket: Ticket, grammars: Collection[Grammar]) -> None:
        """Compiles the grammars of a ticket, in a thread beside the answers."""
        found: Mapping[Grammar, Matcher] | Exception = {}
        with self._compilers:
            if not ticket.gone:
                found = _result(lambda: {each: self._engine.matcher(each, self._room) for each in grammars})
        self._inbox.put(lambda: self._compiled(ticket, found))

    def _compiled(self, ticket: Ticket, found: Mapping[Grammar, Matcher] | Exception) -> None:
        if ticket not in self._compiling:  # somebody has cut it
            return
        self._compiling.remove(ticket)
        if isinstance(found, Exception):
            self._refuse(ticket, found)
        else:
            ticket.matchers = found
            self._tickets.append(ticket)

    @contextmanager
    def _room(self, nbytes: int, purpose: str) -> Iterator[None]:
        """Reserves memory for work of another thread; where it has no room beside the answers, they end first."""

        def reserve(engine: Engine) -> None:
            engine.reserve_aside(nbytes, purpose)

        try:
            self.call(reserve).result()
        except BudgetTooSmall:
            self.call(reserve, alone=True).result()
        try:
            yield
        finally:
            self._inbox.put(lambda: self._release(nbytes))

    def _release(self, nbytes: int) -> None:
        self._engine.release_aside(nbytes)
        self._crowded = False

    def _added(self, session: Session, ticket: Ticket) -> bool:
        """Adds the requests of a ticket to the session, and returns whether they could be added."""
        added: list[_Choice] = []
        try:
            for number, (prompt, settings, reader) in enumerate(ticket.asked):
                grammar = settings.constraint
                matcher = None if grammar is None else copy.copy((ticket.matchers or {})[grammar])
                request = session.add(prompt, settings, matcher)
                added.append(_Choice(ticket, number, request, reader, settings.logprobs is not None))
        except Exception as error:  # of this client alone: others go on
            for each in added:
                session.cancel(each.request)
            self._refuse(ticket, error)
            return False
        ticket.left, ticket.prompt_tokens = len(added), added[0].request.answer.prompt_tokens
        self._choices |= {each.request: each for each in added}
        return True

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
        """Ends a ticket that could not be added, unless other engines can make room for it."""
        if isinstance(error, BudgetTooSmall) and self._enlarge is not None and not ticket.enlarged:
            ticket.enlarged = True
            self._short.append(ticket)
            self._enlarge(error.smallest_bytes, lambda: self._inbox.put(partial(self._enlarged, ticket)))
            return
        ticket.deliver(error)
        self._done(ticket)

    def _enlarged(self, ticket: Ticket) -> None:
        if ticket in self._short:
            self._short.remove(ticket)
            self._tickets.append(ticket)

    def _tell_places(self, session: Session) -> None:
        places = dict[Ticket, int]()
        for request, choice in self._choices.items():
            places[choice.ticket] = max(places.get(choice.ticket, 0), session.place(request))
        for ticket, place in places.items():
            ticket.place = place

    def _render(self, rendering: _Rendering) -> None:
        """Begins to render a conversation, in a thread that waits for its process; where memory has no room for this
        process beside the answers, they wait for it instead, or it waits until some have ended."""
        try:
            speaker = self._engine.speaker
            work, nbytes = speaker.rendering(rendering.asked)
        except Exception as error:
            self._finish(rendering, error)
            return
        try:
            self._engine.reserve_aside(nbytes, _RENDER)
        except BudgetTooSmall:
            found = _result(partial(speaker.render, rendering.asked))
            others = self._choices or self._compiling or any(each.begun for each in self._renderings)
            self._crowded = isinstance(found, BudgetTooSmall) and bool(others)
            if not self._crowded:
                self._finish(rendering, found)
            return
        rendering.begun, rendering.reserved_bytes = True, nbytes

        def run() -> None:
            found = _result(work)
            self._inbox.put(lambda: self._finish(rendering, found))

        threading.Thread(target=run, name="moert-render", daemon=True).start()

    def _finish(self, rendering: _Rendering, found: Rendered | Exception) -> None:
        if rendering.reserved_bytes:
            self._release(rendering.reserved_bytes)
        if rendering in self._renderings:  # nobody has cut it
            self._renderings.remove(rendering)
            rendering.then(found)

    def _rendered(self, ticket: Ticket, found: Rendered | Exception) -> None:
        if isinstance(found, Exception):
            self._refuse(ticket, found)
        else:
            ticket.rendered = found
            self._tickets.append(ticket)

    def _asked(self, ticket: Ticket, prompt: Talk | Prompt, settings: GenerationSettings) -> _Asked:
        engine, prefixes = self._engine, self._prefixes
        if isinstance(prompt, Talk):
            if prefixes is None:
                prefixes = engine.prefixes()
            spoken = engine.speaker.prompt(prompt.asked, prefixes, settings, ticket.rendered)
            reader = ReplyReader(spoken.marks, spoken.first, prompt.format, schemas_of(prompt.tools))
            return _Asked(spoken.prompt, spoken.settings, reader)
        if prefixes is not None and not isinstance(prompt, Continued):
            prompt = Continued(engine.text.ids(prompt), engine.text.detokenizer(), prefixes)
        return _Asked(prompt, settings, None)

    def _deliver(self, pieces: list[tuple[Request, Piece]]) -> None:
        found: dict[Ticket, list[Event]] = {}
        for request, piece in pieces:
            choice = self._choices[request]
            found.setdefault(choice.ticket, []).extend(choice.took(piece))
            if request.ended:
                self._forget(request)
                choice.ticket.left -= 1
        now = time.monotonic()
        for ticket, events in found.items():
            ticket.held += events
            if ticket.held and (not ticket.left or now - ticket.told_s >= APART_S):
                ticket.deliver(ticket.held)
                ticket.held, ticket.told_s = [], now
            if not ticket.left:
                self._done(ticket)

    def _cancel(self, ticket: Ticket) -> None:
        for request in [each for each, choice in self._choices.items() if choice.ticket is ticket]:
            self._forget(request)
            if self._open is not None:
                self._open.cancel(request)
            ticket.left -= 1
            if not ticket.left:
                self._done(ticket)

    def _cut(self) -> None:
        """Ends all answers where they are."""
        for ticket in {id(choice.ticket): choice.ticket for choice in self._choices.values()}.values():
            ends = [each.end() for each in self._choices.values() if each.ticket is ticket]
            ticket.deliver([*ticket.held, *(end._replace(reason="cancelled") for end in ends)])
            self._cancel(ticket)
        for rendering in self._renderings:
            rendering.then(Refused(LEAVES, status=503))
        for ticket in (*self._tickets, *self._short, *self._compiling):
            ticket.deliver(Refused(LEAVES, status=503))
            self._done(ticket)
        for each in (self._renderings, self._tickets, self._short, self._compiling):
            each.clear()

    def _forget(self, request: Request) -> None:
        del self._choices[request]
        self._crowded = False

    def _fail(self, error: Exception) -> None:
        tickets = {id(choice.ticket): choice.ticket for choice in self._choices.values()}
        self._choices.clear()
        self._crowded = False
        for ticket in tickets.values():
            ticket.deliver(error)
            self._done(ticket)

    def _done(self, ticket: Ticket) -> None:
        with self._count:
            self._running -= 1


def _result(work: Callable[[], T]) -> T | Exception:
    try:
        return work()
    except Exception as error:
        return error


def status_of(error: BaseException) -> tuple[int, str]:
    """Returns the status of HTTP for an error, and the line for the client."""
    if isinstance(error, Refused):
        return error.status, str(error)
    if isinstance(error, (InputInvalid, SettingInvalid, ChatImpossible, TemplateFailed, TokenizerMissing)):
        return 400, str(error)
    if isinstance(error, BudgetTooSmall):
        return 400, f"this request does not fit into the server's memory: {error}"
    return 500, "the server can't answer: its log says why"
