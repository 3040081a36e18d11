"""A model, built of the parts that its ModelSpec names: reads tokens, returns logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, pairwise, starmap
from typing import Any, NamedTuple, Protocol

import numpy as np

from moert.kernels.backend import (
    NO_NORM,
    ROWS,
    AttentionWeights,
    Backend,
    Floats,
    Matrix,
    NormWeights,
    Positions,
    RouterWeights,
    Stored,
    pieces,
)
from moert.kernels.pages import KvBits
from moert.models.ffn import (
    BesideExperts,
    DenseFfn,
    ExpertRunner,
    LearnedRouter,
    MoeFfn,
    MoeJoin,
    NarrowExperts,
    Network,
    PreferringRouter,
    Router,
    Routers,
    SharedExpert,
    TokenRouter,
)
from moert.models.kv import Fixed, Heard, Kept, Recent, State, remembered
from moert.models.mixers import MIXES, AddedPositions, DistanceBias, FixedMixer, Rotary, query_scales
from moert.models.ngrams import NgramMixer
from moert.models.pooled import PooledMixer
from moert.models.streams import StreamEnd, StreamGates, StreamMixer, StreamNorm, begun, ended
from moert.pack.codec import F32
from moert.pack.manifest import Preference
from moert.pack.mixers import Pooled, Stateful
from moert.pack.model_spec import Layer, LayerKey, ModelSpec, Stack, StackName
from moert.pack.parts import Attention, Beside, Experts, Ffn, GatedStreams, Latent, Norm, Rope, Tensor


class Foresees(Protocol):
    """Listens before each pass of a model, and keeps a memory of its own of each sequence."""

    def opened(self, embed: Matrix) -> None:
        """The model is there; `embed`: its embedding [vocab, d_model]."""
        ...

    def begin(self) -> Any:
        """Returns the memory for a new sequence, a Heard."""
        ...

    def encodes(self, sequences: Sequence[Sequence[int]], heard: Sequence[Any]) -> None:
        """Is called before an encoder reads these sequences."""
        ...

    def decodes(self, sequences: Sequence[Sequence[int]], heard: Sequence[Any]) -> None:
        """Is called before a decoder reads these sequences behind the tokens that it has read."""
        ...

    def expects(self, prompts: Iterable[Sequence[int]]) -> None:
        """Is called with prompts that wait for other sequences to end, the next one first."""
        ...


Reroute = Callable[[LayerKey, LearnedRouter, Backend], Router]
"""Returns the router that a layer calls in place of the model's own."""


Walk = Callable[[StackName, Sequence[Any]], Iterable[tuple[int, Any]]]
"""Yields the layers of a stack by their numbers, each when a pass reaches it."""


@dataclass
class Seams:
    """Where others take part in a model, beside the ExpertRunner: `preference`, see Model.prefer; `reroute` puts other
    routers in place of the model's own; `foresight` listens before passes; `routers`: where the model puts its routers,
    for those that call them before a layer runs; `walk` listens to the layers of a pass."""

    preference: Preference | None = None
    reroute: Reroute | None = None
    foresight: Foresees | None = None
    routers: Routers = field(default_factory=dict)
    walk: Walk | None = None


class Weights(Protocol):
    """Canonical name → weights as stored. Weights that are taken out are the caller's own."""

    def __contains__(self, name: object, /) -> bool: ...

    def pop(self, name: str, /) -> Stored: ...


