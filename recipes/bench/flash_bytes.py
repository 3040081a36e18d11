"""Bytes that are read for each token while a model writes: whole experts, neurons that fire, neurons that are named by
a predictor, all in the same room. No figure depends on the drive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moert.beside.flash.runner import PREDICTED
from moert.engine.engine import Engine
from moert.pack.neurons import load_predictor
from moert.pack.reader import Pack
from recipes.bench.flash_packs import (
    BUNDLED,
    COLUMNS,
    WHOLE,
    Subject,
    inputs,
    pack_of,
    predicting,
    room_of,
)
from recipes.bench.flash_rows import Asked, asked_rows, in_order_rows, predicted_rows, predictor_rows, read_rows
from recipes.bench.result import Row
from recipes.bench.streamed import THREADS

SHARES = (0.25, 0.5, 0.75)


@dataclass
class Written:
    """What was written behind each input, and what it took; `requests` and `blocks` count what was asked for, each once
    for a token, `neurons` and `fired` those of the experts that it went to. `holds_rows`: whether gate and up of all
    experts had room."""

    answers: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    bytes_read: int = 0
    requests: int = 0
    neurons: int = 0
    fired: int = 0
    blocks: int = 0
    block_hits: int = 0
    holds_rows: bool = False

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_read / self.tokens


@contextmanager
def opened(pack: Path, **changes: Any) -> Iterator[Engine]:
    """An engine that reads past the page cache, and nothing ahead."""
    asked: dict[str, Any] = {"predict": "none", "threads": THREADS, "io": "direct"}
    with Engine.open(pack, notify=lambda line: None, **{**asked, **changes}) as engine:
        yield engine


def write(
    engine: Engine, texts: Sequence[Sequence[int]], new_tokens: int, follow: Sequence[Sequence[int]] | None = None
) -> Written:
    """Writes behind each text. `follow`: the tokens that are read in place of those that are written. What prompts take
    does not count."""
    model, found, eos = engine.model, Written(), engine.spec.tokens.eos
    firing = engine._streaming.firing
    for number, ids in enumerate(texts):
        engine.reserve(len(ids), new_tokens)
        state, logits = model.prefill(ids)
        read, fired = replace(engine.counters), None if firing is None else replace(firing.counters)
        answer: list[int] = []
        for place in range(new_tokens if follow is None else len(follow[number])):
            answer.append(int(logits.argmax()))
            token = answer[-1] if follow is None else follow[number][place]
            if token in eos:
                break
            logits = model.step(state, token)
            found.tokens += 1
        found.answers.append(answer)
        found.bytes_read += engine.counters.bytes_read - read.bytes_read
        found.requests += engine.counters.requests - read.requests
        if firing is not None and fired is not None:
            found.holds_rows = engine.cache.capacity_bytes >= sum(firing.nbytes.values())
            for name in ("neurons", "fired", "blocks", "block_hits"):
                more = getattr(firing.counters, name) - getattr(fired, name)
                setattr(found, name, getattr(found, name) + more)
    return found


def bytes_rows(subject: Subject) -> Iterator[Row]:
    """All engines read the same tokens: those that the model writes with everything in memory."""
    texts, columns, whole = inputs(subject), pack_of(subject, COLUMNS), pack_of(subject, WHOLE)
    trained = pack_of(subject, COLUMNS, ordered=False)
    with opened(columns) as engine:
        alone = write(engine, texts, subject.new_tokens)
    with opened(trained) as engine:
        unordered = write(engine, texts, subject.new_tokens, alone.answers)

    def read(pack: Path, share: float, **changes: Any) -> Written:
        with opened(pack, cache=room_of(subject, share), **changes) as engine:
            write(engine, texts[:1], subject.new_tokens, alone.answers[:1])
            return write(engine, texts, subject.new_tokens, alone.answers)

    asked = asked_for(alone, columns, whole)
    yield from asked_rows(subject, asked)
    found = {share: (read(whole, share), read(columns, share)) for share in SHARES}
    for share, (experts, neurons) in found.items():
        differ = sum(mine != theirs for mine, theirs in zip(neurons.answers, alone.answers, strict=True))
        yield from read_rows(subject, share, asked, experts, neurons, differ)
    both = {share: (neurons, read(trained, share)) for share, (_, neurons) in found.items()}
    yield from in_order_rows(subject, (alone, unordered), both)
    if subject.predicted:
        bundled = predicting(subject, BUNDLED)
        predictor = load_predictor(Pack.open(bundled))
        assert predictor is not None
        yield from predictor_rows(subject, predictor, Pack.open(bundled).manifest.nbytes())
        for share, (experts, _) in found.items():
            named = read(bundled, share, neurons=PREDICTED, keep_neurons="window")
            yield from predicted_rows(subject, share, asked, experts, named)


def asked_for(written: Written, columns: Path, whole: Path) -> Asked:
    """By each token, whatever is in memory."""
    opened, expert = Pack.open(columns), Pack.open(whole).manifest.experts[0]
    piece = opened.neurons(opened.manifest.experts[0].key).columns_bytes
    return Asked(
        activity=written.fired / written.neurons,
        experts_bytes=written.requests * expert.file_bytes / written.tokens,
        columns_bytes=written.blocks * piece / written.tokens,
    )
