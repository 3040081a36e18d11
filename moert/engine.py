"""Puts a pack, a budget and the policies together: the only place where the parts meet."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType

import torch
from tokenizers import Tokenizer

from moert.backbone import load_backbone, load_tokenizer
from moert.budget import Budget, MemoryLimit
from moert.errors import InputInvalid, OutOfMemory, PathsMissing, ThreadsInvalid
from moert.experts.cache import ExpertCache
from moert.experts.eviction import EVICTION
from moert.experts.executor import CachedExperts
from moert.experts.replay import Step
from moert.experts.store import ExpertStore
from moert.generation.detokenize import Detokenizer
from moert.generation.loop import Generation, GenerationResult, PromptError, room
from moert.generation.settings import GenerationSettings
from moert.kernels import AUTO, open_backend
from moert.kernels.arena import Arena
from moert.kernels.backend import Backend
from moert.kernels.library import missing_note
from moert.models.kv import state_bytes
from moert.models.model import build_model
from moert.pack.paths import PATHS, TransitionTable
from moert.pack.reader import Pack
from moert.predict import PREDICTORS
from moert.predict.none import NoPrediction
from moert.predict.predictor import Predictor
from moert.prefetch import Prefetcher
from moert.stats import ExpertCounters, RequestTimes, RunStats, run_stats
from moert.system import usable_cores

DEFAULT_PREDICTOR = "transitions"


Notify = Callable[[str], None]
"""Gets one line about something that works, but not as well as a user may think."""


@dataclass(frozen=True)
class Answer:
    """One finished request."""

    result: GenerationResult
    prompt_tokens: int
    time_to_first_token_s: float
    total_s: float

    @property
    def text(self) -> str:
        return self.result.text


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while a request ran; `answer` is what there was by then."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


class Engine:
    """An open pack, ready to run one request at a time. Close it, or use it in a with block."""

    def __init__(
        self,
        pack: Pack,
        backend: Backend,
        memory: MemoryLimit | None,
        eviction: str,
        predictor: Predictor,
        trace: list[Step] | None,
        notify: Notify,
    ) -> None:
        """`predictor` may be any that fits the model; see `open` for the rest."""
        self.pack = pack
        self.spec = pack.manifest.model
        self.memory = memory
        self.backend = backend
        self.budget = Budget.of(pack.manifest, widened=backend.widens)
        self.counters = ExpertCounters()
        self.times = RequestTimes()
        self._memory_bytes: int | None = None
        self._notify = notify
        self._notes: list[str] = []  # for the first request that runs
        self._warned = False
        policy = EVICTION[eviction](self.spec.moe_layers())
        self._store = ExpertStore(pack, backend, self.counters)
        self.cache = ExpertCache(self._store, policy, 0, self.counters)
        weights = load_backbone(pack)
        idle = isinstance(predictor, NoPrediction)
        self._prefetcher = None if idle else Prefetcher(self.cache)
        self.runner = CachedExperts(pack, self.cache, backend, predictor, self._prefetcher, trace)
        self.model = build_model(self.spec, weights, self.runner, backend)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        memory: int | MemoryLimit | None = None,
        eviction: str = "paper",
        predictor: str | None = None,
        threads: int | None = None,
        trace: list[Step] | None = None,
        notify: Notify | None = None,
        kernels: str = AUTO,
    ) -> Engine:
        """`memory`: bytes for everything that the pack needs in memory, None to keep all experts once they were read.

        `predictor`: a name from PREDICTORS; None takes "transitions", or "none" with a note if the pack has no path
        tables. `threads` is for the arithmetic, by default one for each usable core. `trace` collects what every layer
        demands. `notify` gets notes and warnings, which otherwise go to stderr. `kernels`: see
        `moert.kernels.open_backend`. Raises PackError, PathsMissing, ThreadsInvalid, InstructionSetInvalid or
        OutOfMemory, and KeyError for unknown names.
        """
        pack = Pack.open(path)
        limit = MemoryLimit(nbytes=memory) if isinstance(memory, int) else memory
        chosen, note = _predictor(pack, predictor)
        with _memory_shortage(), ExitStack() as opened:
            backend = open_backend(kernels, _set_threads(threads))
            opened.callback(backend.close)
            engine = cls(pack, backend, limit, eviction, chosen, trace, notify or _to_stderr)
            opened.pop_all()  # the engine closes it from now on
        slow = missing_note() if kernels == AUTO else None
        engine._notes += [text for text in (slow, note) if text is not None]
        return engine

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises TokenizerMissing."""
        return load_tokenizer(self.pack)

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds.

        Raises TokenizerMissing, or InputInvalid if the text is none.
        """
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InputInvalid(f"the prompt is not valid Unicode ({error.reason} at {error.start})") from None
        tokenizer = self.tokenizer
        try:
            return list(tokenizer.encode(prompt).ids)
        except Exception as error:  # the library raises plain Exception
            reason = " ".join(str(error).split())
            raise InputInvalid(f"the pack's tokenizer can't take the prompt ({reason})") from None

    def check(self, prompt: str, max_new_tokens: int) -> None:
        """Raises what `generate` would for a prompt that can't run in this model or memory, without running it."""
        ids = self.encode(prompt)
        try:
            room(self.model, ids)
        except PromptError as error:
            raise InputInvalid(str(error)) from None
        self.budget.cache_bytes(self.memory, state_bytes(self.spec, len(ids), max_new_tokens))

    def smallest_memory(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """The smallest --memory, in bytes, that such a request runs in."""
        return self.budget.smallest_bytes(state_bytes(self.spec, prompt_tokens, max_new_tokens))

    def reserve(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """Sizes the expert cache for a request. Raises BudgetTooSmall; warns once if each token must read again."""
        needed = state_bytes(self.spec, prompt_tokens, max_new_tokens)
        cache_bytes = self.budget.cache_bytes(self.memory, needed)
        if cache_bytes < self.budget.token_bytes and not self._warned:
            self._warned = True
            more = self.budget.fixed_bytes(needed) + self.budget.token_bytes
            self._notes.append(
                f"the expert cache of {cache_bytes} bytes holds less than one token demands "
                f"({self.budget.token_bytes} bytes over all decoder layers), so experts are read again for each token: "
                f"--memory {more} avoids that"
            )
        while self._notes:
            self._notify(self._notes.pop(0))
        self._resize(cache_bytes)
        if self.memory is not None:
            self._memory_bytes = self.memory.nbytes or self.budget.fixed_bytes(needed) + cache_bytes

    def _resize(self, cache_bytes: int) -> None:
        """Experts are put into an arena, which gives nothing back, only while there is room for all of them."""
        if cache_bytes >= self.budget.expert_bytes:
            self._store.arena = self._store.arena or Arena()
        elif self._store.arena is not None:
            self.cache.resize(0)
            self._store.arena = None
        self.cache.resize(cache_bytes)

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
        try:
            generation = Generation(self.model, list(prompt_ids), settings, detokenizer)
        except PromptError as error:
            raise InputInvalid(str(error)) from None
        self.reserve(len(prompt_ids), settings.max_new_tokens)
        started, first_s = time.perf_counter(), 0.0

        def answer() -> Answer:
            total_s = time.perf_counter() - started
            if generation.tokens:
                self.times.add(len(prompt_ids), len(generation.tokens), first_s, total_s)
            return Answer(generation.result, len(prompt_ids), first_s, total_s)

        try:
            with _memory_shortage():
                for piece in generation:
                    if len(generation.tokens) == 1:
                        first_s = time.perf_counter() - started
                    if on_text is not None and piece.text:
                        on_text(piece.text)
        except KeyboardInterrupt:
            raise Interrupted(answer()) from None
        finally:
            if self._prefetcher is not None:
                self._prefetcher.cancel()
        return answer()

    def stats(self) -> RunStats:
        """All requests since the engine was opened."""
        return run_stats(
            self.times, self.counters, self._memory_bytes, self.cache.capacity_bytes, self.budget.expert_bytes
        )

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
        self.backend.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _set_threads(threads: int | None) -> int:
    """Checks the number of threads, by default one for each usable core, and tells torch."""
    cores = usable_cores()
    if threads is not None and threads > cores:
        raise ThreadsInvalid(f"--threads {threads} is more than this process may use: give at most {cores}")
    threads = cores if threads is None else threads
    torch.set_num_threads(threads)
    return threads


@contextmanager
def _memory_shortage() -> Iterator[None]:
    """torch raises a RuntimeError where the system refuses memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise OutOfMemory("there is not enough memory: give a smaller --memory or a shorter prompt") from None


def _predictor(pack: Pack, name: str | None) -> tuple[Predictor, str | None]:
    """The predictor, and what to tell the user about it."""
    wanted = DEFAULT_PREDICTOR if name is None else name
    if wanted == "none":
        return NoPrediction(), None
    if PATHS not in pack.manifest.files:
        advice = f"the pack at {pack.root} has no {PATHS} (moeconv profile-paths adds it)"
        if name is not None:
            raise PathsMissing(f"--predict {name} needs path tables, and {advice}; or use --predict none")
        return NoPrediction(), f"{advice}: nothing is preloaded"
    tables = TransitionTable.from_bytes(pack.read_file(PATHS))
    tables.check(pack.manifest.model)
    return PREDICTORS[wanted](tables), None


def _to_stderr(note: str) -> None:
    print(f"moert: {note}", file=sys.stderr)