class Builder:
    """The builder of a model's parts, which takes weights out by name."""

    def __init__(self, weights: Weights, ropes: Sequence[Rope], backend: Backend) -> None:
        self._weights, self._ropes, self.backend = weights, ropes, backend
        self.rotary: Sequence[Rotary] = ()
        """The rotary positions of the ropes."""

    def matrix(self, name: str) -> Matrix:
        """Returns the matrix of this name with its bias, if it has one."""
        bias = self.floats(f"{name}.bias") if f"{name}.bias" in self._weights else None
        return self.backend.matrix(self._weights.pop(f"{name}.weight"), bias)

    def floats(self, name: str) -> F32:
        """Returns a tensor that is never quantized: a copy in float32."""
        stored = self._weights.pop(name)
        assert isinstance(stored, Floats), f"{name} is no tensor of floats"
        return stored.widened()

    def stored(self, name: str) -> Floats:
        """Returns a tensor that is never quantized, as it is stored."""
        found = self._weights.pop(name)
        assert isinstance(found, Floats), f"{name} is no tensor of floats"
        return found

    def norm(self, part: Norm | None, name: str) -> NormWeights:
        if part is None:
            return NO_NORM
        weight = self.floats(f"{name}.weight")
        return NormWeights(weight, self.floats(f"{name}.bias") if part.kind == "layer" else None, part.eps)

    def attention(self, layer: Layer, name: str, crossing: bool, causal: bool) -> AttentionWeights[Matrix]:
        part, join = (layer.cross, None) if crossing else (layer.attention, layer.mixer_join)
        assert part is not None
        at = f"{name}.{'cross' if crossing else 'attn'}"
        norms = {"before": self.norm(layer.norm, f"{name}.{'cross' if crossing else 'mixer'}_norm")}
        if join is not None and join.after is not None:
            norms["after"] = self.norm(join.after, f"{name}.mixer_after")
        tensors = list(part.tensors(at, 1))
        inner = part.norm if isinstance(part, Latent) else _like(layer.inner_norm)
        norms |= {each: self.norm(inner, f"{at}.{each}_norm") for each in _named(tensors, at, "_norm.weight")}
        matrices = {each: self.matrix(f"{at}.{each}") for each in _named(tensors, at, ".weight") if "_norm" not in each}
        sinks = self.floats(f"{at}.sinks") if isinstance(part, Attention) and part.sinks else None
        dims = 0 if part.rope is None else self._ropes[part.rope].dims
        add = 1.0 if join is None else join.add
        return AttentionWeights(part, not crossing, causal, dims, norms, matrices, sinks, add)

    def fixed(self, part: Stateful, layer: Layer, name: str) -> FixedMixer | PooledMixer:
        join = layer.mixer_join
        norm = self.norm(layer.norm, f"{name}.mixer_norm")
        if isinstance(part, Pooled):
            return PooledMixer(part, f"{name}.mixer", self, norm, self.rotary[part.rope])
        after = None if join.after is None else self.norm(join.after, f"{name}.mixer_after")
        return FixedMixer(MIXES[type(part)](part, f"{name}.mixer", self), norm, after, join.add, self.backend)

    def streams(self, layer: Layer, name: str) -> StreamMixer | StreamGates | None:
        """Returns the mixer of streams around a half of a layer; None for one stream."""
        if layer.streams is None:
            return None
        if isinstance(layer.streams, GatedStreams):
            return self.gates(layer.streams, name, self.matrix(f"{name}.join"))
        return StreamMixer(layer.streams, *self._of_streams(layer, name), self.backend)

    def stream_end(self, stack: Stack, name: str) -> Callable[[F32], F32]:
        """Returns the function that makes one vector of each token's streams at the end of a stack."""
        part, at = stack.streams, f"{name}.streams"
        if isinstance(part, GatedStreams):
            return self.gates(part, at).end
        if part is None or not part.weighed:
            return ended
        return StreamEnd(part, *self._of_streams(stack.kinds[0], at), self.backend).ended

    def _of_streams(self, layer: Layer, name: str) -> tuple[Matrix, F32, F32, NormWeights]:
        assert layer.norm is not None
        weight, bias, scale = self.stored(f"{name}.weight"), self.floats(f"{name}.bias"), self.floats(f"{name}.scale")
        norm = NormWeights(np.ones(weight.data.shape[1], np.float32), None, layer.norm.eps)
        return self.backend.matrix(weight), bias, scale, norm

    def gates(self, part: GatedStreams, name: str, join: Matrix | None = None) -> StreamGates:
        norm = StreamNorm(self.floats(f"{name}.norm.weight"), part.n, part.norm.eps, self.backend)
        return StreamGates(part, norm, self.matrix(f"{name}.narrow"), self.matrix(f"{name}.wide"), join, self.backend)

    def ngrams(self, layer: Layer, name: str) -> NgramMixer | None:
        """Returns the embedding of a layer's tokens together; None where there is none."""
        part, streams = layer.ngrams, layer.streams
        if part is None or streams is None:
            return None
        norms = [
            StreamNorm(self.floats(f"{name}.{each}_norm.weight"), streams.n, part.norm.eps, self.backend)
            for each in ("key", "stream", "conv")
        ]
        key, value, taps = self.matrix(f"{name}.key"), self.matrix(f"{name}.value"), self.floats(f"{name}.conv.weight")
        return NgramMixer(part, self.stored(f"{name}.table"), key, value, norms, taps, self.backend)

    def ffn(self, layer: Layer, at: LayerKey, runner: ExpertRunner, routers: Routers) -> MoeFfn | DenseFfn | None:
        name, join = f"{at.stack}.{at.layer}", layer.ffn_join
        if layer.ffn is None:
            return None
        norm = self.norm(layer.norm, f"{name}.ffn_norm")
        after = None if join.after is None else self.norm(join.after, f"{name}.ffn_after")
        if isinstance(layer.ffn, Ffn):
            return DenseFfn(self._network(layer.ffn, f"{name}.ffn"), norm, after, join.add, self.backend)
        experts, weighs_input = layer.ffn, layer.ffn.router.weigh == "input"
        scaled = (weighs_input or experts.narrow is not None) and join.add != 1
        apart = after is not None or experts.beside is not None or experts.bypass or scaled
        routers[at] = self._router(experts, name, norm, 1.0 if apart else join.add)
        joined = MoeJoin(after, join.add, apart, weighs_input, experts.router.keeps, experts.shortcut)
        shared, beside, narrow = self._shared(experts, name), self._beside(experts, name), self._narrow(experts, name)
        bypass = self.matrix(f"{name}.bypass") if experts.bypass else None
        return MoeFfn(at, routers, runner, self.backend, joined, shared, beside, narrow, bypass)

    def _network(self, part: Ffn, at: str) -> Network:
        gate, up, down = (self.matrix(f"{at}.{each}") if each in part.projections else None for each in _PROJECTIONS)
        assert up is not None
        assert down is not None
        return Network(part, self.backend.dense(gate, up, down), self.backend)

    def _router(self, experts: Experts, at: str, norm: NormWeights, factor: float) -> LearnedRouter | TokenRouter:
        part = experts.router
        choice = self.floats(f"{at}.router.choice_bias") if part.choice_bias else None
        scale = self.floats(f"{at}.router.expert_scale") if part.expert_scale else None
        own = self.norm(Norm(norm.eps), f"{at}.router_norm") if part.own_norm else None
        matrix = self.matrix(f"{at}.router")
        weights = RouterWeights(part, factor, norm, own, matrix, choice, scale)
        if part.by_token is None:
            return LearnedRouter(weights, self.backend)
        table = np.sort(self.floats(f"{at}.router.table").astype(np.int64), axis=1)
        return TokenRouter(weights, table, experts.n, self.backend)

    def _shared(self, experts: Experts, at: str) -> SharedExpert | None:
        if experts.shared is None:
            return None
        gate = self.matrix(f"{at}.shared_gate") if experts.shared_gate else None
        return SharedExpert(self._network(experts.shared, f"{at}.shared"), gate)

    def _beside(self, experts: Experts, at: str) -> BesideExperts | None:
        part: Beside | None = experts.beside
        if part is None:
            return None
        norm, after, experts_after = (
            self.norm(each, f"{at}.{name}")
            for each, name in (
                (part.norm, "beside_norm"), (part.after, "beside_after"), (part.experts_after, "experts_after")
            )
        )  # fmt: skip
        return BesideExperts(self._network(part.ffn, f"{at}.beside"), norm, after, experts_after)

    def _narrow(self, experts: Experts, at: str) -> NarrowExperts | None:
        if experts.narrow is None:
            return None
        return NarrowExperts(experts.narrow.features, self.matrix(f"{at}.narrow"), self.matrix(f"{at}.widen"))


