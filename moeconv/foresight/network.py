"""The network of a hash function in torch, and routing by it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from moeconv.foresight.examples import half
from moeconv.measure.scorers import Subject
from moeconv.measure.trial import Trial
from moeconv.source.archs.description import Description
from moeconv.source.archs.weights import parameter
from moeconv.source.routers import deciding_of, router_of, scores_of, weights_of
from moert.pack.codec import F16, F32
from moert.pack.learnt import ATTENTION, DIRECTIONS, LSTM_LAYERS, HashFunction, Lstm, StackHash
from moert.pack.model_spec import STACKS, LayerKey, ModelSpec, StackName
from moert.pack.parts import Experts

# SparseMax: the nearest point of the simplex, with most numbers 0 (Martins and Astudillo 2016).


class _Sparsemax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        ordered = scores.sort(dim=-1, descending=True).values
        sums, counts = ordered.cumsum(-1), torch.arange(1, scores.shape[-1] + 1, dtype=scores.dtype)
        inside = 1 + counts * ordered > sums
        size = inside.sum(-1, keepdim=True)
        threshold = (sums.gather(-1, size - 1) - 1) / size
        shares = (scores - threshold).clamp(min=0)
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (shares,) = ctx.saved_tensors
        support = shares > 0
        kept = gradients[0] * support
        mean = kept.sum(-1, keepdim=True) / support.sum(-1, keepdim=True)
        return cast("Tensor", (kept - mean) * support)


def sparsemax(scores: Tensor) -> Tensor:
    """Returns shares [..., n] that sum to 1; scores [..., n], -infinity (though not for all) where the share must be
    0."""
    return cast("Tensor", _Sparsemax.apply(scores))  # type: ignore[no-untyped-call]


# The network of a hash function in torch, stack by stack, as SPEC.md describes it: for training and for routing.

_SUFFIXES = dict(zip(DIRECTIONS, ("_l0", "_l0_reverse"), strict=True))  # torch's names of directions


class Encoded(NamedTuple):
    """The output y of the encoder's network [rows, tokens, w], and which places hold a token [rows, tokens]."""

    y: Tensor
    real: Tensor


@dataclass
class Past:
    """The state of a decoder's network after the tokens so far: output and cells of each LSTM layer [1, rows, w], keys
    and values [rows, tokens, w]."""

    states: list[tuple[Tensor, Tensor]]
    keys: Tensor
    values: Tensor

    def keep(self, rows: Tensor) -> Past:
        """Returns the state of only these rows [rows]."""
        states = [(output[:, rows], cells[:, rows]) for output, cells in self.states]
        return Past(states, self.keys[rows], self.values[rows])


