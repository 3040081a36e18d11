"""The engine: puts a pack, a budget and the policies together, the only place where the parts meet."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from mmap import PAGESIZE
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

from moert.beside.flash.runner import PREDICTED, Firing, check_neurons, fidelity, predictor_of
from moert.beside.gpu.device import Device
from moert.beside.gpu.opening import AUTO_DEVICE, open_device
from moert.beside.sida.foresight import Foreseeing
from moert.engine.budget import (
    EXACT_ROUTING,
    HASH_ROUTING,
    Budget,
    CacheLimit,
    budget_of,
    preference_for,
    preference_note,
    room_within,
    share_text,
)
from moert.engine.choosing import GenerationOptions, GenerationSettings
from moert.engine.generation import room
from moert.engine.regulator import Admission, Cache, Notify, Regulator
from moert.engine.scoring import Score, Scorer
from moert.engine.session import Answer, Interrupted, Prefix, Session, Turns
from moert.engine.settings import EngineOptions, EngineSettings
from moert.engine.text import LONG_TEXT, Text, several
from moert.errors import SettingInvalid, memory_shortage, said
from moert.experts.ahead import Lookahead, Worth
from moert.experts.cache import ExpertCache
from moert.experts.names import TAKE_HASH, Policies, hash_for, predictor_for
from moert.experts.policy import Demand
from moert.experts.streaming import Streaming
from moert.kernels import AUTO_KERNELS, open_backend
from moert.kernels.backend import Backend, Keeps
from moert.kernels.library import missing_note
from moert.machine import drop_page_cache, held_bytes, most_bytes, return_freed, thread_bytes, usable_cores
from moert.models.backbone import load_backbone
from moert.models.footprint import Footprint, Load
from moert.models.model import Model
from moert.pack.manifest import BACKBONE
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack
from moert.stats import ExpertCounters, ReadAhead, RequestTimes, Room, RunStats, Ways, run_stats, size

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from moert.chat.conversation import Conversation, Message, Reply, Speaker


def regulator_for(
    footprint: Footprint, budget: Budget, cache: Cache, settings: EngineSettings, device: Device | None
) -> tuple[Regulator, list[str]]:
    """Returns the regulator of an engine, and a note if its limit is less than the requested one. Memory of a simulated
    device does not count as this process's."""

    def held() -> int:
        return held_bytes() - (device.used_bytes if device is not None and device.simulated else 0)

    asked, notes = settings.limit, list[str]()
    limit = room_bytes = None
    name = ""
    if isinstance(asked, CacheLimit):
        room_bytes = asked.resolve(budget.expert_bytes)
    elif asked is not None and (limit := asked.resolve(held_bytes(), most_bytes())) is not None:
        name = asked.named(limit)
        if asked.nbytes is not None and limit // PAGESIZE < asked.nbytes // PAGESIZE:  # groups count in pages
            notes.append(f"{said('memory', size(asked.nbytes))} is more than {name}: that is used")
    return Regulator(footprint, budget, cache, limit, room_bytes, held, name), notes


def device_for(pack: Pack, settings: EngineSettings, backend: Backend) -> tuple[Device | None, list[str]]:
    """Returns the second device, open, if the settings name one; and a note if `auto` finds none. Raises DeviceMissing,
    or SettingInvalid where the device is of no use for this pack."""
    device = open_device(settings.device, settings.gpu_bytes, backend)
    if device is not None and pack.has_neurons:
        device.close()
        if settings.device == AUTO_DEVICE:
            asked = said("device", AUTO_DEVICE)
            return None, [
                f"{asked} runs whole experts, and this pack's lie in blocks of neurons: the processor runs all"
            ]
        problem = "runs whole experts, and this pack's lie in blocks of neurons: leave it out"
        raise SettingInvalid("device", f"{settings.device!r} {problem}")
    if device is None:
        note = f"{said('device', AUTO_DEVICE)} found no GPU that torch can use: the processor runs all"
        return None, [note] if settings.device == AUTO_DEVICE else []
    return device, []


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


