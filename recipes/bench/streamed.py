"""A pack in the project's own engine with little room, as a session of recipes/bench/runner.py.

`python -m recipes.bench.streamed SETTING`, with a Setting as JSON."""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moert.beside.flash.keeping import DEFAULT_KEEPING
from moert.beside.flash.runner import EXACT
from recipes.bench.program import as_program
from recipes.bench.runner import serve
from recipes.bench.stream_packs import PIECE

if TYPE_CHECKING:
    from moert.engine.engine import Engine
    from moert.experts.policy import Demand
    from moert.pack.model_spec import ExpertKey

# Where the time of a token goes: kernels, waiting for the disk, deciding what to keep and to read, other Python.

T = TypeVar("T")


@dataclass(frozen=True)
class Spent:
    """Seconds of the thread that computes. `waiting`: for reads of experts, and for those of neurons, which it makes
    itself. `deciding`: which blocks of neurons are wanted, with the arithmetic of a predictor, who leaves, what is read
    ahead and what that is worth, without the kernels that routers are asked with; `python`: that, and all that is
    neither a kernel nor waiting."""

    whole: float
    kernels: float
    waiting: float
    deciding: float

    @property
    def python(self) -> float:
        return self.whole - self.kernels - self.waiting


class Meter:
    """Put into an engine that runs on the native kernels; it costs a microsecond a call. It stays there."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._kernels, self._deciding, self._reading = engine, 0.0, 0.0, 0.0
        backend: Any = engine.backend
        backend._call = _Timed(backend._call, self._kernel)
        runner, cache, ahead = engine.runner, engine.cache, engine.ahead
        module = sys.modules[type(runner).__module__]
        decisions: list[tuple[Any, str]] = [(module, "announce"), (cache, "lease"), (cache, "give_back")]
        if ahead is not None:
            decisions.append((ahead, "look"))
        if (blocks := getattr(engine.holding, "blocks", None)) is not None:
            reader, timed = blocks._reader, _Timed(blocks._reader, self._read)
            reader.read, reader.read_all = timed.read, timed.read_all
            wanted = (module, "fired_blocks") if hasattr(module, "fired_blocks") else (runner, "_named")
            decisions += [(blocks, "fetch"), (blocks, "fetch_all"), wanted]
        if (scores := getattr(runner, "_scores", None)) is not None:
            scores.compressed, scores.named = self._uncounted(scores.compressed), self._uncounted(scores.named)
            decisions.append((scores, "compressed"))
        for owner, name in decisions:
            setattr(owner, name, self._decides(getattr(owner, name)))

    def during(self, work: Callable[[], object]) -> Spent:
        before = self._kernels, self._waiting, self._deciding
        started = time.perf_counter()
        work()
        whole = time.perf_counter() - started
        after = self._kernels, self._waiting, self._deciding
        return Spent(whole, *(late - early for early, late in zip(before, after, strict=True)))

    @property
    def _waiting(self) -> float:
        return self._engine.counters.stall_s + self._reading

    def _kernel(self, seconds: float) -> None:
        self._kernels += seconds

    def _read(self, seconds: float) -> None:
        self._reading += seconds

    def _uncounted(self, function: Callable[..., T]) -> Callable[..., T]:
        """Its kernels are no kernels: whoever decides by what it gives counts their time."""

        def timed(*arguments: Any) -> T:
            kernels = self._kernels
            result = function(*arguments)
            self._kernels = kernels
            return result

        return timed

    def _decides(self, function: Callable[..., T]) -> Callable[..., T]:
        """Counts what is neither a kernel nor waiting."""

        def timed(*arguments: Any, **named: Any) -> T:
            elsewhere, started = self._kernels + self._waiting, time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                spent = time.perf_counter() - started
                self._deciding += spent - (self._kernels + self._waiting - elsewhere)

        return timed


class _Timed:
    """Functions of a library that say how long each call took."""

    def __init__(self, functions: object, tell: Callable[[float], None]) -> None:
        self._functions, self._tell = functions, tell

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function, tell = getattr(self._functions, name), self._tell

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            tell(time.perf_counter() - started)
            return result

        setattr(self, name, timed)
        return timed


THREADS = 2


@dataclass(frozen=True)
class Setting:
    """How the engine is set.

    `cache_bytes`: room for experts; None: for all, or as `memory_bytes` of the whole process allow. `io`: None looks at
    the drive. `routing`: a file of recipes/bench/routing.py to put in the place of the routers; None leaves them.
    `prompts`: lines of token ids to go on from, `new_tokens` each; None goes on from single tokens, of `beginnings`.
    `present_first`: of a token's experts, those in memory run while others are read.
    `texts`: lines of token ids that are written, whatever the model would write (recipes.bench.stream_packs.texts).
    `prefers`: which of the pack's preferences, see moert.engine.budget. Where experts lie in blocks of neurons:
    `keep_neurons` and `neurons`, as in moert.engine.settings; `firings`: a file of
    recipes/bench/flash_firings.py, to put in the place of routers and of what fires, or is named.
    """

    pack: str
    cache_bytes: int | None
    eviction: str = "auto"
    predict: str = "gate"
    io: str | None = "direct"
    routing: str | None = None
    prompts: str | None = None
    new_tokens: int = PIECE
    prefers: str = "auto"
    memory_bytes: int | None = None
    keep_neurons: str = DEFAULT_KEEPING
    neurons: str = EXACT
    firings: str | None = None
    texts: str | None = None
    present_first: bool = True

    def command(self) -> list[str]:
        return [sys.executable, "-m", "recipes.bench.streamed", json.dumps(asdict(self))]


@dataclass(frozen=True)
class Segment:
    """A stretch of a run. `tokens` are passes through the decoder, the first token of each request among them;
    `in_flight` of the `hits` were still being read when they were demanded."""

    tokens: int
    seconds: float
    bytes_read: int
    requests: int
    hits: int
    in_flight: int = 0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class Clock:
    """Counts tokens until the time is over and enough are there."""

    def __init__(self, seconds: float, least: int) -> None:
        self._until, self._least = time.perf_counter() + seconds, least
        self.tokens = 0

    @property
    def over(self) -> bool:
        return self.tokens >= self._least and time.perf_counter() >= self._until


def lines_of(path: Path) -> list[list[int]]:
    """Returns the token ids of each line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def beginnings(vocab_size: int) -> Iterator[int]:
    """Tokens that texts begin with, so that no text is written twice."""
    return (7919 * number % vocab_size for number in itertools.count(1))


