"""Which experts the tokens of an input go to: how many of a layer stay idle over its length, and how far a choice
depends on other tokens (SiDA: Du et al. 2023, "Sparsity-inspired data-aware serving", Fig. 4 and 7)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moert.bench.measure import BenchRun, prompts_of, silent
from moert.engine.engine import Engine
from moert.errors import BudgetTooSmall
from moert.kernels.backend import I64
from moert.models.ffn import Routed, Router
from moert.models.kv import Recent
from moert.pack.codec import F32
from moert.pack.model_spec import ModelSpec, StackName

STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Lengths and distances, in tokens."""
_INPUT_TOKENS = 1024  # of all inputs together, as far as they are looked at
_CHANGED_TOKENS = 4096  # of all inputs with random tokens
_TOGETHER = 16  # inputs that are read at once
_FEW = 0.05  # of the inputs or tokens that the most is known of: a mean over fewer says little

Shares = Mapping[int, float]
"""By a number of tokens, in percent."""


class Input(NamedTuple):
    """The tokens that a stack reads, `ids`; `given`: the tokens that the model is given for it, the same but behind
    an encoder."""

    given: Sequence[int]
    ids: Sequence[int]

    def having(self, ids: Sequence[int]) -> Input:
        return Input(ids if self.given is self.ids else self.given, ids)


class Change(NamedTuple):
    """Tokens of an input that become random ones, `gone`, and those that are looked at then, each with its distance."""

    gone: Sequence[int]
    seen: Sequence[tuple[int, int]]


Read = Callable[[Sequence[Input]], list[I64]]
"""The experts of each input's tokens, [tokens, layers, top_k], -1 where one was full."""


@dataclass(frozen=True)
class Choices:
    """Of each stack with experts. `idle`: the share of a layer's experts that no token goes to, by how many tokens are
    read; mean over layers and all inputs that are as long. `same`: see `shares_kept`. `first`: the experts of the first
    input's tokens, [tokens, layers, top_k]."""

    idle: Mapping[StackName, Shares]
    same: Mapping[StackName, Shares]
    first: Mapping[StackName, I64]


def choices(measured: BenchRun, texts: Sequence[str] | None = None) -> Choices:
    """Of what a run read, by the routing that it had. What an encoder-decoder's decoder reads is what it wrote, up to
    the first end of a text. Raises PackError, RunError."""
    idle, same, first = dict[StackName, Shares](), dict[StackName, Shares](), dict[StackName, I64]()
    with Engine.open(measured.pack.root, measured.settings.engine, notify=silent) as engine:
        prompts = prompts_of(engine, texts, measured.settings.new_tokens)
        for name in engine.spec.stacks:
            if engine.spec.moe_layers(name):
                inputs = _inputs(engine.spec, name, prompts, [sample.tokens for sample in measured.samples])
                reader = Reader(engine, name)
                idle[name] = shares_idle(reader.read, inputs, engine.spec.moe.n)
                changed = _changed(engine.spec, inputs, causal=name == "decoder")
                same[name] = shares_kept(reader.read, inputs, changed)
                (first[name],) = reader.read(inputs[:1])
    return Choices(idle, same, first)


