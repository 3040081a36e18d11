"""Sessions: requests that come and go and run together, with their answers and kept prefixes."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from moert.engine.constraint import Constrained, Grammar, Matcher, Matching, Opening, no_matching
from moert.engine.generation import (
    ENTRY_BYTES,
    Generation,
    GenerationOptions,
    GenerationResult,
    GenerationSettings,
    Logprobs,
    Piece,
    StopReason,
    TextSource,
    Writing,
    writing,
)
from moert.engine.text import LONG_TEXT, Text, given_ids
from moert.errors import BudgetTooSmall, Busy, Closed, SettingInvalid, memory_shortage
from moert.models.footprint import WHOLE, Load, Loads
from moert.models.kv import BLOCK_TOKENS, State, forked, written_bytes
from moert.models.model import Model
from moert.pack.codec import F32
from moert.stats import RequestTimes

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PARTS = 4
"""Parts of prompts that a turn reads at most: experts that are read from the drive for one serve all of them."""
_PATIENT_S, _PATIENT = 0.001, 16
"""Seconds that a turn waits for grammars beside other requests: this many, or this part of the turn."""
_LOOK_S = 0.01
"""The same where no other request runs, before new ones may come."""


def parts(prompts: Sequence[tuple[int, int]], part: int = WHOLE, most: int = WHOLE) -> list[int]:
    """Returns how many tokens a turn reads of each prompt, of which `prompts` has the deadline and the tokens that are
    left: at most `part` of each and `most` in all, those with the earliest deadlines first."""
    counts = [0] * len(prompts)
    for at in sorted(range(len(prompts)), key=lambda at: prompts[at][0]):
        counts[at] = min(part, most, prompts[at][1])
        most -= counts[at]
    return counts


@dataclass(frozen=True)
class Answer:
    """The answer of a request. Times count from the moment when the request was added, before room was made for it.
    `kept_tokens` of its prompt had been read before, by other requests of the same conversation. `others`: with beam
    search, the further answers that were requested, the best first."""

    result: GenerationResult
    prompt_tokens: int
    time_to_first_token_s: float
    total_s: float
    kept_tokens: int = 0
    others: tuple[GenerationResult, ...] = ()

    @property
    def text(self) -> str:
        return self.result.text

    @property
    def tokens(self) -> list[int]:
        """Ids of the tokens that were written, with the end token if one came."""
        return self.result.tokens

    @property
    def stop_reason(self) -> StopReason:
        """Why the answer ends: "eos", "stop_string", "max_new_tokens", "context_full", "cancelled" or "interrupted"; or
        "grammar" where no token goes on as the grammar demands."""
        return self.result.stop_reason

    @property
    def logprobs(self) -> list[Logprobs] | None:
        """Log-probabilities at each token, where they were requested."""
        return self.result.logprobs

    @property
    def finished(self) -> bool:
        """False where Ctrl-C cut the answer short."""
        return self.stop_reason != "interrupted"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while requests ran; `answers` are the answers so far of the requests that had begun, in order."""

    def __init__(self, answers: list[Answer]) -> None:
        super().__init__()
        self.answers = answers


class Prefix:
    """Token ids, and the state of a decoder that has read them. A request takes the state when it is added, and gives
    it back, longer, when it has ended."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._state: State | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of memory for the state, while no request has it."""
        return 0 if self._state is None else written_bytes([self._state])

    def take(self, prompt_ids: Sequence[int], expected: int) -> tuple[State | None, int]:
        """Returns the state after the longest beginning of the prompt that it can go back to, and the length of that
        beginning: at least one token is left to be read. None and 0 where the state has no such beginning. The state is
        to hold `expected` tokens in the end."""
        state, self._state = self._state, None
        if state is None:
            return None, 0
        length = state.reach(min(common_beginning(self.ids, prompt_ids), len(prompt_ids) - 1))
        if not length or not state.cut(length, expected):
            return None, 0
        state.exact_until(len(prompt_ids))
        return state, length

    def mark(self, state: State, ids: Sequence[int]) -> None:
        """Marks a state that has just read a whole prompt: the next prompt need not begin with its answer."""
        state.mark()

    def give(self, state: State | None, ids: Sequence[int]) -> None:
        """Takes a state back that has read these ids, and perhaps tokens that an interruption left half read."""
        self.ids, self._state = [], None
        length = 0 if state is None else state.reach(len(ids))
        if state is not None and length and state.cut(length):
            self.ids, self._state = list(ids[:length]), state

    def clear(self) -> None:
        self.give(None, ())