_PROJECTIONS = ("gate", "up", "down")


def _like(norm: Norm | None) -> Norm | None:
    """Returns a norm of the kind rms with the eps of another norm."""
    return None if norm is None else Norm(norm.eps)


def _named(tensors: Iterable[Tensor], at: str, suffix: str) -> list[str]:
    """Returns NAME of each tensor AT.NAMEsuffix."""
    return [tensor.name[len(at) + 1 : -len(suffix)] for tensor in tensors if tensor.name.endswith(suffix)]


class _Layer:
    """A layer with its weights. `attention` and `mixer`: one of them, or none. `mutual`: the attention of tokens that
    see each other. `routed`: its place among the layers with experts, if it has some. `to_mixer`, `to_ffn`: the mixers
    of streams around its halves."""

    def __init__(self, part: Layer, at: LayerKey, builder: Builder, runner: ExpertRunner, routers: Routers) -> None:
        name, decoding, mixer = f"{at.stack}.{at.layer}", at.stack == "decoder", part.mixer
        self.part = part
        self.rope = None if part.attention is None else part.attention.rope
        self.stretch = mixer.stretch if isinstance(mixer, Attention) else None
        self.scale = builder.floats(f"{name}.scale")[0] if part.scaled else None
        self.attention = None
        if part.attention is not None:
            self.attention = builder.attention(part, name, crossing=False, causal=decoding)
        self.mutual = None if self.attention is None else replace(self.attention, causal=False)
        self.positions = None
        if part.positions is not None:
            self.positions = AddedPositions(builder.stored(f"{name}.positions.weight"), None, counts_pad=True)
        self.mixer = builder.fixed(mixer, part, name) if isinstance(mixer, Stateful) else None
        self.cross = None if part.cross is None else builder.attention(part, name, crossing=True, causal=False)
        below = sum(other.stack == at.stack for other in routers)
        self.ffn = builder.ffn(part, at, runner, routers)
        self.routed = below if at in routers else None
        self.ngrams = builder.ngrams(part, f"{name}.ngrams")
        self.to_mixer = None if mixer is None else builder.streams(part, f"{name}.mixer_streams")
        self.to_ffn = None if self.ffn is None else builder.streams(part, f"{name}.ffn_streams")