class Reader:
    """Lets an engine's model read, and records the decisions of the routers of one stack."""

    def __init__(self, engine: Engine, name: StackName) -> None:
        self._engine, self._name = engine, name
        self._layers = engine.spec.moe_layers(name)

    def read(self, inputs: Sequence[Input]) -> list[I64]:
        """See Read. As many at once as fit into memory."""
        found: list[I64] = []
        while len(found) < len(inputs):
            found += self._read(self._fitting(inputs[len(found) : len(found) + _TOGETHER]))
        return found

    def _fitting(self, inputs: Sequence[Input]) -> Sequence[Input]:
        """Makes room for as many of the first. Raises BudgetTooSmall if there is none for one."""
        given, read = (sum(map(len, part)) for part in zip(*inputs, strict=True))
        try:
            self._engine.reserve(max(given, read), read)
        except BudgetTooSmall:
            if len(inputs) == 1:
                raise
            return self._fitting(inputs[: len(inputs) // 2])
        return inputs

    def _read(self, inputs: Sequence[Input]) -> list[I64]:
        model, heard = self._engine.model, [list[I64]() for _ in self._layers]
        own = {at: model.routers[at] for at in self._layers}
        for seen, (at, router) in zip(heard, own.items(), strict=True):
            model.routers[at] = _Heard(router, seen)
        try:
            begun = model.begin([each.given for each in inputs])
            if self._name == "decoder":
                model.read([state for state, _ in begun], [each.ids for each in inputs])
        finally:
            model.routers.update(own)
        experts = np.stack([np.concatenate(seen) for seen in heard], 1)
        return np.split(experts, np.cumsum([len(each.ids) for each in inputs])[:-1])


class _Heard:
    """A router that writes down its decisions."""

    def __init__(self, router: Router, seen: list[I64]) -> None:
        self._router, self._seen = router, seen

    def route(self, x: F32, lengths: Sequence[int], recent: Sequence[Recent] = ()) -> Routed:
        routed = self._router.route(x, lengths, recent)
        self._seen.append(routed.experts)
        return routed

    def guess(self, x: F32) -> F32:
        return self._router.guess(x)


def shares_idle(read: Read, inputs: Sequence[Input], num_experts: int) -> Shares:
    """Reads the beginnings of all inputs: see Choices."""
    shares = dict[int, float]()
    for length in STEPS:
        cut = [each.having(each.ids[:length]) for each in inputs if len(each.ids) >= length]
        if cut and len(cut) >= _FEW * len(inputs):
            used = [len(np.unique(layer[layer >= 0])) for experts in read(cut) for layer in experts.swapaxes(0, 1)]
            shares[length] = 100 * (1 - sum(used) / len(used) / num_experts)
    return shares


def shares_kept(read: Read, inputs: Sequence[Input], changed: Sequence[tuple[int, Input, Change]]) -> Shares:
    """By distance, the share of a token's experts that it still goes to when all tokens at this distance and beyond it
    are random ones (special tokens stay, and so does what an encoder was given while its decoder reads); of all experts
    of the tokens that were looked at, in all layers. `changed`: the number of an input, what became of it, and the
    change."""
    before = read(inputs)
    kept, all_of = dict[int, int](), dict[int, int]()
    for experts, (number, _, change) in zip(read([each for _, each, _ in changed]), changed, strict=True):
        for token, distance in change.seen:
            old, new = before[number][token], experts[token]  # [layers, top_k]
            stays = (old[:, :, None] == new[:, None, :]).any(2) & (old >= 0)
            kept[distance] = kept.get(distance, 0) + int(stays.sum())
            all_of[distance] = all_of.get(distance, 0) + int((old >= 0).sum())
    enough = max(1, _FEW * max(all_of.values(), default=0))
    return {step: 100 * kept[step] / all_of[step] for step in STEPS if all_of.get(step, 0) >= enough}


IDLE, CACHED, CHOSEN, FOUND = range(4)
"""States of an expert at a token; `FOUND`: chosen, and cached before."""


def states(experts: I64, num_experts: int, room: int) -> I64:
    """Returns the state of each expert of a layer at each token, [num_experts, tokens], where the `room` experts that
    were used last are cached; experts [tokens, top_k], -1 where one was full."""
    found, held = np.full((num_experts, len(experts)), IDLE), list[int]()
    for token, row in enumerate(experts):
        chosen = [int(expert) for expert in row if expert >= 0]
        found[held, token] = CACHED
        found[chosen, token] += CHOSEN
        held = [*(expert for expert in held if expert not in chosen), *chosen][-room:]
    return found


def changes(ids: Sequence[int], special: Collection[int | None], causal: bool) -> Iterator[Change]:
    """All that can be tried with an input. Special tokens stay, and are not looked at; if it is read causally, tokens
    behind the one that is looked at don't count, so that one change serves many tokens."""
    text = [place for place, token in enumerate(ids) if token not in special]
    if causal:
        own = set(text)
        for last in text:
            seen = [(last + step, step) for step in STEPS if last + step in own]
            if seen:
                yield Change([place for place in text if place <= last], seen)
        return
    for token in text:
        for step in STEPS:
            gone = [place for place in text if abs(place - token) >= step]
            if gone:
                yield Change(gone, [(token, step)])


def special(spec: ModelSpec) -> set[int | None]:
    """Returns the tokens that are no text."""
    marks = spec.tokens
    return {marks.bos, *marks.eos, marks.pad, marks.start, marks.first, marks.prefix_end}


def _inputs(
    spec: ModelSpec, name: StackName, prompts: Sequence[Sequence[int]], written: Sequence[Sequence[int]]
) -> list[Input]:
    """The first inputs of a stack, each as far as STEPS go, until they have _INPUT_TOKENS together."""
    found, tokens = list[Input](), 0
    for prompt, after in zip(prompts, written, strict=True):
        ids = prompt if spec.encoder is None or name == "encoder" else _read_back(spec, after)
        ids = ids[: STEPS[-1]]
        tokens += len(ids)
        if found and tokens > _INPUT_TOKENS:
            break
        found.append(Input(ids if spec.encoder is None or name == "encoder" else prompt, ids))
    return found


def _read_back(spec: ModelSpec, written: Sequence[int]) -> list[int]:
    """Returns the tokens that the decoder read while it wrote these behind an encoder, up to the end of the text."""
    assert spec.tokens.start is not None
    ends = [place for place, token in enumerate(written) if token in spec.tokens.eos]
    return [spec.tokens.start, *written[: ends[0] if ends else -1]]


def _changed(spec: ModelSpec, inputs: Sequence[Input], causal: bool) -> list[tuple[int, Input, Change]]:
    """Of all changes to all inputs, some at random, until they have _CHANGED_TOKENS. Random tokens are of those that
    occur in the inputs, or where this is but one, of the vocabulary."""
    rng, marks = np.random.default_rng(0), special(spec)
    tokens = sorted({token for each in inputs for token in each.ids} - marks)
    if len(tokens) < 2:
        tokens = sorted(set(range(spec.vocab_size)) - marks)
    possible = [(number, each) for number, one in enumerate(inputs) for each in changes(one.ids, marks, causal)]
    found, room = list[tuple[int, Input, Change]](), _CHANGED_TOKENS
    for place in rng.permutation(len(possible)):
        number, change = possible[place]
        ids = list(inputs[number].ids)
        room -= len(ids)
        if found and room < 0:
            break
        for gone in change.gone:
            drawn = int(rng.integers(len(tokens)))
            ids[gone] = tokens[drawn] if tokens[drawn] != ids[gone] else tokens[drawn - 1]
        found.append((number, inputs[number].having(ids), change))
    return found