class Keeps(Protocol):
    """Keeps the states of decoders that have read tokens: a Prefix, or many of them (see moert.engine.prefixes)."""

    def take(self, prompt_ids: Sequence[int], expected: int) -> tuple[State | None, int]: ...

    def mark(self, state: State, ids: Sequence[int]) -> None: ...

    def give(self, state: State | None, ids: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class Continued:
    """A prompt in token ids that is answered in text, and goes on from the tokens that `prefix` has read. `ends`:
    tokens that end the answer as the model's own do. `opening`: the beginning of the answer that no grammar binds."""

    ids: Sequence[int]
    text: TextSource
    prefix: Keeps
    ends: frozenset[int] = frozenset()
    opening: Opening | None = None


class Draft(Protocol):
    """Drafts the tokens of one answer; see moert.beside.drafts."""

    def next(self, written: Sequence[int], limit: int) -> list[int]: ...

    def passed(self, drafted: int, accepted: int, seconds: float) -> None: ...


class Drafts(Protocol):
    """Makes drafts of at most `most` tokens for requests that run alone."""

    most: int

    def begin(self, prompt_ids: Sequence[int]) -> Draft: ...


def common_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the length of the common beginning of both."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(place for place in range(length) if one[place] != other[place])


Prompt = str | Sequence[int] | Continued


class Gate(Protocol):
    """Makes room for requests; see moert.engine.regulator."""

    def check(self, loads: Loads, beside: Loads = ()) -> None: ...

    def aside(self, nbytes: int, purpose: str) -> None: ...

    def together(self, running: Loads, waiting: Loads) -> int: ...

    def before(self, loads: Loads) -> None: ...

    def passed(self) -> None: ...

    def after(self, loads: Iterable[Load]) -> None: ...

    def idle(self) -> None: ...


class Request:
    """A prompt in a session; its `answer` can be read at any time."""

    def __init__(
        self, prompt: Prompt, generation: Writing, prefix: Keeps | None = None,
        now: Callable[[], float] = time.perf_counter, part: int = WHOLE,
    ) -> None:  # fmt: skip
        """`part`: tokens of the prompt that a turn reads at most."""
        self.prompt = prompt
        self._now, self._part, self._deadline = now, part, 0
        self._generation, self._prefix = generation, prefix
        self._states: list[State] = []  # of its sequences; none: waits without a prefix, or has ended
        self._unread: list[Sequence[int]] = []  # by each of them
        self._drafts: Draft | None = None
        self._scored = 0  # tokens of a pass with a draft
        self._kept_tokens = self._read_tokens = 0
        self._added_s = now()
        self._first_s = self._total_s = 0.0

    @property
    def answer(self) -> Answer:
        """The answer as far as it has come."""
        generation = self._generation
        total_s = self._total_s or self._so_far_s
        best, *others = generation.results
        read = len(generation.prompt_ids)
        return Answer(best, read, self._first_s, total_s, self._kept_tokens, tuple(others))

    @property
    def begun(self) -> bool:
        return self._generation.written > 0

    @property
    def ended(self) -> bool:
        return self._generation.ended

    @property
    def _so_far_s(self) -> float:
        return self._now() - self._added_s

    def _load(self) -> Load:
        """Returns the load of the request, without the memory that it holds."""
        generation = self._generation
        prompt, most, beams = len(generation.prompt_ids), generation.settings.max_new_tokens, generation.settings.beams
        marks, logprobs = self._prefix is not None, generation.settings.logprobs
        noted_bytes = 0 if logprobs is None else ENTRY_BYTES * (1 + logprobs)
        return Load(
            prompt, most, generation.written, kept_tokens=self._kept_tokens, marks=marks, beams=beams,
            noted_bytes=noted_bytes, scored=self._scored, part=self._part,
        )  # fmt: skip

    @property
    def _held(self) -> Load:
        """The same load, with the memory that the request holds now."""
        return replace(self._load(), held_bytes=written_bytes(self._states))

    def _take_prefix(self) -> None:
        """Takes the state of the prefix, which belongs to this request from here on."""
        if self._prefix is not None:
            ids, room = self._generation.prompt_ids, self._generation.room
            most = self._generation.settings.max_new_tokens
            expected = len(ids) + (most if room is None else min(most, room))
            state, self._kept_tokens = self._prefix.take(ids, expected)
            if state is not None:
                self._states, self._unread = [state], [ids[self._kept_tokens :]]
            self._read_tokens = self._kept_tokens

    def _mark(self, prefix: Keeps) -> None:
        """Marks the state where its prompt has just been read."""
        if not self.begun:
            prefix.mark(self._states[0], self._generation.prompt_ids)

    def _draft_by(self, drafts: Drafts) -> None:
        """Has its answer drafted, unless it has beams."""
        if isinstance(self._generation, Generation):
            self._drafts, self._scored = drafts.begin(self._generation.prompt_ids), 1 + drafts.most

    def _draft(self, drafts: Draft) -> list[int]:
        """Returns the draft that it reads in its next pass. Room is made at the ends of blocks, so none goes beyond."""
        generation = self._generation
        limit = min(generation.left, BLOCK_TOKENS - self._states[0].length % BLOCK_TOKENS) - 1
        return drafts.next(generation.tokens, limit)

    def _take_drafted(self, logits: F32, draft: Sequence[int]) -> Piece:
        """Takes tokens from logits [1 + draft, vocab] for as long as they are those of the draft, and forgets the rest
        of it."""
        text, right = "", 0
        while True:
            self._generation.draw(logits[right : right + 1])
            piece = self._generation.piece()
            assert piece is not None
            text += piece.text
            if self.ended or right == len(draft) or piece.token != draft[right]:
                break
            right += 1
        state = self._states[0]
        if right < len(draft):
            state.cut(state.length - len(draft) + right)
        self._unread = [[*self._unread[0], *draft[:right]]]
        return Piece(piece.token, text)

    def _go_on(self) -> None:
        """Goes on to the tokens that it reads next."""
        self._read_tokens += len(self._unread[0])
        if self._generation.ended:
            return
        parents, self._unread = self._generation.follow
        if len(parents) > 1 or len(self._states) > 1:
            self._states = forked(self._states, parents)

    def _give_prefix(self) -> None:
        """Gives the state back to the prefix, with all tokens that were read."""
        states, self._states = self._states, []
        if self._prefix is not None:
            ids = [*self._generation.prompt_ids, *self._generation.tokens]
            self._prefix.give(states[0] if states else None, ids[: self._read_tokens])


class Session:
    """Requests that run together: `add` some at any time, take a `turn` for one more token of each, `cancel` one,
    `fork` one.

    The answer to a request depends on nothing but the request, on the native kernels bit for bit. Requests that do not
    fit into memory beside the others wait until some have ended. Where prompts are read in parts, the one with the
    earliest deadline begins first and is read first: its length in tokens, counted from the tokens that the session had
    read when it was added. So a short prompt passes a long one, but only until as many tokens were read as the long one
    has. Each method may be called from any thread; it waits while another runs. Close a session, or use it in a with
    block: until then nothing else can use the engine. Iterate over it to take turns until all requests have ended.
    """

    def __init__(
        self, model: Model, text: Text, gate: Gate, times: RequestTimes, ended: Callable[[], object],
        now: Callable[[], float] = time.perf_counter, matching: Matching = no_matching, at_once: int | None = None,
        drafts: Drafts | None = None,
    ) -> None:  # fmt: skip
        """`times` gets the figures of each request that has begun, in seconds of the clock `now`; `ended` is called
        once when the session closes. `matching` makes matchers of grammars; `at_once`: see Engine.session."""
        self._model, self._text, self._gate, self._times, self._ended = model, text, gate, times, ended
        self._now, self._matching, self._drafts = now, matching, drafts
        self._part = at_once if at_once is not None and model.spec.continues else WHOLE
        self._read_tokens = 0
        self._lock = threading.Lock()
        self._running: list[Request] = []
        self._waiting: list[Request] = []
        self._coming: list[Sequence[int]] = []
        self._closed = False

    @property
    def unfinished(self) -> int:
        """Number of requests that run or wait."""
        return len(self._running) + len(self._waiting)

    def add(
        self, prompt: Prompt, settings: GenerationSettings | None = None, matcher: Matcher | None = None,
        **changes: Unpack[GenerationOptions],
    ) -> Request:  # fmt: skip
        """Adds a request. `prompt`: text; or token ids, whose answer has token ids and no text; or a Continued, which
        goes on from a prefix (only with models whose state of the tokens read so far stays valid when more come).
        `matcher`: of the grammar that the settings name, at its beginning, if there is one already. `changes`: settings
        by name.

        Raises SettingInvalid, InputInvalid, TokenizerMissing, a PackError for a damaged tokenizer, or BudgetTooSmall
        for a request that could not run alone.
        """
        resolved = self._resolved(GenerationSettings.of(settings, changes))
        prefix = prompt.prefix if isinstance(prompt, Continued) and self._model.spec.continues else None
        constrained = self._constrained(prompt, resolved.constraint, matcher)
        with self._open():
            generation = self._generation(prompt, resolved, constrained)
            request = Request(prompt, generation, prefix, self._now, self._part)
            if self._drafts is not None:
                request._draft_by(self._drafts)
            request._take_prefix()
            try:
                self._gate.check([request._held], self._loads)
            except BudgetTooSmall:
                request._give_prefix()
                raise
            if self._part != WHOLE:
                unread = len(generation.prompt_ids) - request._kept_tokens
                request._deadline = self._read_tokens + unread
            self._wait(request)
        return request

    def place(self, request: Request) -> int:
        """Returns the place of a request among those that wait for memory, from 1 on; 0 for one that does not wait."""
        with self._lock:
            return self._waiting.index(request) + 1 if request in self._waiting else 0

    @property
    def loads(self) -> tuple[list[Load], list[Load]]:
        """The loads of the requests that run, and of those that wait."""
        return self._loads, [each._held for each in self._waiting]

    def expect(self, prompts: Sequence[Prompt]) -> None:
        """These prompts come when the session is over: a listener before passes may work on them meanwhile; without one
        nothing happens. Raises InputInvalid, TokenizerMissing, or a PackError for a damaged tokenizer."""
        with self._open():
            if self._model.foresight is None:
                return
            self._coming = [self._generation(prompt, GenerationSettings()).prompt_ids for prompt in prompts]

    def turn(self) -> list[tuple[Request, Piece]]:
        """Begins the waiting requests that fit, and returns the next token of every running one (with a draft perhaps
        several as one piece), in the order in which they began, but for those that read a part of a long prompt in this
        turn, or whose grammar is still looking for the tokens that may come next. When all have ended, the list is
        empty and `unfinished` 0.

        Raises PackError, NotFinite or OutOfMemory, after which no request of the session goes on, as after Ctrl-C.
        """
        with self._open(stops=True):
            return self._turn()

    def begin(self) -> bool:
        """Begins the waiting requests that fit, as `turn` does before all else; returns whether any request runs.
        Raises the errors of `turn`."""
        with self._open(stops=True):
            if self._waiting:
                self._begin()
            return bool(self._running)

    def cancel(self, request: Request) -> None:
        """Ends a request now, with the stop reason "cancelled". Nothing happens to one that has ended."""
        with self._open():
            if not request.ended:
                request._generation.cancel()
                self._settle(request)
                self._running = [each for each in self._running if each is not request]
                self._waiting = [each for each in self._waiting if each is not request]

    def fork(self, request: Request, **changes: Unpack[GenerationOptions]) -> Request:
        """Returns another request that goes on from here by itself. `changes`: settings by name; with another seed its
        draws begin anew, otherwise they go on as those of the first one will.

        Raises SettingInvalid for a request that has ended or has beams, and BudgetTooSmall without room beside the
        others.
        """
        settings = self._resolved(request._generation.settings.but(**changes))
        with self._open():
            if request.ended:
                raise SettingInvalid("request", "has ended: fork a request that still writes")
            twin = Request(request.prompt, request._generation.fork(settings), now=self._now, part=self._part)
            twin._deadline = request._deadline
            if self._drafts is not None:
                twin._draft_by(self._drafts)
            if not request._states:
                self._wait(twin)
                return twin
            self._gate.before([*self._loads, twin._load()])
            with memory_shortage():
                twin._states = [state.copy() for state in request._states]
                twin._unread = list(request._unread)
            twin._kept_tokens, twin._read_tokens = request._kept_tokens, request._read_tokens
            twin._added_s, twin._first_s = request._added_s, request._first_s
            self._running.append(twin)
        return twin

    def close(self) -> None:
        """Cancels the requests that have not ended."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for request in (*self._running, *self._waiting):
                request._generation.cancel()
            self._stop()
            self._ended()

    def __iter__(self) -> Iterator[tuple[Request, Piece]]:
        while self._closed or self.unfinished:
            yield from self.turn()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside the lock --------------------------------------------------------------------------------------------------

    def _turn(self) -> list[tuple[Request, Piece]]:
        going = len(self._running)
        if self._waiting:
            self._begin()
        if not self._running:
            return []
        started_s, running = self._now(), [each for each in self._running if each._generation.drawn is None]
        first, read = self._running[0], self._running[0]._read_tokens
        alone = len(self._running) == 1 and bool(running)
        drafts = first._drafts if alone and first._drafts is not None and first.begun else None
        draft = [] if drafts is None else first._draft(drafts)
        if self._part == WHOLE:
            counts = {each: len(each._unread[0]) for each in running}
        else:
            counts = self._parts(running)
        reading, running = len(counts) < len(running), [*counts]
        logits = self._read(counts, draft) if counts else np.empty((0, 0), np.float32)
        self._gate.passed()
        if self._waiting or self._coming:
            self._model.expects(chain((each._generation.prompt_ids for each in self._waiting), self._coming))
        drafted: Piece | None = None
        pieces, row, some_ended = list[tuple[Request, Piece]](), 0, False
        for request in running:
            start, row = row, row + len(request._states)
            if (count := counts[request]) < len(request._unread[0]):  # goes on to the next part of its prompt
                request._read_tokens += count
                request._unread = [ids[count:] for ids in request._unread]
                reading = True
                continue
            if request._prefix is not None:
                request._mark(request._prefix)
            if draft:
                drafted = request._take_drafted(logits, draft)
            else:
                request._generation.draw(logits[start:row])
        patient_s = max(_PATIENT_S, (self._now() - started_s) / _PATIENT) if running else _LOOK_S
        until_s = self._now() + patient_s
        for request in self._running:
            piece = drafted or request._generation.piece(max(0.0, until_s - self._now()))
            if piece is None:  # it reads a prompt, or its grammar still looks for the tokens that come next
                continue
            pieces.append((request, piece))
            request._go_on()
            request._first_s = request._first_s or request._so_far_s
            if request._generation.ended:
                self._settle(request)
                some_ended = True
        self._read_tokens += sum(counts.values())
        if some_ended:
            self._running = [each for each in self._running if not each.ended]
        if not reading:  # the room that the rest of a prompt needs was made before its first part
            self._gate.after(map(Request._load, self._running))
        if going:
            self._times.decode_s += self._now() - started_s
        if drafts is not None:
            drafts.passed(len(draft), first._read_tokens - read - 1, self._now() - started_s)
        if not self._running and not self._waiting:
            self._gate.idle()
        return pieces

    def _parts(self, running: Sequence[Request]) -> dict[Request, int]:
        """Returns how many tokens this turn reads of each sequence of a request, in their order: the last one of those
        that write, and parts of prompts; requests whose prompts have to wait are left out."""
        prompts = [each for each in running if not each.begun]
        left = [(each._deadline, len(each._unread[0])) for each in prompts]
        found = dict(zip(prompts, parts(left, self._part, _PARTS * self._part), strict=True))
        counts = {each: found.get(each, len(each._unread[0])) for each in running}
        return {each: count for each, count in counts.items() if count}

    def _read(self, counts: Mapping[Request, int], draft: Sequence[int]) -> F32:
        """Returns the logits [sequences, vocab] behind the tokens that are read, with a draft of the only request [1 +
        draft, vocab]. Keeps no reference to the states: some end before the turn does."""
        states = [state for each in counts for state in each._states]
        if draft:
            return self._model.read_each(states[0], [*(token for each in counts for token in each._unread[0]), *draft])
        return self._model.read(states, [ids[:count] for each, count in counts.items() for ids in each._unread])

    def _wait(self, request: Request) -> None:
        self._waiting.append(request)
        self._waiting.sort(key=lambda each: each._deadline)

    def _begin(self) -> None:
        """Begins the waiting requests that fit, beside the running ones."""
        waiting = [each._held for each in self._waiting]
        count = self._gate.together(self._loads, waiting)
        if not count:
            return
        new, self._waiting = self._waiting[:count], self._waiting[count:]
        try:
            self._gate.before([*self._loads, *waiting[:count]])
            fresh = [each for each in new if not each._states]
            begun = self._model.begin([each._generation.prompt_ids for each in fresh])
        finally:
            self._running = [*self._running, *new]
        for request, (state, unread) in zip(fresh, begun, strict=True):
            request._states, request._unread = [state], [unread]

    def _settle(self, request: Request) -> None:
        """Frees the state of a request, or gives it back, and counts the tokens that were read and written."""
        request._give_prefix()
        request._total_s = request._so_far_s
        if request.begun:
            generation = request._generation
            read = len(generation.prompt_ids) - request._kept_tokens
            self._times.add(read, generation.written, request._first_s)

    def _stop(self) -> None:
        for request in (*self._running, *self._waiting):
            request._generation.ended = True
            self._settle(request)
        self._running, self._waiting = [], []
        self._gate.idle()

    @property
    def _loads(self) -> list[Load]:
        return [each._held for each in self._running]

    def _resolved(self, settings: GenerationSettings) -> GenerationSettings:
        """Returns the settings with the first token as an id."""
        first = settings.first_token
        return settings.but(first_token=self._text.token(first)) if isinstance(first, str) else settings

    def _constrained(
        self, prompt: Prompt, grammar: Grammar | None, matcher: Matcher | None
    ) -> Constrained | None:  # fmt: skip
        """Returns the constraint of an answer, at its beginning. Takes the lock for a moment at most: other requests go
        on while llguidance works. Raises SettingInvalid."""
        if grammar is None:
            return None
        matcher = matcher or self._matching(grammar, self._aside_alone)
        ends = frozenset(self._model.spec.tokens.eos)
        if not isinstance(prompt, Continued):
            return Constrained(matcher, ends)
        return Constrained(matcher, ends | prompt.ends, prompt.opening)

    def _generation(
        self, prompt: Prompt, settings: GenerationSettings, constrained: Constrained | None = None
    ) -> Writing:  # fmt: skip
        if isinstance(prompt, Continued):
            if settings.beams > 1:
                raise SettingInvalid("beams", "do not go with a conversation, which goes on from one answer")
            return Generation(self._model.spec, list(prompt.ids), settings, prompt.text, prompt.ends, constrained)
        if isinstance(prompt, str):
            ids, detokenizer = self._text.encode(prompt, aside=self._aside), self._text.detokenizer()
            return writing(self._model.spec, ids, settings, detokenizer, constrained)
        return writing(self._model.spec, given_ids(prompt), settings, None, constrained)

    @contextmanager
    def _aside(self, nbytes: int) -> Iterator[None]:
        """Makes room for turning a text into tokens."""
        self._gate.aside(nbytes, LONG_TEXT)
        yield

    @contextmanager
    def _aside_alone(self, nbytes: int, purpose: str) -> Iterator[None]:
        """Makes room for work beside the model, which does nothing else meanwhile."""
        with self._open():
            self._gate.aside(nbytes, purpose)
            yield

    @contextmanager
    def _open(self, stops: bool = False) -> Iterator[None]:
        """Takes the lock. `stops`: no request goes on where the work fails. Raises OutOfMemory then where the system
        refuses memory."""
        with self._lock:
            if self._closed:
                raise Closed("the session is closed: open another with engine.session()")
            try:
                yield
            except BaseException:
                if not stops:
                    raise
                with memory_shortage():
                    self._stop()
                    raise


async def text_of(session: Callable[[], Session], prompt: Prompt, settings: GenerationSettings) -> AsyncIterator[str]:
    """Yields text in pieces as they are made, by a thread of its own. Where a task is cancelled or goes away, the
    session closes after the token that is under way; a session that still waits for its turn runs nothing.

    Raises the errors of Session.add and Session.turn.
    """
    import asyncio  # 7 MB and 50 ms that no other run needs
    from concurrent.futures import ThreadPoolExecutor

    loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "moert")
    opened: list[Session] = []

    def begin() -> None:
        opened.append(session())
        opened[0].add(prompt, settings)

    def end() -> None:
        for each in opened:
            each.close()

    try:
        await loop.run_in_executor(thread, begin)
        while opened[0].unfinished:
            pieces = await loop.run_in_executor(thread, opened[0].turn)
            if text := "".join(piece.text for _, piece in pieces):
                yield text
    finally:
        ending = thread.submit(end)
        thread.shutdown(wait=False)
        if opened:
            await asyncio.shield(asyncio.wrap_future(ending))


class Turns:
    """The turns of threads that share an engine: only one thread has a turn at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread whose turn it is
        self._over = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for the turn of this thread. Raises Busy inside a turn of the same thread, which would wait for itself,
        and Closed after the last turn."""
        if self._is_mine():
            raise Busy("a request runs in this thread: ask for the next one when it has ended")
        with self._lock:
            if self._over:
                raise Closed("the engine is closed: open the pack again with moert.load")
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    @contextmanager
    def last(self) -> Iterator[bool]:
        """Takes the turn after which none comes; yields False where it was taken before. A turn of this thread that a
        signal broke off, before anything could end it, is over."""
        with nullcontext() if self._is_mine() else self._lock:
            first, self._over = not self._over, True
            yield first

    @contextmanager
    def own(self) -> Iterator[None]:
        """Keeps the turn that this thread has, or waits for its next."""
        with nullcontext() if self._is_mine() else self.turn():
            yield

    def _is_mine(self) -> bool:
        return self._owner == threading.get_ident()