class _Reading(NamedTuple):
    """Sequences of tokens that are read in one pass: the rows of each, one sequence after the other, and its state.
    `prefixes`: for each sequence, how many of its first tokens see each other, where nothing was read before. `known`:
    the positions that layers of this pass have used."""

    sequences: Sequence[Sequence[int]]
    spans: Sequence[slice]
    states: Sequence[State]
    prefixes: Sequence[int]
    known: dict[object, Positions]


class _Tower:
    """The layers of one stack, the positions that they share, and the norm that ends it."""

    def __init__(
        self, name: StackName, stack: Stack, ropes: Sequence[Rotary], builder: Builder, runner: ExpertRunner,
        routers: Routers, pad: int | None,
    ) -> None:  # fmt: skip
        self.streams, self.backend, self.ropes = stack.streams, builder.backend, ropes
        self.positions = None
        if (part := stack.positions) is not None:
            added = builder.stored(f"{name}.positions.weight")
            self.positions = AddedPositions(added, pad if part.skips_pad else None, counts_pad=name == "decoder")
        self.norm = builder.norm(stack.norm, f"{name}.norm")
        self.end = builder.stream_end(stack, name)
        self.walk: Callable[[Sequence[_Layer]], Iterable[tuple[int, _Layer]]] = enumerate
        self.bias = None
        if stack.buckets is not None:
            table = builder.floats(f"{name}.relative_bias.weight")
            self.bias = DistanceBias(stack.buckets, table, bidirectional=name == "encoder")
        self.layers = [
            _Layer(stack[layer], LayerKey(name, layer), builder, runner, routers) for layer in range(len(stack))
        ]

    def read(
        self, x: F32, sequences: Sequence[Sequence[int]], states: Sequence[State], prefixes: Sequence[int]
    ) -> None:  # fmt: skip
        """Runs all layers on x [tokens, d_model] in place, the tokens of `sequences` one after the other; for
        `prefixes` see _Reading."""
        lengths = list(map(len, sequences))
        spans = list(starmap(slice, pairwise(accumulate(lengths, initial=0))))
        reading = _Reading(sequences, spans, states, prefixes, {})
        streams = None if self.streams is None else begun(x, self.streams.n)
        shortcut: F32 | None = None  # the output of the last layer's experts, where it joins behind this layer
        for place, layer in self.walk(self.layers):
            if layer.positions is not None:
                for rows, state in zip(spans, states, strict=True):
                    layer.positions.add_from(x[rows], state.own[place].length)
            entered = x.copy() if layer.part.parallel else None
            if streams is not None and layer.ngrams is not None:
                self._join(place, reading, streams, layer.ngrams)
            if streams is None or layer.to_mixer is None:
                self._mix(place, reading, x)
            else:
                layer.to_mixer.around(streams, partial(self._mix, place, reading))
            made = None
            if layer.ffn is not None:
                routed = layer.routed if states[0].recent else None
                recent = () if routed is None else [state.recent[routed] for state in states]
                if streams is None or layer.to_ffn is None:
                    made = layer.ffn(x, lengths, recent, entered)
                else:
                    layer.to_ffn.around(streams, partial(_feed, layer.ffn, lengths, recent))
            if layer.scale is not None:
                x *= layer.scale
            if shortcut is not None:
                x += shortcut
            shortcut = made
        if streams is not None:
            x[:] = self.end(streams)

    def _join(self, place: int, reading: _Reading, streams: F32, ngrams: NgramMixer) -> None:
        """Adds the embedding of several tokens together to streams [tokens, n, d_model] in place."""
        for ids, span, state in zip(reading.sequences, reading.spans, reading.states, strict=True):
            own = state.own[place]
            assert isinstance(own, Fixed)
            own.extend(len(ids))
            ngrams.join(streams[span], ids, own.arrays[-2:])

    def _mix(self, place: int, reading: _Reading, x: F32) -> None:
        """Runs a layer's mixer, and its attention to an encoder's output, on x [tokens, d_model] in place."""
        layer = self.layers[place]
        for span, state, prefix in zip(reading.spans, reading.states, reading.prefixes, strict=True):
            rows, own = x[span], state.own[place]
            if isinstance(own, Kept):
                self._attend(layer, rows, own, prefix, reading.known)
            elif layer.mixer is not None:
                layer.mixer.read(rows, own, counted=layer.ngrams is not None)
            else:
                own.extend(len(rows))
            if layer.cross is not None:
                for piece in pieces(len(rows)):
                    self.backend.attend(layer.cross, rows[piece], state.cross[place], 0, Positions())

    def _attend(self, layer: _Layer, rows: F32, kept: Kept, prefix: int, known: dict[object, Positions]) -> None:
        """Runs attention on a sequence's rows in place, piece by piece. Of tokens that see each other, all keys are
        there before the first query looks."""
        assert layer.attention is not None
        assert layer.mutual is not None
        end, prefix = 0, prefix if layer.attention.causal else len(rows)
        assert not (prefix and kept.length)
        if layer.rope is not None and len(rows) > ROWS:
            self.ropes[layer.rope].reach(kept.length + len(rows))
        while end < len(rows):
            first, mutual = end, end < prefix
            end = prefix if mutual else min(first + ROWS, len(rows))
            start = kept.extend(end - first)
            key = layer.rope, layer.stretch, start, end - first
            positions = known.get(key)
            if positions is None:
                positions = known[key] = self._positions(layer, start, end - first)
            self.backend.attend(
                layer.mutual if mutual else layer.attention, rows[first:end], kept, start, positions
            )  # fmt: skip

    def _positions(self, layer: _Layer, start: int, tokens: int) -> Positions:
        """Returns the positions of a sequence's tokens from `start` on, its last ones, for an attention."""
        turns = None if layer.rope is None else self.ropes[layer.rope].turns(start, tokens)
        bias, zero = (None, 0) if self.bias is None else self.bias.by_distance(start + tokens)
        scales = None if layer.stretch is None else query_scales(layer.stretch, start, tokens)
        return Positions(turns, bias, zero, scales)