class Shape(NamedTuple):
    """The shape of a stack's network: `layers` with `experts` experts each; `both_ways`: of an encoder, `encoded`: of a
    decoder behind an encoder with experts."""

    d_model: int
    width: int
    layers: int
    experts: int
    both_ways: bool
    encoded: bool

    @classmethod
    def of(cls, spec: ModelSpec, stack: StackName, width: int) -> Shape:
        behind = stack == "decoder" and bool(spec.moe_layers("encoder"))
        return cls(spec.d_model, width, len(spec.moe_layers(stack)), spec.moe.n, stack == "encoder", behind)

    @property
    def numbers(self) -> int:
        """The number of numbers in the network."""
        w, cells = self.width, self.width // (2 if self.both_ways else 1)
        lstm = LSTM_LAYERS * (w // cells) * 4 * cells * (w + cells + 1)
        attention = len(ATTENTION) * w * w * (2 if self.encoded else 1)
        return w * (self.d_model + 1) + lstm + attention + self.layers * self.experts * (w + 1)


class Attention(nn.Module):
    """Attention by SparseMax, with one head as wide as its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in ATTENTION)

    def of(self, x: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        """Returns the attention's output [rows, tokens, w]; x [rows, tokens, w], keys and values [rows, others, w],
        seen [rows, tokens or 1, others]."""
        scores = self.query(x) @ keys.transpose(1, 2) / x.shape[-1] ** 0.5
        return sparsemax(scores.masked_fill(~seen, -torch.inf)) @ values


class StackNetwork(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        self.compress = nn.Linear(shape.d_model, width)
        self.lstm = nn.ModuleList(
            nn.LSTM(width, width // 2 if shape.both_ways else width, batch_first=True, bidirectional=shape.both_ways)
            for _ in range(LSTM_LAYERS)
        )
        for name, bias in self.lstm.named_parameters():
            if "bias_hh" in name:  # one bias is enough
                nn.init.zeros_(bias)
                bias.requires_grad_(False)
        self.own = Attention(width)
        self.encoded = Attention(width) if shape.encoded else None
        self.heads = nn.Linear(width, shape.layers * shape.experts)

    def forward(
        self, rows: Tensor, real: Tensor, encoded: Encoded | None = None, past: Past | None = None
    ) -> tuple[Tensor, Tensor, Past]:
        """Returns the numbers of the heads [rows, tokens, layers, experts], y [rows, tokens, w], and the state that a
        decoder goes on from. rows [rows, tokens, d_model] of the embedding, real [rows, tokens]: which places hold a
        token; padding is at the right of a row."""
        x, states = self.compress(rows), []
        for place, lstm in enumerate(self.lstm):
            x, state = self._through(lstm, x, real, None if past is None else past.states[place])
            states.append(state)
        keys, values = self.own.key(x), self.own.value(x)
        if past is not None:
            keys, values = torch.cat([past.keys, keys], 1), torch.cat([past.values, values], 1)
        y = x + self.own.of(x, keys, values, self._seen(real, keys.shape[1]))
        if self.encoded is not None:
            assert encoded is not None
            e = encoded.y
            y = y + self.encoded.of(x, self.encoded.key(e), self.encoded.value(e), encoded.real[:, None])
        said = self.heads(y).unflatten(-1, (self.shape.layers, self.shape.experts))
        return said, y, Past(states, keys, values)

    def _seen(self, real: Tensor, others: int) -> Tensor:
        if self.shape.both_ways:
            return real[:, None]
        tokens = real.shape[1]
        return torch.ones((tokens, others), dtype=torch.bool).tril(others - tokens)[None]

    def _through(
        self, lstm: nn.Module, x: Tensor, real: Tensor, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns the LSTM's output and state. Padding at the right is read after all tokens of its row, or not at
        all."""
        if not self.shape.both_ways or real.all():
            found: tuple[Tensor, tuple[Tensor, Tensor]] = lstm(x, state)
            return found
        packed = nn.utils.rnn.pack_padded_sequence(x, real.sum(1), batch_first=True, enforce_sorted=False)
        through, after = lstm(packed)
        return nn.utils.rnn.pad_packed_sequence(through, batch_first=True, total_length=x.shape[1])[0], after


class Networks(nn.Module):
    """The networks of all stacks with experts. `scale` multiplies the rows of the embedding that they read, so that
    their numbers have the usual size; in a HashFunction it is part of `compress`."""

    def __init__(self, shapes: Mapping[StackName, Shape], scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.stacks = nn.ModuleDict({name: StackNetwork(shape) for name, shape in shapes.items()})

    def stack(self, name: StackName) -> StackNetwork:
        found = self.stacks[name]
        assert isinstance(found, StackNetwork)
        return found

    @property
    def names(self) -> list[StackName]:
        return [name for name in STACKS if name in self.stacks]

    def read(
        self, name: StackName, rows: Tensor, real: Tensor, encoded: Encoded | None = None, past: Past | None = None
    ) -> tuple[Tensor, Tensor, Past]:
        """Runs the network of a stack; see StackNetwork.forward."""
        found: tuple[Tensor, Tensor, Past] = self.stack(name)(rows * self.scale, real, encoded, past)
        return found

    def function(self, hits: Mapping[StackName, F32]) -> HashFunction:
        """Returns the networks as a hash function, stored in 16 bits."""
        experts = next(self.stack(name).shape.experts for name in self.names)
        return HashFunction(experts, {name: _stored(self.stack(name), self.scale, hits[name]) for name in self.names})

    @classmethod
    def of(cls, function: HashFunction) -> Networks:
        """Returns the networks of a stored hash function, not to be trained."""
        shapes = {name: _shape(name, stack) for name, stack in function.stacks.items()}
        found = cls(shapes)
        with torch.no_grad():
            for name, stack in function.stacks.items():
                _fill(found.stack(name), stack)
        return found.requires_grad_(False)


def _shape(name: StackName, stack: StackHash) -> Shape:
    layers, experts, _ = stack.heads.shape
    return Shape(stack.compress.shape[1], stack.width, layers, experts, len(stack.lstm[0]) > 1, bool(stack.encoded))


def _stored(network: StackNetwork, scale: float, hits: F32) -> StackHash:
    shape, heads = network.shape, network.heads
    lstm = tuple(
        tuple(_direction(layer, way) for way in (DIRECTIONS if shape.both_ways else DIRECTIONS[:1]))
        for layer in network.lstm
    )
    return StackHash(
        half(network.compress.weight * scale), half(network.compress.bias), lstm, _matrices(network.own),
        {} if network.encoded is None else _matrices(network.encoded),
        half(heads.weight).reshape(shape.layers, shape.experts, shape.width),
        half(heads.bias).reshape(shape.layers, shape.experts), hits,
    )  # fmt: skip


def _matrices(attention: Attention) -> dict[str, F16]:
    return {name: half(getattr(attention, name).weight) for name in ATTENTION}


def _direction(layer: nn.Module, way: str) -> Lstm:
    end = _SUFFIXES[way]
    bias = getattr(layer, f"bias_ih{end}") + getattr(layer, f"bias_hh{end}")
    recurrent = np.ascontiguousarray(half(getattr(layer, f"weight_hh{end}")).T)
    return Lstm(half(getattr(layer, f"weight_ih{end}")), half(bias), recurrent)


def _fill(network: StackNetwork, stack: StackHash) -> None:
    def put(parameter: Tensor, values: F16) -> None:
        parameter.copy_(torch.from_numpy(values.astype(np.float32)).reshape(parameter.shape))

    put(network.compress.weight, stack.compress)
    put(network.compress.bias, stack.compress_bias)
    for layer, parts in zip(network.lstm, stack.lstm, strict=True):
        for way, part in zip(DIRECTIONS, parts, strict=False):
            put(getattr(layer, f"weight_ih{_SUFFIXES[way]}"), part.inputs)
            put(getattr(layer, f"bias_ih{_SUFFIXES[way]}"), part.bias)
            put(getattr(layer, f"weight_hh{_SUFFIXES[way]}"), part.recurrent.T)
    for attention, matrices in ((network.own, stack.own), (network.encoded, stack.encoded)):
        for name, matrix in matrices.items():
            put(getattr(attention, name).weight, matrix)
    put(network.heads.weight, stack.heads)
    put(network.heads.bias, stack.head_bias)


# Routing by a hash function in the place of a model's routers: each token goes to the experts that the function names
# first. Its numbers for a stack's tokens are made before the stack's first layer runs, as in the runtime. They take the
# place of the router's numbers; all that follows is the router's own arithmetic.


@dataclass(frozen=True)
class HashRouting:
    """An Instead of moeconv.measure.trial that routes by a hash function."""

    function: HashFunction

    @cached_property
    def rule(self) -> Any:
        return ["hash", hashlib.sha256(self.function.to_bytes()).hexdigest()]

    @contextmanager
    def on(self, trial: Trial) -> Iterator[None]:
        with Following(trial, trial.checkpoint.description, self.function).routing():
            yield


def refusal(experts: Experts) -> str | None:
    """Returns why a hash function can't take the place of these experts' router; None where it can."""
    router = experts.router
    if not experts.chooses:
        return "would have no choice, as every token passes all experts of a layer"
    if router.score != "softmax":
        return f"takes the place of routers that choose by a softmax, and these choose by {router.score}"
    if router.by_token is not None:
        return "does not take the place of routers whose choice follows from the token alone"
    if router.identities:
        return "does not take the place of routers with numbers that stand for no expert"
    if router.overflow == "itself" or (router.capacity is not None and router.top_k > 1):
        return "does not take the place of routers of which experts that are full give what they got"
    return None


class Following:
    """The routing of a loaded model by a hash function, with the embedding and the routers' own factors that the model
    has when this is made."""

    def __init__(self, subject: Subject, description: Description, function: HashFunction) -> None:
        self._subject, self._networks = subject, Networks.of(function)
        self._embedding = parameter(subject.model, description, "embed.weight").float()
        spec = subject.spec
        self._layers = {at: router_of(subject.model, description, at) for at in spec.moe_layers()}
        self._places = {at: place for name in function.stacks for place, at in enumerate(spec.moe_layers(name))}
        self._said: dict[StackName, Tensor] = {}
        self._encoded: Encoded | None = None
        self._is_writing = False
        self._past: Past | None = None

    @contextmanager
    def routing(self) -> Iterator[None]:
        """Routes tokens by the hash function inside the block."""
        with ExitStack() as stack:
            for name in self._networks.names:
                tower = self._subject.family.tower(self._subject.model, name)
                stack.callback(tower.register_forward_pre_hook(partial(self._foretell, name), with_kwargs=True).remove)
            stack.enter_context(self._subject.calls.during(rerouting=self))
            yield

    @torch.inference_mode()
    def _foretell(self, name: StackName, module: Any, _: Any, named: dict[str, Any]) -> None:
        """Makes the function's numbers for the tokens of a stack before they go through its layers."""
        ids, calls = named["input_ids"], self._subject.calls
        real = torch.ones_like(ids, dtype=torch.bool) if calls.now.active is None else calls.now.active
        if name == "encoder":
            self._said[name], y, _past = self._networks.read(name, self._embedding[ids], real)
            self._encoded = Encoded(y, real)
            return
        encoded, rows = self._encoded, calls.now.attended
        if encoded is not None and rows is not None:
            encoded = Encoded(encoded.y[rows], encoded.real[rows])
        self._said[name], _, past = self._networks.read(name, self._embedding[ids], real, encoded, self._past)
        if self._is_writing:
            self._past = past

    @contextmanager
    def writing(self, sequences: int) -> Iterator[None]:
        """See Rerouting."""
        self._is_writing, before = True, self._encoded
        try:
            yield
        finally:
            self._is_writing, self._past, self._encoded = False, None, before

    def keep(self, rows: Tensor) -> None:
        """See Rerouting."""
        if self._past is not None:
            self._past = self._past.keep(rows)
        if self._encoded is not None:
            self._encoded = Encoded(self._encoded.y[rows], self._encoded.real[rows])

    def route(self, at: LayerKey, chosen: Tensor, weights: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """See Rerouting."""
        layer = self._layers[at]
        scores = scores_of(self._said[at.stack][:, :, self._places[at]], layer).flatten(0, 1)
        deciding = deciding_of(scores.numpy(), layer)
        found = torch.from_numpy(np.argsort(-deciding, axis=-1, kind="stable")[:, : layer.part.top_k].copy())
        if layer.part.capacity is None:
            return found, weights_of(scores, found, layer)
        return _within(layer.part.capacity, found, real), weights_of(scores, found, layer)


def _within(capacity: int, chosen: Tensor, real: Tensor) -> Tensor:
    """Returns chosen [tokens, 1] with -1 where an expert has had its `capacity` of tokens of the sequence; real
    [sequences, places]: which places hold a token."""
    mine = chosen.reshape(real.shape).masked_fill(~real, -1)
    asked = mine[..., None] == torch.arange(int(chosen.max()) + 1)
    before = asked.cumsum(1).gather(-1, mine.clamp(min=0)[..., None])[..., 0]
    return mine.masked_fill(before > capacity, -1).reshape(-1, 1)
