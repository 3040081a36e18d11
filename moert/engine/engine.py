"""The engine: puts a pack, a budget and the policies together, the only place where the parts meet."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from functools import cached_property, partial
from mmap import PAGESIZE
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

from moert import __version__
from moert.engine import constraint
from moert.engine.archive import Archive, Folder
from moert.engine.budget import (
    EXACT_ROUTING,
    Budget,
    CacheLimit,
    budget_of,
    preference_for,
    preference_note,
    room_within,
    share_text,
)
from moert.engine.constraint import Grammar, Matcher, Matching
from moert.engine.generation import GenerationOptions, GenerationSettings, Logprobs, room
from moert.engine.prefixes import Prefixes
from moert.engine.registry import FILLED, ROUTINGS, Beside, check_apart, fill, matching
from moert.engine.regulator import TYPICAL, Admission, Bounds, Notify, Others, Regulator
from moert.engine.scoring import Pooling, Score, Scorer
from moert.engine.session import Answer, Interrupted, Prefix, Session, Turns
from moert.engine.settings import POLICIES, EngineOptions, EngineSettings
from moert.engine.text import LONG_TEXT, Text, several
from moert.errors import BudgetTooSmall, SettingInvalid, TokenizerMissing, memory_shortage, said
from moert.experts.ahead import Further, Lookahead, Worth
from moert.experts.cache import ExpertCache
from moert.experts.names import Policies
from moert.experts.policy import Demand
from moert.experts.store import DEFAULT_THREADS, ExpertStore, IoSettings
from moert.experts.streaming import Streaming
from moert.kernels import AUTO_KERNELS, open_backend
from moert.kernels.backend import Backend, Keeps
from moert.kernels.library import missing_note
from moert.machine import drop_page_cache, held_bytes, most_bytes, thread_bytes, usable_cores
from moert.models.backbone import load_backbone
from moert.models.ffn import Routers
from moert.models.footprint import Footprint, Load
from moert.models.model import Model, Seams
from moert.pack.codec import F32
from moert.pack.errors import PackError
from moert.pack.files import sha256
from moert.pack.manifest import BACKBONE
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import MANIFEST, Pack
from moert.stats import ExpertCounters, ReadAhead, RequestTimes, RunStats, run_stats, size

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from moert.chat.conversation import Conversation, Message, Reply, Speaker


def bounds_of(settings: EngineSettings, budget: Budget) -> tuple[Bounds, list[str]]:
    """Returns the bounds that the settings mean, and a note if the limit is less than the requested one."""
    asked, notes = settings.limit, list[str]()
    if isinstance(asked, CacheLimit):
        return Bounds(None, asked.resolve(budget.expert_bytes)), notes
    limit = None if asked is None else asked.resolve(held_bytes(), most_bytes())
    if asked is None or limit is None:
        return Bounds(), notes
    name = asked.named(limit)
    if asked.nbytes is not None and limit // PAGESIZE < asked.nbytes // PAGESIZE:  # groups count in pages
        notes.append(f"{said('memory', size(asked.nbytes))} is more than {name}: that is used")
    return Bounds(limit, None, name), notes


def threads_of(threads: int | None) -> tuple[int, str | None]:
    """Returns the number of threads, by default and at most one for each usable core; and a note if that is fewer than
    the requested number."""
    cores = usable_cores()
    asked = cores if threads is None else threads
    count = min(asked, cores)
    note = f"{said('threads', asked)} is more than the {cores} core(s) that this process may use: {count} are used"
    return count, note if count < asked else None


@contextmanager
def aside(turns: Turns, admission: Admission, purpose: str, nbytes: int) -> Iterator[None]:
    """Makes room in memory for work beside the model, which does nothing else meanwhile."""
    with turns.own():
        admission.aside(nbytes, purpose)
        yield


Prompt = str | Sequence[int]
"""Text, or token ids."""
_MOST_COMPILED = 64  # grammars of strangers that are known to be harmless
_PREFIXES_PART = 4  # of the room beyond the least for a usual request, the prefix cache takes a quarter


class Engine:
    """An open pack that runs requests. Close it, or use it in a with block.

    Threads may share it: while one of them has a session, or runs a request, the others wait. A call by the same thread
    from inside a request (in `on_text`, say) raises Busy; a call after `close` raises Closed.
    """

    def __init__(
        self, pack: Pack, backend: Backend, settings: EngineSettings, policies: Policies | None = None,
        beside: Beside | None = None, others: Others | None = None,
    ) -> None:  # fmt: skip
        """`beside`: packages that take part (moert.engine.registry). See `open` for the rest. Raises PathsMissing."""
        own, self._closing = policies or Policies(), ExitStack()
        self.pack, self.spec, self.backend = pack, pack.manifest.model, backend
        self.counters, self.times = ExpertCounters(), RequestTimes()
        self._turns, self._settings = Turns(), settings
        self._prefixes = WeakSet[Prefix | Prefixes]()
        self._compiled: list[Grammar] = []  # of strangers, the latest ones first
        self._session: ref[Session] | None = None  # the latest
        self._notes = list[str]()  # for the first request
        with self._closing as closing:
            closing.callback(backend.close)
            beside = beside or Beside(pack, settings, own, self._notes.append)
            self._hold(settings, own, beside)
            self._bound(settings, others or Others())
            self._drafts = beside.drafts(self.preference is None and self._routing.reroute is None)
            self._fills = beside.fills()
            self._run_experts(own)
            self._load(settings, beside)
            self._closing = closing.pop_all()

    def _hold(self, settings: EngineSettings, own: Policies, beside: Beside) -> None:
        """Opens experts on the disk, and everything that is loaded to run them; then an empty cache."""
        pack, backend = self.pack, self.backend
        whole = ExpertStore(pack, backend, self.counters, settings.reading or IoSettings(True, DEFAULT_THREADS))
        self.holding = beside.holding(whole, backend, self.counters)
        self._closing.callback(self.holding.close)
        others = self.holding.others

        def spare() -> Backend | None:
            return open_backend(settings.kernels, 1) if others is None and usable_cores() > 1 else None

        self._routing = beside.routing(others or backend, spare)
        self._closing.callback(self._routing.close)
        eviction = own.eviction or settings.eviction
        self._streaming = Streaming(pack, self.holding, self.counters, eviction, settings.reading is None)

    def _bound(self, settings: EngineSettings, others: Others) -> None:
        """Divides the memory, while the weights are still to be loaded. Raises BudgetTooSmall."""
        holding, routing, widens = self.holding, self._routing, self.backend.widens
        self.budget = budget_of(self.pack, widens, thread_bytes(self.backend.threads), routing.nbytes)
        needs = holding.needs(self.budget.token_bytes)
        if needs is not None:
            self.budget = self.budget.held_as(*needs)
        preferences = self.pack.manifest.preferences
        footprint = Footprint(
            self.spec, widens, settings.kv, bool(preferences), routing.request_bytes, holding.apart
        )  # fmt: skip
        bounds, notes = bounds_of(settings, self.budget)
        prefixes = self._prefixes
        self._regulator = Regulator(
            footprint, self.budget, self._streaming, bounds,
            lambda: held_bytes() - holding.elsewhere_bytes - others.held_bytes(),
            lambda: sum(each.held_bytes for each in prefixes),
            lambda: any(each.drop() for each in prefixes if isinstance(each, Prefixes)), others.promised_bytes,
        )  # fmt: skip
        self.preference = preference_for(settings.routing, preferences, self._regulator.share, ROUTINGS)
        self._regulator.check_open()
        self._notes += [*notes, *holding.notes]

    def _run_experts(self, own: Policies) -> None:
        """Makes the runner of experts, and the Lookahead that reads for it."""
        routing, streaming = self._routing, self._streaming
        self.holding.open(self.cache)
        self._routers: Routers = {}
        self.ahead = None
        if routing.predictor is not None:
            copies, reads, worth = self.holding.copies, self.holding.reads_ahead, Worth() if own.weighed else None
            further = Further(self._routers, routing.further, copies, reads, worth)
            self.ahead = Lookahead(
                self.spec, self.cached_bytes, self.cache, self.counters, routing.predictor, further
            )  # fmt: skip
        self._admission = Admission(self._regulator, streaming, self.ahead)
        self._aside = partial(aside, self._turns, self._admission)
        self.text = Text(self.pack, partial(self._aside, LONG_TEXT))
        self._admission.notes += self._notes
        if self.preference is not None:
            streaming.prefers()
            self._admission.notes.append(preference_note(self.preference))
        self._admission.notes += routing.notes
        self.runner = self.holding.runner(self.cache, self.ahead, [streaming.recorder.add, *routing.listeners])
        self._closing.callback(self.cache.close)

    def _load(self, settings: EngineSettings, beside: Beside) -> None:
        """Loads all weights but the experts', and makes the model of them. Raises PackError."""
        pack, backend, others, routing = self.pack, self.backend, self.holding.others, self._routing
        weights = load_backbone(pack, backend.stay if others is None and isinstance(backend, Keeps) else None)
        listener = routing.before_passes(self.ahead)
        seams = Seams(self.preference, routing.reroute, listener, self._routers, beside.walk)
        self.model = Model(self.spec, weights, self.runner, beside.arithmetic(others or backend), settings.kv, seams)
        beside.watch(self._routers)
        del weights
        if self._regulator.tight:
            drop_page_cache(pack.file(BACKBONE))

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        settings: EngineSettings | None = None,
        *,
        trace: list[Demand] | None = None,
        notify: Notify | None = None,
        policies: Policies | None = None,
        others: Others | None = None,
        **changes: Unpack[EngineOptions],
    ) -> Engine:
        """Opens a pack and returns its engine. `changes`: settings by name, in place of those in `settings` (or the
        defaults).

        `trace` collects the demands of every layer. `notify` is called with notes and warnings, which otherwise go to
        stderr. `policies`: the program's own, in place of those that the settings name. `others`: engines of this
        process that share its memory limit. Raises PackError,
        SettingInvalid, PathsMissing, HashMissing, PredictorMissing, InstructionSetInvalid, BudgetTooSmall or
        OutOfMemory.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise SettingInvalid("path", f"is {path!r}: it should be the folder of a pack, as text or a path")
        chosen, own, noted = EngineSettings.of(settings, changes), policies or Policies(), list[str]()
        pack = Pack.open(path, room_within(chosen.limit))
        beside = Beside(pack, chosen, own, noted.append)
        with memory_shortage():
            count, cut = threads_of(chosen.threads)
            engine = cls(pack, open_backend(chosen.kernels, count), chosen, own, beside, others)
        if notify is not None:
            engine._admission.notify = notify
        if trace is not None:
            engine.runner.listeners.append(trace.append)
        slow = missing_note() if chosen.kernels == AUTO_KERNELS else None
        engine._admission.notes += [*noted, *(note for note in (slow, cut) if note is not None)]
        if chosen.fill == FILLED:
            engine.fill()
        return engine

    @property
    def cache(self) -> ExpertCache:
        return self._streaming.cache

    @property
    def cached_bytes(self) -> Mapping[ExpertKey, int]:
        """Of each expert, the bytes that the cache keeps."""
        return self.holding.nbytes

    @property
    def eviction(self) -> str:
        """Name of the eviction policy; the requested name until the first expert has to leave."""
        return self._streaming.eviction

    @property
    def memory_limit_bytes(self) -> int | None:
        """The memory limit of the process [bytes]; None without one."""
        return self._regulator.limit_bytes

    def encode(self, prompt: str) -> list[int]:
        """Returns the token ids of a prompt, with the special tokens that the tokenizer adds. Raises TokenizerMissing,
        InputInvalid, PromptTooLong for more bytes than the model can take, or BudgetTooSmall."""
        return self.text.encode(prompt)

    def check(self, prompt: Prompt, max_new_tokens: int, beams: int = 1) -> None:
        """Raises the errors that `generate` would raise for a prompt that can't run in this model or memory, without
        running it."""
        ids = self.text.ids(prompt)
        room(self.spec, ids)
        with self._turns.turn():
            self._regulator.check([Load(len(ids), max_new_tokens, beams=beams)])

    def smallest_memory(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Returns the smallest --memory, in bytes, that a request of this many tokens runs in."""
        return self._regulator.smallest_memory([Load(prompt_tokens, max_new_tokens)])

    def smallest_chat_memory(self, message_tokens: int, max_new_tokens: int) -> int:
        """Returns the smallest --memory, in bytes, that the first message of a conversation, of this many tokens, and
        its reply run in. Raises ChatImpossible or TemplateFailed."""
        prompt_tokens, aside_bytes = self.speaker.first_message(message_tokens)
        return self._regulator.smallest_memory([Load(prompt_tokens, max_new_tokens, marks=True)], aside_bytes)

    def reserve(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """Sizes the expert cache for a request. Raises BudgetTooSmall; warns once if each token must read experts
        again."""
        with self._turns.turn():
            self._admission.before([Load(prompt_tokens, max_new_tokens)])

    def fill(self) -> None:
        """Has experts read into the room for them until the first request begins, those that were used most in the
        pack's trace first, or those of an encoder's first layers. Does nothing with `fill` "none", where the cache is
        for other than whole experts of this processor, or once an expert is in memory. An error in the pack is a note:
        requests meet it again."""
        with self._turns.turn(), suppress(BudgetTooSmall):  # a shorter request may run
            if self._fills and not self.cache.n_resident:
                with suppress(TokenizerMissing):
                    _ = self.text.tokenizer  # takes memory too: what experts take has no room for it any more
                try:
                    self._admission.before([TYPICAL])
                    fill(self.pack, self.cache, self._admission.notify)
                except PackError as error:
                    self._admission.notify(f"no experts are read before the first request: {error}")

    def refit(self, promised_bytes: int) -> None:
        """Fits the engine, between two turns, into the room that is left by `promised_bytes` of other engines. Raises
        BudgetTooSmall where requests that were added could not run to their ends there, and changes nothing then."""
        with self._turns.own():
            self._regulator.refit(promised_bytes, *self._loads())
            spare = self._regulator.spare_bytes
            for each in self._prefixes:
                if isinstance(each, Prefixes) and spare is not None:
                    each.bound(spare // _PREFIXES_PART)

    def reserve_aside(self, nbytes: int, purpose: str) -> None:
        """Makes room for work beside the requests that run, until `release_aside`. Raises BudgetTooSmall."""
        with self._turns.own():
            self._regulator.reserve(nbytes, purpose, self._loads()[0])

    def release_aside(self, nbytes: int) -> None:
        """Gives back the room of `reserve_aside`."""
        with self._turns.own():
            self._regulator.release(nbytes)

    def _loads(self) -> tuple[list[Load], list[Load]]:
        """Returns the loads of the requests that run, and of those that wait."""
        session = None if self._session is None else self._session()
        return ([], []) if session is None else session.loads

    def matcher(self, grammar: Grammar, room: constraint.Room) -> Matcher:
        """Returns the matcher of a stranger's grammar at its beginning, for Session.add; requests go on meanwhile. Of a
        grammar that is new, a process of its own first finds out whether compiling it costs too much. `room`: reserves
        memory. Raises SettingInvalid, TokenizerMissing or BudgetTooSmall."""
        if grammar not in self._compiled:
            check_apart(grammar, room)
            self._compiled = [grammar, *self._compiled[: _MOST_COMPILED - 1]]
        return self._matching(grammar, room)

    def session(self, at_once: int | None = None) -> Session:
        """Opens a session: requests that come and go and run together. Waits until the session of another thread has
        closed. `at_once`: the most tokens of a prompt that one turn reads, so that other requests write meanwhile and a
        prompt can be cancelled, and a few times as many of all prompts; by default all."""
        with ExitStack() as opened:
            opened.enter_context(self._turns.turn())
            session = Session(
                self.model, self.text, self._admission, self.times, opened.pop_all().close, self.holding.now,
                self._matching, at_once, self._drafts,
            )  # fmt: skip
            self._session = ref(session)
            return session

    def generate(
        self, prompt: Prompt, settings: GenerationSettings | None = None, on_text: Callable[[str], None] | None = None,
        **changes: Unpack[GenerationOptions],
    ) -> Answer:  # fmt: skip
        """Runs one prompt and returns its answer (token ids are answered in token ids, without text); `on_text` is
        called with pieces of the text as they are made. `changes`: settings by name.

        Raises PackError, SettingInvalid, BudgetTooSmall, OutOfMemory, TokenizerMissing or InputInvalid, and Interrupted
        on Ctrl-C.
        """
        with self.session() as session:
            request = session.add(prompt, settings, **changes)
            try:
                for _, piece in session:
                    if on_text is not None and piece.text:
                        on_text(piece.text)
            except KeyboardInterrupt:
                raise Interrupted([request.answer]) from None
        return request.answer

    def score(self, text: Prompt, target: Prompt | None = None, context: int | None = None) -> Score:
        """Returns the log-likelihood of a text and of each of its tokens; see moert.engine.scoring.Scorer.score."""
        with self._turns.turn():
            return Scorer(self.model, self.text, self._admission).score(text, target, context)

    def steps(self, text: Prompt, count: int, further: int = 0) -> list[tuple[int, str, Logprobs | None]]:
        """Returns of each token of a text its id, its own text and its log-probability beside those of the `count`
        likeliest; see moert.engine.scoring.Scorer.steps."""
        with self._turns.turn():
            return Scorer(self.model, self.text, self._admission).steps(text, count, further)

    def embed(self, text: Prompt, pooling: Pooling = "mean") -> F32:
        """Returns the embedding of a text, a vector [d_model] of length 1: the direction of the mean of its tokens'
        hidden states behind the last norm (special tokens that the tokenizer adds count), or with "last" of the last
        one. Raises InputInvalid for a model with an encoder, and the errors of `score`."""
        return self.embed_many([text], pooling)[0]

    def embed_many(self, texts: Sequence[Prompt], pooling: Pooling = "mean") -> list[F32]:
        """Returns the embeddings of texts, on the native kernels those of `embed` bit for bit: each expert is read once
        per layer for as many texts as fit into memory together. Raises the errors of `embed`."""
        with self._turns.turn():
            return Scorer(self.model, self.text, self._admission).embeddings(several(texts), pooling)

    def stream(
        self, prompt: Prompt, settings: GenerationSettings | None = None, **changes: Unpack[GenerationOptions]
    ) -> Iterator[str]:
        """Yields the text of `generate` in pieces as they are made. The session behind it closes when the iterator ends
        or is thrown away."""
        with self.session() as session:
            session.add(prompt, settings, **changes)
            for _, piece in session:
                if piece.text:
                    yield piece.text

    def astream(
        self, prompt: Prompt, settings: GenerationSettings | None = None, **changes: Unpack[GenerationOptions]
    ) -> AsyncIterator[str]:
        """Yields the same pieces in asyncio: `async for piece in engine.astream("Once")`. Cancelling the task ends the
        request."""
        from moert.engine.session import text_of

        return text_of(self.session, prompt, GenerationSettings.of(settings, changes))

    def generate_many(
        self, prompts: Sequence[Prompt], settings: GenerationSettings | None = None, *, coming: Sequence[Prompt] = (),
        **changes: Unpack[GenerationOptions],
    ) -> Iterator[Answer]:  # fmt: skip
        """Runs prompts together, so that each expert is read once per layer for all of them; yields the answers in
        order.

        The answers are the same as from `generate`, on the native kernels bit for bit (see Model). Where the prompts do
        not fit into memory together, some wait for others, with a note. `coming`: the prompts of the next call, so that
        a listener before passes may work on them in the meantime. Raises the errors of `generate`; Interrupted has the
        `answers` that were begun and not yielded yet.
        """
        with self.session() as session:
            session.expect(coming)
            asked = [session.add(prompt, settings, **changes) for prompt in several(prompts)]
            while asked:
                try:
                    session.turn()
                except KeyboardInterrupt:
                    raise Interrupted([request.answer for request in asked if request.begun]) from None
                while asked and asked[0].ended:
                    yield asked.pop(0).answer

    def chat(
        self,
        messages: Sequence[Message],
        settings: GenerationSettings | None = None,
        on_text: Callable[[str], None] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        **changes: Unpack[GenerationOptions],
    ) -> Reply:
        """Answers a list of {"role": …, "content": …} by the model's chat template, which may take `tools`, a list of
        JSON schemas, and other `variables`. `on_text` is called with pieces of the answer, without thinking.

        Raises ChatImpossible, TemplateFailed, or an error of `generate`.
        """
        from moert.chat.conversation import Asked

        def hear(part: str, text: str) -> None:
            if on_text is not None and part == "answer":
                on_text(text)

        chosen = GenerationSettings.of(settings, changes)
        return self.speaker.reply(Asked(messages, tools, variables), Prefix(), chosen, hear)

    def conversation(
        self,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Conversation:
        """Returns a conversation that remembers its messages: each turn reads only new tokens. Raises
        ChatImpossible."""
        from moert.chat.conversation import Conversation

        prefix = Prefix()
        with self._turns.turn():
            self._prefixes.add(prefix)
        return Conversation(self.speaker, prefix, system, tools, variables)

    def prefixes(self, folder: Folder | None = None) -> Prefixes:
        """Returns an empty prefix cache that requests of this engine can share, for Continued. Under a memory limit it
        takes a quarter of the room beyond the least for a usual request, and its states go where requests need it;
        without a limit it takes a GiB. States that leave memory go to the `folder`, all others when the engine closes;
        any engine finds them there whose pack and settings give the same states."""
        spare = self._regulator.spare_bytes
        with self._turns.turn():
            archive = None if folder is None else self._archive(folder)
            made = Prefixes(1 << 30 if spare is None else spare // _PREFIXES_PART, archive)
            self._prefixes.add(made)
        if archive is not None:
            self._closing.callback(made.close)
        return made

    def _archive(self, folder: Folder) -> Archive:
        """Returns the archive in a folder, of which this engine sees the states that it would compute itself."""
        model, admission = self.model, self._admission  # and not this engine, which would then hold itself
        facts = [(each.name, getattr(self._settings, each.name)) for each in fields(EngineSettings)]
        share = None if self.preference is None else self.preference.share
        named = [__version__, model.backend.name, share, *(each for each in facts if each[0] not in POLICIES)]
        digest = sha256(repr(named).encode() + self.pack.file(MANIFEST).read_bytes()).hexdigest()
        room = partial(self._aside, "load a conversation that was kept")
        return Archive(
            folder, digest, lambda ids: model.begin([ids])[0][0], room, lambda note: admission.notify(note)
        )  # fmt: skip

    @cached_property
    def _matching(self) -> Matching:
        """A function that makes matchers of grammars for the pack's tokenizer."""
        text = self.text  # and not this engine, which would then hold itself
        return matching(lambda: text.tokenizer, self.spec)

    @cached_property
    def speaker(self) -> Speaker:
        """The engine's side of conversations. Raises ChatImpossible, SettingInvalid, or a PackError for a chat.json
        that can't be used."""
        from moert.chat.conversation import Speaker
        from moert.chat.renderer import Renderer, chat_of

        room = partial(self._aside, "render the model's chat template")
        chat = chat_of(self.pack, self.text, self._settings.template)
        return Speaker(Renderer(chat, room=room), self.text, self.session)

    def stats(self, best: bool = True) -> RunStats:
        """Returns the figures of all requests since the engine was opened. `best`: with the hit rate of Belady's rule,
        for which the recorded demands are replayed."""
        streaming, cache_bytes = self._streaming, self._streaming.capacity_bytes
        preferring = EXACT_ROUTING if self.preference is None else share_text(self.preference.share)
        belady_demands, belady_hit_rate = streaming.headroom() if best else (0, 0.0)
        return run_stats(
            self.times, self.counters, ReadAhead() if self.ahead is None else self.ahead.figures,
            memory_bytes=self._regulator.limit_bytes, cache_bytes=cache_bytes,
            smallest_cache_bytes=min(self._admission.smallest_room_bytes, cache_bytes),
            expert_bytes=self.budget.expert_bytes, eviction=streaming.eviction, io=self.holding.io,
            routing=self._routing.name or preferring, belady_demands=belady_demands, belady_hit_rate=belady_hit_rate,
            drafts=None if self._drafts is None else self._drafts.figures, **self.holding.figures(),
        )  # fmt: skip

    def close(self) -> None:
        """Closes the engine: waits for a session of another thread; a session of this thread ends here."""
        with self._turns.last() as first:
            if not first:
                return
            if self._session is not None and (session := self._session()) is not None:
                session.close()
            self._closing.close()

    def now(self) -> float:
        """The time that this engine's figures are of."""
        return self.holding.now()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
