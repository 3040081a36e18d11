"""Puts a pack, a budget and the policies together: the only place where the parts meet."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from types import TracebackType
from typing import Any

from tokenizers import Tokenizer

from moert.backbone import encode, load_backbone, load_tokenizer
from moert.budget import Budget, CacheLimit, MemoryLimit
from moert.errors import InputInvalid, memory_shortage
from moert.experts.ahead import Lookahead
from moert.experts.belady import Recorder, headroom
from moert.experts.cache import ExpertCache
from moert.experts.demand import Demand
from moert.experts.drive import DEFAULT_THREADS, IoSettings
from moert.experts.eviction import EVICTION
from moert.experts.executor import CachedExperts
from moert.experts.probe import settings_for
from moert.experts.selection import DEFAULT
from moert.experts.store import ExpertStore
from moert.generation.batch import Answer, Batch, Interrupted
from moert.generation.detokenize import Detokenizer
from moert.generation.loop import Generation, PromptError
from moert.generation.settings import GenerationSettings
from moert.kernels import AUTO_KERNELS, open_backend
from moert.kernels.backend import Backend
from moert.kernels.library import missing_note
from moert.memory import drop_page_cache, held_bytes, most_bytes, thread_bytes
from moert.models.footprint import Footprint
from moert.models.model import Model
from moert.pack.manifest import BACKBONE
from moert.pack.reader import Pack
from moert.policies import eviction_for, predictor_for
from moert.predict.predictor import Predictor
from moert.predict.worth import Worth
from moert.regulator import Regulator
from moert.settings import EngineSettings
from moert.stats import PAGE_CACHE, ExpertCounters, ReadAhead, RequestTimes, Room, RunStats, run_stats, size
from moert.system import usable_cores
from moert.turns import Turns

Notify = Callable[[str], None]
"""Gets one line about something that works, but not as well as a user may think."""


class Engine:
    """An open pack that runs one request or one batch at a time. Close it, or use it in a with block.

    Threads may share it: requests of one wait while those of another run. A request that is asked for while one runs in
    the same thread (in `on_text`, say) raises RuntimeError.
    """

    def __init__(
        self, pack: Pack, backend: Backend, settings: EngineSettings, predictor: Predictor | None, weighed: bool = True
    ) -> None:
        """`predictor`: any that fits the model, in place of the one that the settings name; not `weighed`, all is read
        that it names, whatever that is worth. See `open` for the rest."""
        self.pack = pack
        self.spec = pack.manifest.model
        self.backend = backend
        self.budget = Budget.of(pack.manifest, backend.widens, thread_bytes(backend.threads))
        self.counters = ExpertCounters()
        self.times = RequestTimes()
        self.notify: Notify = _to_stderr
        self._turns = Turns()
        self._notes: list[str] = []  # for the first request that runs
        self._warned = self._split = False
        self._least_room = sys.maxsize  # bytes that experts had while anything ran
        self.eviction, self._streams = settings.eviction, False
        self.recorder = Recorder()
        self._nbytes = {entry.key: entry.file_bytes for entry in pack.manifest.experts}
        self._measures_drive = settings.reading is None
        io = settings.reading or IoSettings(True, DEFAULT_THREADS)
        self._store = ExpertStore(pack, backend, self.counters, io)
        self.cache = ExpertCache(
            self._store, EVICTION[DEFAULT](self.spec.moe_layers()), 0, self.counters, self._store.io.threads
        )
        footprint = Footprint(self.spec, backend.widens, settings.kv_bits)
        self._regulator = self._regulated(footprint, settings.limit)
        self._regulator.check_open()
        weights = load_backbone(pack)
        self.ahead = None
        if predictor is not None:
            price = Worth() if weighed else None
            self.ahead = Lookahead(self.spec, self._nbytes, self.cache, self.counters, predictor, price)
        self.runner = CachedExperts(pack, self.cache, backend, self.ahead, [self.recorder.add])
        self.model = Model(self.spec, weights, self.runner, backend, settings.kv_bits)
        del weights
        if self._regulator.tight:
            drop_page_cache(pack.file(BACKBONE))
        if self.ahead is not None:
            self.ahead.routers = self.model.routers

    def _regulated(self, footprint: Footprint, room: MemoryLimit | CacheLimit | None) -> Regulator:
        limit = room_bytes = None
        name = ""
        if isinstance(room, CacheLimit):
            room_bytes = room.resolve(self.budget.expert_bytes)
        elif room is not None and (limit := room.resolve(held_bytes(), most_bytes())) is not None:
            name = room.named(limit)
            if room.nbytes is not None and limit < room.nbytes:
                self._notes.append(f"--memory {size(room.nbytes)} is more than {name}: that is used")
        return Regulator(footprint, self.budget, self.cache, limit, room_bytes, limit_name=name)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        settings: EngineSettings | None = None,
        *,
        trace: list[Demand] | None = None,
        notify: Notify | None = None,
        **changes: Any,
    ) -> Engine:
        """`changes`: settings by name, for those that `settings` (or the default ones) should not have.

        `trace` collects what every layer demands. `notify` gets notes and warnings, which otherwise go to stderr.
        Raises PackError, SettingInvalid, PathsMissing, InstructionSetInvalid, BudgetTooSmall or OutOfMemory.
        """
        chosen = (settings or EngineSettings()).but(**changes)
        pack = Pack.open(path)
        predictor = predictor_for(pack, chosen.predictor)
        with memory_shortage(), ExitStack() as opened:
            count, cut = _threads(chosen.threads)
            backend = open_backend(chosen.kernels, count)
            opened.callback(backend.close)
            engine = cls(pack, backend, chosen, predictor)
            opened.pop_all()  # the engine closes it from now on
        engine.notify = notify or _to_stderr
        if trace is not None:
            engine.runner.listeners.append(trace.append)
        slow = missing_note() if chosen.kernels == AUTO_KERNELS else None
        engine._notes += [note for note in (slow, cut) if note is not None]
        return engine

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises TokenizerMissing."""
        return load_tokenizer(self.pack)

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds.

        Raises TokenizerMissing, or InputInvalid if the text is none.
        """
        return encode(self.tokenizer, prompt)

    def check(self, prompt: str, max_new_tokens: int) -> None:
        """Raises what `generate` would for a prompt that can't run in this model or memory, without running it."""
        ids = self.encode(prompt)
        self._generation(ids, GenerationSettings(), None)
        with self._turns.turn():
            self._regulator.check([len(ids)], max_new_tokens)

    def smallest_memory(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """The smallest --memory, in bytes, that such a request runs in."""
        return self._regulator.smallest_memory([prompt_tokens], max_new_tokens)

    def reserve(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """Sizes the expert cache for a request. Raises BudgetTooSmall; warns once if each token must read again."""
        with self._turns.turn():
            self._reserve([prompt_tokens], max_new_tokens)

    def _reserve(self, prompts: Sequence[int], max_new_tokens: int) -> None:
        """The same for prompts of so many tokens that run together."""
        room, warning = self._regulator.before_prompt(prompts, max_new_tokens)
        if warning is not None and not self._warned:
            self._warned = True
            self._notes.append(warning)
        while self._notes:
            self.notify(self._notes.pop(0))
        # What is read once may stay in the system's page cache for the next start, unless the user says how to read.
        self._store.leaves_page_cache = self._measures_drive
        self._adapt(room)

    def _adapt(self, room_bytes: int) -> None:
        """Adapts the engine to so much room for experts: where that is not enough for all, finds out, once, how this
        drive is best read and which eviction policy is best."""
        self._least_room = min(self._least_room, self.cache.capacity_bytes)
        if room_bytes >= self.budget.expert_bytes:
            return
        self._store.leaves_page_cache = False
        if self._streams:
            return
        self._streams = True
        if self._measures_drive:
            self._store.io = settings_for(self._store.files())
            self.cache.loaders = self._store.io.threads
        choice = eviction_for(self.pack, self.eviction, self._nbytes, room_bytes, self.notify)
        self.eviction = choice.name
        self.cache.use(choice.policy)

    def generate(
        self, prompt: str, settings: GenerationSettings, on_text: Callable[[str], None] | None = None
    ) -> Answer:
        """Runs one prompt; `on_text` gets the text in pieces as it is made.

        Raises PackError, BudgetTooSmall, OutOfMemory, TokenizerMissing or InputInvalid, and Interrupted on Ctrl-C.
        """
        return self.generate_ids(self.encode(prompt), settings, on_text, Detokenizer(self.tokenizer))

    def generate_ids(
        self,
        prompt_ids: Sequence[int],
        settings: GenerationSettings,
        on_text: Callable[[str], None] | None = None,
        detokenizer: Detokenizer | None = None,
    ) -> Answer:
        """The same for token ids; without a detokenizer there is no text and no stop string."""
        generation = self._generation(prompt_ids, settings, detokenizer)
        with self._turns.turn():
            return self._run([generation], on_text)[0]

    def generate_many(self, prompts: Sequence[str], settings: GenerationSettings) -> Iterator[Answer]:
        """Runs prompts together, so that each expert is read once per layer for all of them; the answers come in order.

        The answers are those of `generate`, on the native kernels bit for bit (see Model). Prompts that do not fit into
        memory together run in smaller batches, with a note. Raises what `generate` does; Interrupted has what
        was begun of the answers that were not given yet.
        """
        waiting = [self._generation(self.encode(text), settings, Detokenizer(self.tokenizer)) for text in prompts]
        while waiting:
            with self._turns.turn():
                count = self._together(waiting)
                answers = self._run(waiting[:count])
            yield from answers
            waiting = waiting[count:]

    def _together(self, waiting: Sequence[Generation]) -> int:
        """How many of the first generations should run at once."""
        lengths = [len(generation.prompt_ids) for generation in waiting]
        count = self._regulator.together(lengths, waiting[0].settings.max_new_tokens)
        if count < len(waiting) and not self._split:
            self._split = True
            self._notes.append(
                f"{len(waiting)} prompts at once would take the experts' memory: they run {count} at a time"
            )
        return count

    def _generation(
        self, prompt_ids: Sequence[int], settings: GenerationSettings, detokenizer: Detokenizer | None
    ) -> Generation:
        try:
            return Generation(self.model, list(prompt_ids), settings, detokenizer)
        except PromptError as error:
            raise InputInvalid(str(error)) from None

    def _run(self, generations: Sequence[Generation], on_text: Callable[[str], None] | None = None) -> list[Answer]:
        """Runs all of these generations together."""
        batch = Batch(self.model, generations)
        self._reserve(batch.running, generations[0].settings.max_new_tokens)
        try:
            with memory_shortage():
                for pieces in batch:
                    if on_text is not None and pieces[0].text:
                        on_text(pieces[0].text)
                    self._regulator.after_token(batch.running, batch.turns)
                    self._adapt(self.cache.capacity_bytes)
        except KeyboardInterrupt:
            raise Interrupted(batch.answers) from None
        finally:
            if self.ahead is not None:
                self.ahead.forget()
            batch.count(self.times)
        return batch.answers

    def stats(self) -> RunStats:
        """The figures of all requests since the engine was opened."""
        cache_bytes = self.cache.capacity_bytes
        least = min(self._least_room, cache_bytes)
        room = Room(self._regulator.limit_bytes, cache_bytes, self.budget.expert_bytes, least)
        best = headroom(self.recorder, self._nbytes, cache_bytes)
        ahead = ReadAhead() if self.ahead is None else self.ahead.figures
        io = PAGE_CACHE if self._store.leaves_page_cache else str(self._store.io)
        return run_stats(self.times, self.counters, ahead, room, self.eviction, io, (best.demands, best.hit_rate))

    def close(self) -> None:
        """Waits for a request that runs in another thread."""
        with self._turns.turn():
            self.cache.close()
            self.backend.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _threads(threads: int | None) -> tuple[int, str | None]:
    """The number of threads, by default and at most one for each usable core; a note if that is fewer than
    was asked for."""
    cores = usable_cores()
    asked = cores if threads is None else threads
    count = min(asked, cores)
    note = f"--threads {asked} is more than the {cores} core(s) that this process may use: {count} are used"
    return count, note if count < asked else None


def _to_stderr(note: str) -> None:
    print(f"moert: {note}", file=sys.stderr)