def _feed(ffn: MoeFfn | DenseFfn, lengths: Sequence[int], recent: Sequence[Recent], x: F32) -> None:
    """Runs a feed-forward part on x [tokens, d_model] in place."""
    ffn(x, lengths, recent, None)


def _heard(states: Sequence[State]) -> list[Heard]:
    return [state.heard for state in states if state.heard is not None]


class Model:
    """A model without gradients, in float32, deterministic. Each sequence has its own State. Many sequences at once
    read each expert once per layer for all of them; the logits are bit for bit those of each sequence alone."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, runner: ExpertRunner, backend: Backend, kv_bits: KvBits = 16,
        seams: Seams | None = None,
    ) -> None:  # fmt: skip
        """Builds the model; `weights` is emptied on the way."""
        seams = seams or Seams()
        builder = Builder(weights, spec.ropes, backend)
        self.spec, self.backend, self.kv_bits = spec, backend, kv_bits
        self.routers = seams.routers
        """The routers of all layers with experts; put another in one's place, and the layer calls that."""
        self.embed = builder.matrix("embed")
        self._head = self.embed if spec.head.tied else builder.matrix("head")
        if spec.head.tied and spec.head.bias:
            self._head = backend.biased(self.embed, builder.floats("head.bias"))
        self._project = builder.matrix("head.project") if spec.head.projected else None
        ropes = [Rotary(rope, builder.floats(f"rope.{place}.frequencies")) for place, rope in enumerate(spec.ropes)]
        builder.rotary = ropes
        towers = {
            name: _Tower(name, stack, ropes, builder, runner, self.routers, spec.tokens.pad)
            for name, stack in spec.stacks.items()
        }
        if seams.walk is not None:
            for name, tower in towers.items():
                tower.walk = partial(seams.walk, name)
        self._encoder, self._decoder = towers.get("encoder"), towers["decoder"]
        self._by_token = [router for router in self.routers.values() if isinstance(router, TokenRouter)]
        self.preference: Preference | None = None
        if seams.preference is not None:
            self.prefer(seams.preference)
        if seams.reroute is not None:
            for at, exact in list(self.routers.items()):
                assert isinstance(exact, LearnedRouter)
                self.routers[at] = seams.reroute(at, exact, backend)
        self.foresight = seams.foresight
        if self.foresight is not None:
            self.foresight.opened(self.embed)

    def prefer(self, preference: Preference) -> None:
        """Routes all sequences by this preference that begin from now on; to be called once."""
        self.preference, places = preference, [at for at in self.spec.moe_layers() if at.stack == "decoder"]
        for at, bonus in zip(places, preference.bonus, strict=True):
            exact = self.routers[at]
            if isinstance(exact, TokenRouter):
                continue
            assert isinstance(exact, LearnedRouter)
            self.routers[at] = PreferringRouter(exact, self.backend, bonus, preference.sure)

    def expects(self, prompts: Iterable[Sequence[int]]) -> None:
        """Passes on prompts that wait for other sequences to end, the next one first, so that work may be done
        beforehand."""
        if self.foresight is not None:
            self.foresight.expects(prompts)

    def prefill(self, ids: Sequence[int]) -> tuple[State, F32]:
        """Reads the prompt; returns the state after it and the logits [vocab] of the first token to write.

        Encoder–decoder: encodes the ids and runs the decoder's start token. Raises ValueError for an empty prompt.
        """
        return self.prefill_many([ids])[0]

    def prefill_many(self, prompts: Sequence[Sequence[int]]) -> list[tuple[State, F32]]:
        """Reads several prompts at once; returns as `prefill` does for each."""
        begun = self.begin(prompts)
        logits = self.read([state for state, _ in begun], [ids for _, ids in begun])
        return [(state, row) for (state, _), row in zip(begun, logits, strict=True)]

    def begin(self, prompts: Sequence[Sequence[int]]) -> list[tuple[State, Sequence[int]]]:
        """Returns for each prompt a new state, and the tokens that the decoder is to read first: the prompt itself, or
        behind an encoder, which reads the prompt now, the start token. Raises ValueError for an empty prompt."""
        states = self._states(prompts)
        return list(zip(states, prompts if self._encoder is None else [[self._start]] * len(prompts), strict=True))

    def read(self, states: Sequence[State], sequences: Sequence[Sequence[int]]) -> F32:
        """Appends to each state the tokens of its sequence, one or many; returns the logits [sequences, vocab] after
        the last of each. Tokens that see each other have to come at once, with the prefix_end behind them (see
        Tokens)."""
        last = np.array([*accumulate(map(len, sequences))]) - 1
        return self._logits(self._decode(sequences, states)[last])

    def read_each(self, state: State, ids: Sequence[int]) -> F32:
        """Appends tokens to a state; returns the logits [tokens, vocab] after each of them."""
        return self._logits(self._decode([ids], [state]))

    def step(self, state: State, token: int) -> F32:
        """Appends one token to the state; returns the logits [vocab] of the token after it."""
        logits: F32 = self.read([state], [[token]])[0]
        return logits

    def forward_all(self, ids: Sequence[int], target_ids: Sequence[int] | None = None) -> F32:
        """Returns the logits [n, vocab] of `rows`, all at once."""
        return np.concatenate(list(self.rows(ids, target_ids)))

    def rows(
        self, ids: Sequence[int], target_ids: Sequence[int] | None = None, at_once: int = ROWS
    ) -> Iterator[F32]:  # fmt: skip
        """Yields teacher-forced logits of one pass, [at_once or fewer, vocab] at a time. Routers that prefer experts do
        so behind the first token, as for tokens that are written.

        Decoder-only: row i follows ids[: i + 1]. Encoder–decoder: the decoder reads `target_ids`, start token included,
        and row i follows target_ids[: i + 1]. Raises ValueError for the wrong one of both.
        """
        if (self._encoder is not None) != bool(target_ids):
            raise ValueError("target_ids are for encoder–decoder models, and these need them, start token included")
        states = self._states([ids])
        states[0].exact_until(0 if target_ids else 1)
        x = self._decode([target_ids or ids], states)
        for start in range(0, len(x), at_once):
            yield self._logits(x[start : start + at_once])

    def hidden(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, F32]]:
        """Yields the hidden states of prompts, all read in one pass, as the head takes them, behind the last norm: the
        place of a prompt, and of its next ROWS tokens or fewer [tokens, d_model]. Of decoders without an encoder
        alone."""
        read = self._decode(prompts, self._states(prompts))
        for place, rows in enumerate(np.split(read, np.cumsum([*map(len, prompts)])[:-1])):
            for piece in pieces(len(rows)):
                x = rows[piece]
                yield place, self.backend.norm(x, self._decoder.norm) if self._project is None else self._projected(x)

    @property
    def _start(self) -> int:
        start = self.spec.tokens.start
        assert start is not None
        return start

    def _states(self, prompts: Sequence[Sequence[int]]) -> list[State]:
        """Returns new states; with an encoder, the keys and values of the encoded prompts are in them. Raises
        ValueError for an empty prompt."""
        if not all(prompts):
            raise ValueError("the prompt has no tokens")
        lengths = [len(ids) if self._encoder is None else 0 for ids in prompts]
        d_model, make = self.spec.d_model, self.backend.pages
        states = [
            State(
                [remembered(layer.part, d_model, expected, self.kv_bits, make) for layer in self._decoder.layers],
                recent=self._nothing_recent(),
                heard=None if self.foresight is None else self.foresight.begin(),
            )
            for expected in lengths
        ]
        for state, length in zip(states, lengths, strict=True):
            state.exact_until(length)
        if self._encoder is not None:
            if self.foresight is not None:
                self.foresight.encodes(prompts, _heard(states))
            for state, encoded in zip(states, self._encode(self._encoder, prompts), strict=True):
                state.cross = [self._crossed(layer, encoded) for layer in self._decoder.layers]
        return states

    def _nothing_recent(self) -> list[Recent]:
        if self.preference is None:
            return []
        k, top_k, places = self.preference.recent, self.spec.moe.router.top_k, self.spec.moe_layers()
        return [Recent(k, top_k) for at in places if at.stack == "decoder"]

    def _crossed(self, layer: _Layer, encoded: F32) -> Kept:
        assert layer.cross is not None
        kept = Kept(layer.cross.part, len(encoded), self.kv_bits, self.backend.pages)
        for piece in pieces(len(encoded)):
            rows = encoded[piece]
            self.backend.keep(layer.cross, rows, kept, kept.extend(len(rows)))
        return kept

    def _encode(self, encoder: _Tower, prompts: Sequence[Sequence[int]]) -> list[F32]:
        """Returns the hidden states of each prompt, [tokens, d_model]."""
        lengths = [len(ids) for ids in prompts]
        x = self._embedded(encoder, prompts, [0] * len(prompts))
        d_model, make = self.spec.d_model, self.backend.pages
        states = [State([remembered(layer.part, d_model, n, 16, make) for layer in encoder.layers]) for n in lengths]
        encoder.read(x, prompts, states, [0] * len(prompts))
        return np.split(self.backend.norm(x, encoder.norm), np.cumsum(lengths)[:-1])

    def _embedded(self, tower: _Tower, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> F32:
        """Returns the input of a tower for tokens from these positions on, [all tokens, d_model]."""
        x = self.backend.rows(self.embed, list(chain.from_iterable(sequences)))
        if self.spec.embed_scale != 1:
            x = x * np.float32(self.spec.embed_scale)
        if tower.positions is not None:
            for ids, start, end in zip(sequences, starts, accumulate(map(len, sequences)), strict=True):
                tower.positions.add(x[end - len(ids) : end], ids, start)
        return x

    def _decode(self, sequences: Sequence[Sequence[int]], states: Sequence[State]) -> F32:
        """Runs the tokens of each sequence after those in its state; returns hidden states [all tokens, d_model]."""
        starts = [state.length for state in states]
        x = self._embedded(self._decoder, sequences, starts)
        if self.foresight is not None:
            self.foresight.decodes(sequences, _heard(states))
        for router in self._by_token:
            router.reads([*chain.from_iterable(sequences)])
        prefixes = [0 if start else self._prefix(ids) for ids, start in zip(sequences, starts, strict=True)]
        self._decoder.read(x, sequences, states, prefixes)
        return x

    def _prefix(self, ids: Sequence[int]) -> int:
        """Returns how many of a prompt's first tokens see each other."""
        end = self.spec.tokens.prefix_end
        return ids.index(end) if end is not None and end in ids else 0

    def _logits(self, x: F32) -> F32:
        head, norm, x = self.spec.head, self._decoder.norm, np.ascontiguousarray(x)
        if self._project is not None:
            x, norm = self._projected(x), NO_NORM
        return self.backend.head(x, norm, head.scale, head.softcap, self._head)

    def _projected(self, x: F32) -> F32:
        assert self._project is not None
        made = self.backend.linear(self.backend.norm(x, self._decoder.norm), self._project)
        return self.backend.gated(np.ones_like(made), made)