class Engine:
    """An open pack that runs requests. Close it, or use it in a with block.

    Threads may share it: while one of them has a session, or runs a request, the others wait. A call by the same thread
    from inside a request (in `on_text`, say) raises Busy; a call after `close` raises Closed.
    """

    def __init__(
        self, pack: Pack, backend: Backend, settings: EngineSettings, policies: Policies | None = None,
        foreseeing: Foreseeing | None = None, device: Device | None = None,
    ) -> None:  # fmt: skip
        """`foreseeing`: the pack's hash function at work, for the settings that use it. `device`: a second one, open.
        See `open` for the rest. Raises PathsMissing."""
        own = policies or Policies()
        looking = settings.predict in TAKE_HASH and own.predictor is None
        foresight = foreseeing.foresight if foreseeing is not None and looking else None
        predictor = own.predictor or predictor_for(pack, settings.predict, foresight)
        self.pack = pack
        self.spec = pack.manifest.model
        self.backend = backend
        self._foreseeing, self._neurons, self.device = foreseeing, settings.neurons, device
        beside = 0 if foreseeing is None else foreseeing.nbytes
        self.budget = budget_of(pack, backend.widens, thread_bytes(backend.threads), beside)
        named = predictor_of(pack, settings.neurons)
        warned = [] if named is None else [fidelity(named)]
        self.counters, self.times = ExpertCounters(), RequestTimes()
        self._turns = Turns()
        self._streaming = Streaming(
            pack, backend, self.counters, own.eviction or settings.eviction, settings.reading, settings.keep_neurons,
            named, device, settings.on_device,
        )  # fmt: skip
        if isinstance(firing := self._streaming.firing, Firing):
            self.budget = self.budget.with_rows_of_experts(firing.token_bytes, firing.all_bytes)
        elif firing is not None:
            self.budget = self.budget.with_part_of_experts(firing.token_part, firing.all_bytes)
        if named is not None:
            del named  # the kernels have copies
            return_freed()
        foresees = None if foreseeing is None else foreseeing.request_bytes
        footprint = Footprint(
            self.spec, backend.widens, settings.kv, bool(pack.manifest.preferences), foresees, device is not None
        )
        self._regulator, notes = regulator_for(footprint, self.budget, self._streaming, settings, device)
        self.preference = preference_for(settings.routing, pack.manifest.preferences, self._regulator.share)
        prefixes = self._prefixes = WeakSet[Prefix]()
        self._session: ref[Session] | None = None  # the latest
        self._template = settings.template
        self._regulator.kept_bytes = lambda: sum(each.held_bytes for each in prefixes)
        self._regulator.check_open()
        self.ahead = None
        if predictor is not None:
            price = Worth() if own.weighed else None
            self.ahead = Lookahead(
                self.spec, self._streaming.nbytes, self.cache, self.counters, predictor, price, foresight
            )
        self._admission = Admission(self._regulator, self._streaming, self.ahead)
        self._aside = partial(aside, self._turns, self._admission)
        self.text = Text(pack, partial(self._aside, LONG_TEXT))
        self._admission.notes += [*notes, *warned]
        if self.preference is not None:
            self._streaming.prefers()
            self._admission.notes.append(preference_note(self.preference))
        self.runner = self._streaming.runner(self.ahead, [self._streaming.recorder.add])
        others = None if device is None else device.backend(backend)
        weights = load_backbone(pack, backend.stay if others is None and isinstance(backend, Keeps) else None)
        self.model = Model(self.spec, weights, self.runner, others or backend, settings.kv, self.preference)
        del weights
        if foreseeing is not None:
            if predictor is None or foresight is None:
                foreseeing.foresight.needed = lambda: False
            self.model.foresee(foreseeing.foresight, foreseeing.routes_to)
            self.runner.listeners.append(lambda demand: foreseeing.foresight.passed(demand.at, demand.experts))
            self._admission.notes += foreseeing.notes()
        if self._regulator.tight:
            drop_page_cache(pack.file(BACKBONE))
        if self.ahead is not None:
            self.ahead.routers = self.model.routers

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        settings: EngineSettings | None = None,
        *,
        trace: list[Demand] | None = None,
        notify: Notify | None = None,
        policies: Policies | None = None,
        **changes: Unpack[EngineOptions],
    ) -> Engine:
        """Opens a pack and returns its engine. `changes`: settings by name, in place of those in `settings` (or the
        defaults).

        `trace` collects the demands of every layer. `notify` is called with notes and warnings, which otherwise go to
        stderr. `policies`: the program's own, in place of those that the settings name. Raises PackError,
        SettingInvalid, PathsMissing, HashMissing, PredictorMissing, InstructionSetInvalid, BudgetTooSmall or
        OutOfMemory.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise SettingInvalid("path", f"is {path!r}: it should be the folder of a pack, as text or a path")
        chosen = EngineSettings.of(settings, changes)
        if chosen.neurons == PREDICTED:
            chosen = chosen.but(predict="none")
        pack = Pack.open(path, room_within(chosen.limit))
        check_neurons(pack, chosen.neurons)
        routes = chosen.routing == HASH_ROUTING
        noted: list[str] = []
        function = hash_for(pack, chosen.predict, routes, noted.append)
        with memory_shortage(), ExitStack() as opened:
            count, cut = threads_of(chosen.threads)
            backend = open_backend(chosen.kernels, count)
            opened.callback(backend.close)
            device, notes = device_for(pack, chosen, backend)
            noted += notes
            if device is not None:
                opened.callback(device.close)
            others = device.backend(backend) if device is not None else None
            foreseeing = None if function is None else Foreseeing(pack, function, others or backend, routes)
            if foreseeing is not None and others is None and usable_cores() > 1:
                foreseeing.work_beforehand(open_backend(chosen.kernels, 1))
                opened.callback(foreseeing.close)
            engine = cls(pack, backend, chosen, policies, foreseeing, device)
            opened.pop_all()  # the engine closes it from now on
        if notify is not None:
            engine._admission.notify = notify
        if trace is not None:
            engine.runner.listeners.append(trace.append)
        slow = missing_note() if chosen.kernels == AUTO_KERNELS else None
        engine._admission.notes += [*noted, *(note for note in (slow, cut) if note is not None)]
        return engine

    @property
    def cache(self) -> ExpertCache:
        return self._streaming.cache

    @property
    def cached_bytes(self) -> Mapping[ExpertKey, int]:
        """Bytes of each expert that the expert cache keeps: all of it; of an expert in blocks of neurons gate and up,
        or nothing where neurons are predicted."""
        return self._streaming.nbytes

    @property
    def eviction(self) -> str:
        """Name of the eviction policy; the requested name until the first expert has to leave."""
        return self._streaming.eviction

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

    def reserve(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """Sizes the expert cache for a request. Raises BudgetTooSmall; warns once if each token must read experts
        again."""
        with self._turns.turn():
            self._admission.before([Load(prompt_tokens, max_new_tokens)])

    def session(self) -> Session:
        """Opens a session: requests that come and go and run together. Waits until the session of another thread has
        closed."""
        with ExitStack() as opened:
            opened.enter_context(self._turns.turn())
            session = Session(self.model, self.text, self._admission, self.times, opened.pop_all().close, self.now)
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
        the pack's hash function can work on them in the meantime. Raises the errors of `generate`; Interrupted has the
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
        return self._speaker.reply(Asked(messages, tools, variables), Prefix(), chosen, hear)

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
        return Conversation(self._speaker, prefix, system, tools, variables)

    @cached_property
    def _speaker(self) -> Speaker:
        """The engine's side of conversations. Raises ChatImpossible, SettingInvalid, or a PackError for a chat.json
        that can't be used."""
        from moert.chat.conversation import Speaker
        from moert.chat.renderer import Renderer, chat_of

        room = partial(self._aside, "render the model's chat template")
        return Speaker(Renderer(chat_of(self.pack, self.text, self._template), room=room), self.text, self.session)

    def stats(self) -> RunStats:
        """Returns the figures of all requests since the engine was opened."""
        cache_bytes, streaming = self._streaming.capacity_bytes, self._streaming
        least = min(self._admission.smallest_room_bytes, cache_bytes)
        given = Room(self._regulator.limit_bytes, cache_bytes, self.budget.expert_bytes, least)
        ahead = ReadAhead() if self.ahead is None else self.ahead.figures
        routing = EXACT_ROUTING if self.preference is None else share_text(self.preference.share)
        if self._foreseeing is not None and self._foreseeing.routes_to is not None:
            routing = HASH_ROUTING
        return run_stats(
            self.times, self.counters, ahead, given,
            Ways(streaming.eviction, streaming.io, routing, self._neurons), streaming.headroom(),
            None if streaming.firing is None else streaming.firing.counters,
            None if streaming.tier is None else streaming.tier.use(),
        )  # fmt: skip

    def close(self) -> None:
        """Closes the engine: waits for a session of another thread; a session of this thread ends here."""
        with self._turns.last() as first:
            if not first:
                return
            if self._session is not None and (session := self._session()) is not None:
                session.close()
            self.cache.close()
            if self._foreseeing is not None:
                self._foreseeing.close()
            if self.device is not None:
                if self._streaming.tier is not None:
                    self._streaming.tier.close()
                self.device.close()
            self.backend.close()

    def now(self) -> float:
        """Returns the time [s] on the clock of this engine's figures: a simulated device has a clock of its own."""
        return time.perf_counter() if self.device is None else self.device.clock.now()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