class Streamed:
    """The session. What its engine demands is remembered, so that it can be said what no cache could have avoided."""

    def __init__(self, setting: Setting) -> None:
        import numpy as np

        from moert.bench.measure import read_all
        from moert.engine.budget import parse_cache
        from moert.experts.store import parse_io
        from recipes.bench.controls import opened
        from recipes.bench.routing import ReplayedRouting

        firings = None
        if setting.firings is not None:
            from recipes.bench.flash_firings import Firings

            firings = Firings.load(Path(setting.firings))
        self._trace: list[Demand] = []
        self._starts: list[tuple[int, list[ExpertKey]]] = []  # of segments: place in the trace, what was in memory
        self._engine = opened(
            setting.pack, setting.eviction, setting.predict,
            cache=None if setting.cache_bytes is None else parse_cache(str(setting.cache_bytes)),
            memory=setting.memory_bytes, io=parse_io(setting.io or "auto"),
            threads=THREADS, routing=setting.prefers, trace=self._trace,
            keep_neurons=setting.keep_neurons, neurons=setting.neurons,
            notify=lambda line: print(line, file=sys.stderr),
        )  # fmt: skip
        if setting.cache_bytes is None and setting.memory_bytes is None:
            self._engine.reserve(1, 1)
            read_all(self._engine)
        self._new_tokens = setting.new_tokens
        self._prompts: Iterator[list[int]] = ([token] for token in beginnings(self._engine.spec.vocab_size))
        if setting.prompts is not None:
            self._prompts = itertools.cycle(lines_of(Path(setting.prompts)))
        self._texts = None if setting.texts is None else itertools.cycle(lines_of(Path(setting.texts)))
        if setting.routing is not None:
            with np.load(setting.routing) as recorded:
                replayed = ReplayedRouting(recorded["heldout"], recorded["guesses"])
                replayed.replace(self._engine.model.routers, self._engine.spec.moe_layers())
        if not setting.present_first:
            self._engine.runner._overlaps = False  # type: ignore[attr-defined]
        if firings is not None:
            from recipes.bench.flash_firings import Replay

            spec = self._engine.spec
            Replay(firings, spec.moe_layers(), spec.moe.n, spec.moe.ffn.d_ff).replace(self._engine)

    def run(self, seconds: float, least: int) -> dict[str, Any]:
        """Writes for so long, but no fewer than `least` tokens → a Segment."""
        clock = Clock(seconds, least)

        def work() -> int:
            while not clock.over:
                if self._texts is None:
                    self._generate(next(self._prompts), self._new_tokens, clock)
                else:
                    first, *written = next(self._texts)
                    self._generate([first], len(written), clock, iter(written))
            return clock.tokens

        return self._measured(work)

    def answer(self, prompts: int) -> dict[str, Any]:
        """Answers the next prompts, each to its end → a Segment."""
        clock = Clock(math.inf, 0)

        def work() -> int:
            for ids in itertools.islice(self._prompts, prompts):
                self._generate(ids, self._new_tokens, clock)
            return clock.tokens

        return self._measured(work)

    def read(self, tokens: int) -> dict[str, Any]:
        """Reads a prompt of so many tokens and writes one → a Segment whose tokens are the prompt's."""
        ids = list(itertools.islice(beginnings(self._engine.spec.vocab_size), tokens))

        def work() -> int:
            self._generate(ids, 1, Clock(0.0, 1))
            return tokens

        return self._measured(work)

    def unavoidable(self) -> list[int]:
        """Bytes that no policy could have avoided reading in each segment after the first, which warms up, starting
        with what was in memory then; see moert.bench.measure."""
        from moert.bench.measure import least_bytes

        nbytes = self._engine.cached_bytes
        cache_bytes, ends = self._engine.cache.capacity_bytes, [*(at for at, _ in self._starts[1:]), len(self._trace)]
        return [
            least_bytes(self._trace[start:end], nbytes, cache_bytes, held)
            for (start, held), end in zip(self._starts[1:], ends[1:], strict=True)
        ]

    def spent(self, tokens: int) -> dict[str, float]:
        """Writes so many tokens → where their time went, a recipes.bench.streamed.Spent. It stays a little slower."""

        return asdict(Meter(self._engine).during(lambda: self.run(0.0, tokens)))

    def facts(self) -> dict[str, int]:
        """Bytes: of the cache and all experts, of the weights that always stay, and the most that the process held."""
        from moert.pack.manifest import BACKBONE

        stats, files = self._engine.stats(), self._engine.pack.manifest.files
        return {
            "cache_bytes": stats.cache_bytes,
            "expert_bytes": sum(self._engine.cached_bytes.values()),
            "backbone_bytes": files[BACKBONE].nbytes,
            "peak_bytes": stats.peak_rss_bytes,
        }

    def _measured(self, work: Callable[[], int]) -> dict[str, Any]:
        before = replace(self._engine.counters)
        self._starts.append((len(self._trace), self._engine.cache.resident()))
        started = time.perf_counter()
        tokens = work()
        seconds, after = time.perf_counter() - started, replace(self._engine.counters)
        return asdict(
            Segment(
                tokens,
                seconds,
                after.bytes_read - before.bytes_read,
                after.requests - before.requests,
                after.hits - before.hits,
                after.hits_in_flight - before.hits_in_flight,
            )
        )

    def _generate(
        self, ids: list[int], new_tokens: int, clock: Clock, written: Iterator[int] | None = None
    ) -> None:  # fmt: skip
        """`written`: the tokens to be written, whichever the model likes best."""
        with self._engine.session() as session:
            request = session.add(ids, max_new_tokens=new_tokens, ignore_eos=written is not None)
            if written is not None:
                request._generation._choose = lambda logits: next(written)  # type: ignore[attr-defined, method-assign]
            for _ in session:
                clock.tokens += 1
                if clock.over:
                    break


def main() -> None:
    serve(lambda: Streamed(Setting(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    as_program(main, __doc__, "SETTING")
