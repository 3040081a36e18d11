"""A profile of a run: where the time of each token goes, layer by layer, as a table and as a trace for ui.perfetto.dev.

Parts of an engine are timed in places that it leaves open: the arithmetic of its model, its routers, the runner of its
experts with their cache, and the walk through its layers. A span is noted when it ends, so behind all spans inside it.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple, TypeVar, cast

from moert.errors import SettingInvalid
from moert.experts.ahead import Lookahead
from moert.experts.cache import ExpertCache, Lease
from moert.experts.policy import Listener
from moert.experts.probe import remembered
from moert.experts.streaming import Holding, ListenedRunner
from moert.kernels.backend import Backend, BackendOf
from moert.models.ffn import Router, Routers
from moert.pack.files import atomic_write, placed
from moert.pack.model_spec import MOST_LAYERS, ExpertKey, LayerKey, StackName
from moert.pack.reader import pack_around
from moert.stats import ExpertCounters, size

T = TypeVar("T")

PARTS = ("mixer", "router", "deciding", "waiting", "products", "networks", "head", "experts", "other")
"""Parts of a token's time: mixers (attention, or a recurrent state); routers; the cache and reading ahead, as they
decide; waiting for reads; the arithmetic of experts; that of networks which every token passes; the head; experts of
packages beside the core, undivided; and everything else, which is Python."""
_MIXER, _ROUTER, _DECIDING, _WAITING, _PRODUCTS, _NETWORKS, _HEAD, _EXPERTS, _OTHER = range(len(PARTS))
_LAYER = len(PARTS)  # and the numbers of decoders' layers, then of encoders'
_UNTIMED = {"matrix", "biased", "dense", "expert", "pages", "close", "rows", "scores", "choose", "prefer"}
"""Functions of a backend that prepare, or that routers call, which are timed as a whole."""
_ARITHMETIC = [name for name in vars(BackendOf) if not name.startswith("_") and name not in _UNTIMED]
_CLOCKED = 1000  # calls that the clock is measured with
_ALIKE = 2.0  # so many times as long, reads are not like those that a drive was measured with


class Pass(NamedTuple):
    """A pass of the model, from `start` to `end` [ns]; `single`: of one token of each sequence, and then from the end
    of the pass before. `asked`, `hits` and `nbytes` (read) are counted since the engine was opened; behind a Pass come
    `rows` spans and `reads` reads."""

    start: int
    end: int
    single: int
    tokens: int
    asked: int
    hits: int
    nbytes: int
    rows: int
    reads: int


class Span(NamedTuple):
    """A span of the thread that computes [ns]. `kind`: a place in PARTS, or _LAYER and a layer."""

    kind: int
    start: int
    end: int


class ReadSpan(NamedTuple):
    """A call that reads experts [ns]: its thread, the layer, the first expert, how many, their bytes; and the time when
    the layer asked for them, `start` if they were read ahead."""

    thread: int
    start: int
    end: int
    layer: int
    expert: int
    experts: int
    nbytes: int
    asked: int


class Timed:
    """A part of an engine, with other functions in the place of some."""

    def __init__(self, part: object, **functions: Callable[..., Any]) -> None:
        self._part = part
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class Profile:
    """The profile of one engine, which becomes a file when the engine closes."""

    def __init__(self, path: str, counters: ExpertCounters) -> None:
        """Raises SettingInvalid for a place where no new file can be."""
        self._path, self._counters = _new(path), counters
        try:
            self._spill = TemporaryFile(dir=self._path.parent, buffering=0)  # noqa: SIM115 - for passes that have ended
        except OSError as error:
            raise _unwritable(path, error) from None
        self._now = time.perf_counter_ns
        self._spans: list[int] = []  # of the present pass, Span after Span
        self._reads: list[ReadSpan] = []
        self._threads: dict[int, int] = {}
        self._phase: int | None = None  # the part that the arithmetic belongs to; None: it is not noted
        self._began: int | None = None  # the present pass
        self._ended: int | None = None  # the pass before, of the same requests
        self._decoding, self._single, self._tokens = False, True, 0
        self._taken: tuple[ExpertKey | None, int] = None, 0  # the first expert that was asked for last, and when
        self._written_bytes = self._written_ns = 0  # of passes in the file; a write may be cut short by Ctrl-C
        self._drive_bytes_per_s: Callable[[float], tuple[str, float] | None] = lambda nbytes: None
        self._figures: Figures | None = None

    # Places in an engine ----------------------------------------------------------------------------------------------

    def arithmetic(self, backend: Backend) -> Backend:
        """Returns a backend whose arithmetic is timed."""
        named = {name: self._computed(getattr(backend, name)) for name in _ARITHMETIC}
        mixture, head = named["mixture"], backend.head

        def mixed(*arguments: Any) -> None:
            if self._phase == _MIXER:
                self._phase = _NETWORKS
            mixture(*arguments)

        def headed(*arguments: Any) -> Any:
            start = self._now()
            made = head(*arguments)
            if self._began is not None:
                self._note(_HEAD, start)
                self._end(self._began, self._spans[-1])
            return made

        return cast("Backend", Timed(backend, **{**named, "mixture": mixed, "head": headed}))

    def walk(self, stack: StackName, layers: Sequence[T]) -> Iterator[tuple[int, T]]:
        """Yields the layers of a stack by their numbers."""
        start = self._now()
        if self._began is None or self._decoding or stack == "encoder":  # else this decoder follows its encoder
            self._spans.clear()
            self._began, self._single = start, True
        self._decoding = stack == "decoder"
        self._single = self._single and self._decoding
        for kind, (number, layer) in enumerate(enumerate(layers), _layer(LayerKey(stack, 0))):
            self._phase = _MIXER
            yield number, layer
            start = self._note(kind, start)
        self._phase = None

    def watch(self, routers: Routers) -> None:
        """Times the routers of a model."""
        for at, router in list(routers.items()):
            routers[at] = cast("Router", Timed(router, route=self._routed(router.route)))

    def holding(self, held: Holding) -> Holding:
        """Returns experts that are held and run as before, and timed."""
        divided = type(held) is Holding
        if divided:
            held.backend = self.arithmetic(held.backend)
        whole, files = held.whole, held.whole.files()

        def drive(nbytes: float) -> tuple[str, float] | None:
            known = remembered(files[0])
            if known is None or not 1 / _ALIKE <= nbytes / max(1, known.piece_bytes) <= _ALIKE:
                return None
            return str(whole.io), known.speeds.get(whole.io, 0.0)

        def runner(cache: ExpertCache, ahead: Lookahead | None, listeners: Iterable[Listener]) -> ListenedRunner:
            if divided:
                cache, ahead = self._cache(cache), ahead and self._ahead(ahead)
            made = held.runner(cache, ahead, listeners)
            return cast("ListenedRunner", Timed(made, run=self._ran(made.run, _OTHER if divided else _EXPERTS)))

        def expects() -> None:
            self._ended = None
            held.expects()

        def figures() -> dict[str, Any]:
            return held.figures() | {"profile": self.figures()}

        def close() -> None:
            held.close()
            self.close()

        self._drive_bytes_per_s = drive
        store = Timed(held.store, read_all=self._read(held.store.read_all))
        found = Timed(held, runner=runner, expects=expects, figures=figures, close=close)
        found.__dict__["store"] = store
        return cast("Holding", found)

    def _cache(self, cache: ExpertCache) -> ExpertCache:
        lease = self._spanned(_DECIDING, cache.lease)

        def leased(keys: Sequence[Any], following: Sequence[Any] = ()) -> Lease:
            if keys:
                self._taken = keys[0], self._now()
            return Lease(timed, lease(keys, following).slots)

        timed = cast("ExpertCache", Timed(
            cache, lease=leased, begin=self._spanned(_DECIDING, cache.begin),
            give_back=self._spanned(_DECIDING, cache.give_back), wait_for=self._spanned(_WAITING, cache.wait_for),
        ))  # fmt: skip
        return timed

    def _ahead(self, ahead: Lookahead) -> Lookahead:
        look, demanded = self._spanned(_DECIDING, ahead.look), self._spanned(_DECIDING, ahead.demanded)

        def looked(*arguments: Any) -> None:
            phase, self._phase = self._phase, None  # a router that is called early decides, too
            look(*arguments)
            self._phase = phase

        return cast("Lookahead", Timed(ahead, look=looked, demanded=demanded))

    # Functions in the place of others ---------------------------------------------------------------------------------

    def _note(self, kind: int, start: int) -> int:
        """Ends a span now, and returns the time."""
        end = self._now()
        self._spans.extend((kind, start, end))
        return end

    def _spanned(self, kind: int, call: Callable[..., T]) -> Callable[..., T]:
        now, extend = self._now, self._spans.extend

        def timed(*arguments: Any) -> T:
            start = now()
            made = call(*arguments)
            extend((kind, start, now()))
            return made

        return timed

    def _computed(self, call: Callable[..., T]) -> Callable[..., T]:
        now, extend = self._now, self._spans.extend

        def timed(*arguments: Any, **named: Any) -> T:
            kind = self._phase
            if kind is None:
                return call(*arguments, **named)
            start = now()
            made = call(*arguments, **named)
            extend((kind, start, now()))
            return made

        return timed

    def _routed(self, route: Callable[..., T]) -> Callable[..., T]:
        def timed(x: Any, lengths: Sequence[int], *arguments: Any) -> T:
            self._phase, start = None, self._now()
            made = route(x, lengths, *arguments)
            self._note(_ROUTER, start)
            self._phase, self._tokens = _NETWORKS, len(x)
            self._single = self._single and max(lengths) == 1
            return made

        return timed

    def _ran(self, run: Callable[..., None], rest: int) -> Callable[..., None]:
        """`rest`: the part that everything belongs to which is not divided further."""

        def timed(*arguments: Any) -> None:
            self._phase, start = _PRODUCTS if rest == _OTHER else None, self._now()
            run(*arguments)
            self._note(rest, start)
            self._phase = _NETWORKS

        return timed

    def _read(self, read_all: Callable[..., T]) -> Callable[..., T]:
        def timed(wanted: Sequence[tuple[Any, Any]]) -> T:
            start = self._now()
            made = read_all(wanted)
            end, key = self._now(), wanted[0][0]
            thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
            nbytes, (asking, asked) = sum(len(buffer) for _, buffer in wanted), self._taken
            asked = min(asked, start) if asking is not None and asking.at == key.at else start
            self._reads.append(ReadSpan(thread, start, end, _layer(key.at), key.expert, len(wanted), nbytes, asked))
            return made

        return timed

    def _end(self, began: int, end: int) -> None:
        """Ends the present pass."""
        reads, counters = self._reads[:], self._counters
        del self._reads[: len(reads)]  # other threads go on adding some
        start = began if not self._single or self._ended is None else self._ended
        head = Pass(
            start, end, int(self._single), self._tokens, counters.requests, counters.hits, counters.bytes_read,
            len(self._spans) // len(Span._fields), len(reads),
        )  # fmt: skip
        try:
            self._spill.seek(self._written_bytes)
            body = array("q", [*head, *self._spans, *chain(*reads)]).tobytes()
            if self._spill.write(body) != len(body):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise _unwritable(str(self._path), error) from None
        self._written_bytes = self._spill.tell()
        self._spans.clear()
        self._began, self._ended = None, end
        self._written_ns += self._now() - end

    # Results ----------------------------------------------------------------------------------------------------------

    def passes(self) -> Iterator[tuple[Pass, list[Span], list[ReadSpan]]]:
        """Yields all passes that have ended, with their counts in place of sums since the beginning."""
        self._spill.seek(0)
        asked = hits = nbytes = 0
        while self._spill.tell() < self._written_bytes:
            head = Pass(*_numbers(self._spill, len(Pass._fields)))
            spans = _grouped(self._spill, Span, head.rows)
            reads = _grouped(self._spill, ReadSpan, head.reads)
            counted = head._replace(asked=head.asked - asked, hits=head.hits - hits, nbytes=head.nbytes - nbytes)
            asked, hits, nbytes = head.asked, head.hits, head.nbytes
            yield counted, spans, reads

    def figures(self) -> Figures:
        """Returns the figures of all passes of single tokens."""
        if self._figures is not None:
            return self._figures
        passes = tokens = asked = hits = nbytes = spans = reads = read_bytes = reading = under_way = until = 0
        spent = [0] * len(PARTS)
        for head, rows, read in self.passes():
            if not head.single:
                continue
            passes, tokens, spans = passes + 1, tokens + head.tokens, spans + len(rows)
            asked, hits, nbytes = asked + head.asked, hits + head.hits, nbytes + head.nbytes
            spent = [so_far + more for so_far, more in zip(spent, divided(head, rows), strict=True)]
            for each in sorted(read, key=lambda read: read.start):
                reads, read_bytes = reads + each.experts, read_bytes + each.nbytes
                reading += each.experts * (each.end - each.start)
                under_way += max(0, each.end - max(until, each.start))
                until = max(until, each.end)
        drive = self._drive_bytes_per_s(read_bytes / reads) if reads else None
        io, drive_bytes_per_s = drive or ("", 0.0)
        clock = (self._span_ns() * spans + self._written_ns) / max(1, sum(spent))
        return Figures(
            passes, tokens, {name: ns / max(1, passes) / 1e9 for name, ns in zip(PARTS, spent, strict=True)},
            clock, hits / max(1, asked), nbytes / max(1, tokens),
            read_bytes / max(1, reads), reading / max(1, under_way), 1e9 * read_bytes / max(1, under_way),
            io, drive_bytes_per_s,
        )  # fmt: skip

    def _span_ns(self) -> float:
        """Returns the time that one more span takes."""
        phase, self._phase, before = self._phase, _OTHER, len(self._spans)
        timed, start = self._computed(int), self._now()
        for _ in range(_CLOCKED):
            timed()
        took, self._phase = self._now() - start, phase
        del self._spans[before:]
        return took / _CLOCKED

    def close(self) -> None:
        """Writes the trace, unless no pass has ended. Raises SettingInvalid."""
        self._figures = self.figures()
        try:
            if self._written_bytes:
                _new(str(self._path))
                with atomic_write(self._path) as fresh, open(fresh, "x", encoding="utf-8") as stream:
                    stream.write('{"displayTimeUnit": "ms", "traceEvents": [')
                    stream.writelines(
                        f"{',' if at else ''}\n{json.dumps(event)}" for at, event in enumerate(self._events())
                    )
                    stream.write("\n]}\n")
        except OSError as error:
            raise _unwritable(str(self._path), error) from None
        finally:
            self._spill.close()

    def _events(self) -> Iterator[dict[str, Any]]:
        """Yields the trace's events, each track's in order and each span before those inside it."""
        yield _name("process_name", 0, "moert")
        yield _name("thread_name", 0, "the model")
        for number in self._threads.values():
            yield _name("thread_name", 1 + number, f"reads {number}")
        base: int | None = None
        for number, (head, spans, reads) in enumerate(self.passes()):
            base = head.start if base is None else base
            found = f"{number}: one token" if head.single and head.tokens == 1 else f"{number}: {head.tokens} tokens"
            counts = {"experts": head.asked, "hits": head.hits, "bytes_read": head.nbytes}
            yield _event(found, 0, head, base, counts)
            for each in sorted(spans, key=lambda span: (span.start, -span.end)):
                yield _event(_named(each.kind), 0, each, base)
            for read in sorted(reads, key=lambda read: read.start):
                waited_us = (read.start - read.asked) / 1000
                named = {"experts": read.experts, "bytes": read.nbytes, "queued_us": waited_us}
                yield _event(f"{_named(read.layer)}/E{read.expert:03d}", 1 + read.thread, read, base, named)


def divided(head: Pass, spans: Iterable[Span]) -> list[int]:
    """Returns the time of each of PARTS [ns], whose sum is the time of the pass."""
    spent = [0] * len(PARTS)
    ended = list[tuple[int, int]]()  # start and time of spans that lie in no other that has ended
    for kind, start, end in [*spans, Span(_OTHER, head.start, head.end)]:
        inside = 0
        while ended and ended[-1][0] >= start:
            inside += ended.pop()[1]
        spent[_OTHER if kind >= _LAYER else kind] += end - start - inside
        ended.append((start, end - start))
    return spent


@dataclass(frozen=True)
class Figures:
    """The figures of passes that write one token of each sequence. `parts`: seconds of each of PARTS in a pass;
    `clock`: share of the time that measuring took; `drive_bytes_per_s`: the speed that the drive once had with reads
    of about this size, `drive_io`; 0 where that is not known."""

    passes: int
    tokens: int
    parts: dict[str, float]
    clock: float
    hit_rate: float
    token_bytes: float
    read_bytes: float
    reads_at_once: float
    read_bytes_per_s: float
    drive_io: str
    drive_bytes_per_s: float

    def lines(self) -> list[str]:
        """Returns lines for people."""
        whole = sum(self.parts.values())
        if not whole:
            return ["profile          of no token: none was written after the first"]
        shares = [(name, took) for name, took in self.parts.items() if took]
        text = [f"  {name:<15}{100 * took / whole:.1f}%, {1000 * took:.3f} ms" for name, took in shares]
        first = (
            f"{self.tokens} tokens, {1000 * whole:.3f} ms for each pass, {100 * self.clock:.2f}% of it to measure this"
        )
        hits = f"{100 * self.hit_rate:.1f}% in memory, {size(round(self.token_bytes))} read for a token"
        return [f"profile          {first}", *text, f"  {'hits':<15}{hits}", *self._read_lines()]

    def _read_lines(self) -> list[str]:
        if not self.read_bytes:
            return []
        each = f"{size(round(self.read_bytes))} each, {self.reads_at_once:.1f} at once"
        drive = f"; the drive gave {size(round(self.drive_bytes_per_s))}/s ({self.drive_io})"
        reached = f"{size(round(self.read_bytes_per_s))}/s while any was under way, {each}"
        return [f"  {'reads':<15}{reached}{drive if self.drive_bytes_per_s else ''}"]


def _layer(at: LayerKey) -> int:
    return _LAYER + at.layer + (0 if at.stack == "decoder" else MOST_LAYERS)


def _named(kind: int) -> str:
    if kind < _LAYER:
        return "experts" if kind == _OTHER else PARTS[kind]
    encoding, layer = divmod(kind - _LAYER, MOST_LAYERS)
    return str(LayerKey("encoder" if encoding else "decoder", layer))


def _event(
    name: str, track: int, span: Pass | Span | ReadSpan, base: int, counts: Mapping[str, float] | None = None
) -> dict[str, Any]:  # fmt: skip
    at = {"ph": "X", "ts": (span.start - base) / 1000, "dur": (span.end - span.start) / 1000, "pid": 1, "tid": track}
    return {"name": name, **at, **({} if counts is None else {"args": counts})}


def _name(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 1, "tid": track, "args": {"name": name}}


def _numbers(stream: Any, count: int) -> array[int]:
    found = array("q")
    found.frombytes(stream.read(count * found.itemsize))
    return found


def _grouped(stream: Any, kind: type[Any], count: int) -> list[Any]:
    width = len(kind._fields)
    numbers = _numbers(stream, count * width)
    return [kind(*numbers[at : at + width]) for at in range(0, len(numbers), width)]


def _new(path: str) -> Path:
    """Returns the place of a file that is not there yet. Raises SettingInvalid."""
    place = placed(path)
    if os.path.lexists(place):
        raise SettingInvalid("profile", f"{path} is there already, and would be lost: choose another name")
    if (pack := pack_around(place)) is not None:
        raise SettingInvalid("profile", f"{path} lies in the pack {pack}: choose another place")
    return place


def _unwritable(path: str, error: OSError) -> SettingInvalid:
    return SettingInvalid("profile", f"{path} can't be written ({error.strerror}): choose another place")
