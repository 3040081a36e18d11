"""An architecture as a tree of parts: layers, stacks of them, and how layers are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeVar

from moert.pack.documents import MAX_COUNT, Within, extended
from moert.pack.mixers import FixedState, Pooled, Stateful
from moert.pack.parts import (
    DIGITS,
    MOST,
    MOST_FEATURES,
    MOST_IDS,
    MOST_WORD,
    ROLES,
    Attention,
    Buckets,
    Experts,
    Factor,
    Ffn,
    GatedStreams,
    Latent,
    Limit,
    Narrow,
    Ngrams,
    Norm,
    PositionTable,
    Role,
    Rope,
    Shapes,
    Streams,
    Tensor,
    matrix,
)

MOST_LAYERS = 4096
T = TypeVar("T")


@dataclass(frozen=True)
class Join:
    """The way in which the output of a part joins the stream: x += add · after(output)."""

    after: Norm | None = None
    add: Factor = 1.0

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        if self.after is not None:
            yield from self.after.tensors(at, d_model)


@dataclass(frozen=True)
class Layer:
    """One layer. mixer(norm(x)) joins the stream x, if the layer has a mixer; in a decoder that reads an encoder's
    output x += cross(norm(x), output); ffn(norm(x)) joins x, if the layer has an ffn; and if it is `scaled`, at the end
    x *= a number of its own. Without a norm all parts get x as it is. `positions` are added to x before. If the layer
    is `parallel`, its ffn gets the norm of the x that its mixer got. `ngrams` join the streams before."""

    LEFT_OUT: ClassVar = ("parallel", "streams", "ngrams")
    norm: Norm | None
    mixer: Attention | Latent | Stateful | None
    cross: Attention | None
    ffn: Ffn | Experts | None
    mixer_join: Join = Join()
    ffn_join: Join = Join()
    scaled: bool = False
    positions: PositionTable | None = None
    parallel: bool = False
    streams: Streams | GatedStreams | None = None
    ngrams: Ngrams | None = None

    @property
    def attention(self) -> Attention | Latent | None:
        """Returns the layer's mixer, if it keeps keys and values."""
        return self.mixer if isinstance(self.mixer, (Attention, Latent)) else None

    @property
    def attends(self) -> Attention | Latent | Pooled | None:
        """Returns the layer's mixer, if it attends to tokens before, or to pools of them."""
        return self.mixer if isinstance(self.mixer, (Attention, Latent, Pooled)) else None

    @property
    def buckets(self) -> Buckets | None:
        return None if self.attention is None else self.attention.buckets

    @property
    def inner_norm(self) -> Norm | None:
        """Returns the norm whose eps those of heads have: the layer's or, without one, that behind its mixer or of its
        streams."""
        own = self.streams.norm if isinstance(self.streams, GatedStreams) else None
        return self.norm or self.mixer_join.after or own

    @property
    def adds_experts(self) -> bool:
        """Returns whether the experts' output is added to the stream as it is, but for a factor."""
        experts = self.ffn
        if not isinstance(experts, Experts) or experts.beside is not None or experts.narrow is not None:
            return False
        if experts.bypass or experts.router.overflow == "itself" or self.streams is not None:
            return False
        return self.ffn_join.after is None and not self.scaled

    @property
    def extended(self) -> bool:
        """Returns whether a part has a field that its class names in LEFT_OUT: gates of heads, decays by feature,
        bounds behind activations, shortcuts, choices that return their input."""
        return any(extended(getattr(self, field.name)) for field in fields(self))

    @property
    def pools(self) -> bool:
        """Returns whether a part came with attention to pools: that itself, routers by token or of √softplus, streams
        that end in a weighted sum."""
        router = self.ffn.router if isinstance(self.ffn, Experts) else None
        routes = router is not None and (router.by_token is not None or router.score == "sqrt_softplus")
        return isinstance(self.mixer, Pooled) or routes or (isinstance(self.streams, Streams) and self.streams.weighed)

    def state_shapes(self, d_model: int) -> Shapes:
        """Returns the shapes of the arrays of its recurrent state: those of its mixer first."""
        found = self.mixer.state_shapes(d_model) if isinstance(self.mixer, Stateful) else ()
        if self.ngrams is None or self.streams is None:
            return found
        return *found, *self.ngrams.state_shapes(self.streams.n * d_model)

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        if self.positions is not None:
            yield from self.positions.tensors(at, d_model)
        if self.ngrams is not None and self.streams is not None:
            yield from self.ngrams.tensors(f"{at}.ngrams", d_model, self.streams.n)
        if self.mixer is not None:
            yield from self._streams(f"{at}.mixer_streams", d_model)
            yield from self._norm(f"{at}.mixer_norm", d_model)
            yield from self.mixer.tensors(f"{at}.{'mixer' if self.attention is None else 'attn'}", d_model)
            yield from self.mixer_join.tensors(f"{at}.mixer_after", d_model)
        if self.cross is not None:
            yield from self._norm(f"{at}.cross_norm", d_model)
            yield from self.cross.tensors(f"{at}.cross", d_model)
        if self.ffn is not None:
            yield from self._streams(f"{at}.ffn_streams", d_model)
            yield from self._norm(f"{at}.ffn_norm", d_model)
            yield from self.ffn.tensors(f"{at}.ffn" if isinstance(self.ffn, Ffn) else at, d_model)
            yield from self.ffn_join.tensors(f"{at}.ffn_after", d_model)
        if self.scaled:
            yield Tensor(f"{at}.scale", (1,))

    def _norm(self, at: str, d_model: int) -> Iterator[Tensor]:
        if self.norm is not None:
            yield from self.norm.tensors(at, d_model)

    def _streams(self, at: str, d_model: int) -> Iterator[Tensor]:
        if self.streams is not None:
            yield from self.streams.tensors(at, d_model)

    def contradictions(self) -> Iterator[str]:
        if self.mixer is None and self.ffn is None:
            yield "a layer has neither a mixer nor a feed-forward, so that it would do nothing"
        for part, join in ((self.mixer, self.mixer_join), (self.ffn, self.ffn_join)):
            if part is not None:
                yield from part.contradictions()
            elif join != Join():
                yield "a layer says how something joins that it has not"
        if isinstance(self.mixer, Pooled) and (self.norm is None or self.mixer_join != Join()):
            yield "attention to pools has no norm before it, or does not join by a plain sum"
        if isinstance(self.ffn, Experts) and self.ffn.shortcut and self.ffn_join != Join():
            yield "experts take a shortcut, and do not join by a plain sum"
        if self.cross is not None:
            yield from self.cross.contradictions()
            if (self.cross.rope, self.cross.buckets, self.cross.stretch) != (None, None, None):
                yield "attention to the encoder's output has positions, which that output has not"
            if self.cross.window is not None or self.cross.chunk is not None:
                yield "attention to the encoder's output has a window, and all of it is before every token"
        own = isinstance(self.ffn, Experts) and self.ffn.router.own_norm
        if (own and self.norm is None) or (self._norms_heads and self.inner_norm is None):
            yield "a part of a layer has norms with the eps of the layer's, which it has not"
        if self.positions is not None and self.positions.skips_pad:
            yield "the positions of a layer skip the pad token, which only those of a stack do"
        if self.parallel and (self.mixer is None or self.ffn is None or self.cross is not None):
            yield "a parallel layer needs a mixer and a feed-forward, and has no attention to an encoder"
        if self.streams is not None:
            yield from self._unfit_for_streams()
        if self.ngrams is not None:
            yield from self.ngrams.contradictions()
            if self.streams is None or not isinstance(self.mixer, FixedState):
                yield "a layer has tokens together, and no streams that they join, or no mixer with a fixed state"

    def _unfit_for_streams(self) -> Iterator[str]:
        if isinstance(self.streams, GatedStreams):
            yield from self.streams.contradictions()
        elif self.norm is None:
            yield "a layer has streams whose weights have the eps of the layer's norm, which it has not"
        if self.parallel or self.scaled or self.positions is not None or self.cross is not None:
            yield "a layer with streams is parallel or scaled, or has positions or attention to an encoder"
        if isinstance(self.ffn, Experts) and self.ffn.shortcut:
            yield "the experts of a layer with streams take a shortcut past the next layer"

    @property
    def _norms_heads(self) -> bool:
        heads = [each for each in (self.mixer, self.cross) if isinstance(each, Attention)]
        return any(each.qk_norm is not None or each.v_norm for each in heads)


@dataclass(frozen=True)
class Stack:
    """A stack of layers: `layers` names for each layer the one of `kinds` that it is; a norm ends the stack, if it has
    one. `positions` are added to its input."""

    kinds: tuple[Layer, ...]
    layers: Annotated[tuple[int, ...], Within(0, MOST)]
    norm: Norm | None
    positions: PositionTable | None = None

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> Layer:
        return self.kinds[self.layers[layer]]

    @property
    def buckets(self) -> Buckets | None:
        """Returns the buckets of its layers' own attention, which share one table."""
        return next((kind.buckets for kind in self.kinds if kind.buckets is not None), None)

    @property
    def streams(self) -> Streams | GatedStreams | None:
        """Returns the streams that all its layers have."""
        return self.kinds[0].streams

    def n_tensors(self, d_model: int) -> int:
        """Returns the number of its layers' tensors, without naming each."""
        each = [sum(1 for _ in kind.tensors("", d_model)) for kind in self.kinds]
        return sum(each[kind] for kind in self.layers)

    def tensors(self, at: str, d_model: int) -> Iterator[Tensor]:
        if self.norm is not None:
            yield from self.norm.tensors(f"{at}.norm", d_model)
        if self.positions is not None:
            yield from self.positions.tensors(at, d_model)
        if (buckets := self.buckets) is not None:
            heads = next(kind.attention.n for kind in self.kinds if kind.buckets is not None and kind.attention)
            yield Tensor(f"{at}.relative_bias.weight", (buckets.n, heads))
        if self.streams is not None:
            yield from self.streams.end_tensors(f"{at}.streams", d_model)
        for layer in range(len(self)):
            yield from self[layer].tensors(f"{at}.{layer}", d_model)

    def contradictions(self) -> Iterator[str]:
        if not self.layers or not self.kinds or max(len(self.layers), len(self.kinds)) > MOST_LAYERS:
            yield f"there are {len(self.layers)} layers of {len(self.kinds)} kinds, it should be 1 to {MOST_LAYERS}"
            return
        if max(self.layers) >= len(self.kinds):
            yield f"a layer is of kind {max(self.layers)}, there are {len(self.kinds)} kinds"
            return
        for kind in self.kinds:
            yield from kind.contradictions()
        biased = {(kind.buckets, kind.attention.n) for kind in self.kinds if kind.buckets and kind.attention}
        if len(biased) > 1:
            yield "its layers have distance biases of several sizes, but share one table"
        if len({kind.streams for kind in self.kinds}) > 1:
            yield "its layers differ in their streams, which go through all of them"
        last = self[len(self) - 1].ffn
        if isinstance(last, Experts) and last.shortcut:
            yield "the experts of the last layer take a shortcut past the next layer, and there is none"


def stack_of(layers: Sequence[Layer], norm: Norm | None) -> Stack:
    """Returns a stack of these layers, each kind of which it has once."""
    kinds = list(dict.fromkeys(layers))
    return Stack(tuple(kinds), tuple(kinds.index(layer) for layer in layers), norm)


MOST_TENSORS = 1 << 16
"""The most tensors outside the experts; a model of 61 layers with latent attention has 1,400."""
StackName = Literal["encoder", "decoder"]
STACKS: tuple[StackName, ...] = ("encoder", "decoder")


class LayerKey(NamedTuple):
    """The name of one layer: its stack, and its number among all layers of the stack, with or without experts."""

    stack: StackName
    layer: int

    @lru_cache(maxsize=1 << 16)  # noqa: B019 - keys are few, and every layer of every token needs some
    def expert(self, number: int) -> ExpertKey:
        return ExpertKey(self.stack, self.layer, number)

    def __str__(self) -> str:
        return f"{self.stack[0].upper()}{self.layer:02d}"


class ExpertKey(NamedTuple):
    """The name of one expert of a layer."""

    stack: StackName
    layer: int
    expert: int

    @property
    def at(self) -> LayerKey:
        return LayerKey(self.stack, self.layer)

    def __str__(self) -> str:
        return f"{self.at}/E{self.expert:03d}"


@dataclass(frozen=True)
class Head:
    """The last step, from the last norm to logits: hidden · scale, times a matrix of its own or, if `tied`, the
    embedding; plus a bias. Logits become softcap · tanh(logit / softcap). If it is `projected`, hidden becomes
    silu(project · hidden + its bias) first."""

    tied: bool
    scale: Factor
    softcap: Limit = None
    bias: bool = False
    projected: bool = False


@dataclass(frozen=True)
class Tokens:
    """Special tokens. The decoder of an encoder–decoder reads `start` first, and then writes `first` whatever is
    likeliest: the language, in a model that translates. In a prompt with `prefix_end`, the tokens before the first
    `prefix_end` all see each other, later ones as well; any other token sees itself and the tokens before it."""

    bos: Annotated[int | None, Within(0, MAX_COUNT)]
    eos: Annotated[tuple[int, ...], Within(0, MAX_COUNT)]
    pad: Annotated[int | None, Within(0, MAX_COUNT)]
    start: Annotated[int | None, Within(0, MAX_COUNT)]
    first: Annotated[int | None, Within(0, MAX_COUNT)] = None
    prefix_end: Annotated[int | None, Within(0, MAX_COUNT)] = None


@dataclass(frozen=True)
class ModelSpec:
    """An architecture; the converter fills it from a family's config. With an encoder, every layer of the decoder also
    attends to the encoder's output."""

    family: str
    vocab_size: Annotated[int, Within(1, MAX_COUNT)]
    d_model: Annotated[int, Within(1, MAX_COUNT)]
    encoder: Stack | None
    decoder: Stack
    ropes: tuple[Rope, ...]
    head: Head
    tokens: Tokens
    max_positions: Annotated[int | None, Within(0, MAX_COUNT)]
    embed_scale: Factor = 1.0

    @property
    def longest_prompt(self) -> int | None:
        """Returns the number of tokens after which there is room for one more; None for no limit. Behind an encoder,
        which reads the prompt, the decoder has positions of its own."""
        limit = self.max_positions
        return limit if limit is None or self.encoder is not None else limit - 1

    def room(self, prompt_tokens: int) -> int | None:
        """Returns the number of tokens that can be written after a prompt of `prompt_tokens`, which is not too long;
        None for no limit."""
        limit = self.max_positions
        return limit if limit is None or self.encoder is not None else limit - prompt_tokens

    @property
    def continues(self) -> bool:
        """Returns whether a sequence's state stays as it is when more tokens come: not behind an encoder, and not where
        the tokens of a prompt see each other."""
        return self.encoder is None and self.tokens.prefix_end is None

    @property
    def stream_width(self) -> int:
        """Returns the number of features of a token between two layers, in all of its streams together, and of its
        number, where layers embed tokens together or a table names experts by it."""
        streams = self.decoder.streams
        named = bool(self.tables) or any(each.router.by_token is not None for each in self.experts.values())
        return (1 if streams is None else streams.n) * self.d_model + DIGITS * named

    def stack(self, name: StackName) -> Stack | None:
        return self.encoder if name == "encoder" else self.decoder

    @cached_property
    def stacks(self) -> dict[StackName, Stack]:
        """Returns the stacks that the model has, in the order of execution."""
        return {name: stack for name in STACKS if (stack := self.stack(name)) is not None}

    @cached_property
    def experts(self) -> dict[LayerKey, Experts]:
        """Returns the experts of every layer that has some, in the order of execution."""
        return {
            LayerKey(name, layer): ffn
            for name, stack in self.stacks.items()
            for layer in range(len(stack))
            if isinstance(ffn := stack[layer].ffn, Experts)
        }

    @property
    def moe(self) -> Experts:
        """Returns the experts of the first layer that has some: number, shape, top_k and width are those of all layers,
        see `contradictions`; a bound of the activation is not."""
        return next(iter(self.experts.values()))

    def moe_layers(self, name: StackName | None = None) -> list[LayerKey]:
        """Returns every layer with experts, in the order of execution; of one stack if it is named."""
        return [at for at in self.experts if name in (None, at.stack)]

    def of_stacks(self, shape: Callable[[int], T]) -> dict[StackName, T]:
        """Returns for each stack with experts the result of `shape` for its number of layers with experts."""
        counts = {name: len(self.moe_layers(name)) for name in STACKS}
        return {name: shape(count) for name, count in counts.items() if count}

    def expert_keys(self) -> list[ExpertKey]:
        """Returns the key of every expert, in the order of execution."""
        return [at.expert(number) for at, experts in self.experts.items() for number in range(experts.n)]

    @property
    def expert_width(self) -> int:
        """Returns the number of features of an expert's input and output."""
        return self.moe.width(self.d_model)

    def projection_shape(self, projection: str) -> tuple[int, int]:
        """Returns (out_features, in_features) of one projection of an expert."""
        return self.moe.ffn.shape(projection, self.expert_width)

    def weights_per_expert(self) -> int:
        return len(self.moe.ffn.projections) * self.expert_width * self.moe.ffn.d_ff

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Returns every tensor that stays in memory, by its canonical name: the contract of backbone.safetensors."""
        return {tensor.name: tensor for tensor in self._tensors()}

    @cached_property
    def tables(self) -> dict[str, Tensor]:
        """Returns every tensor that stays on the drive, by its canonical name: the contract of ngrams.safetensors."""
        kinds = enumerate(self.decoder.layers)
        parts = [(f"decoder.{layer}.ngrams", self.decoder.kinds[kind].ngrams) for layer, kind in kinds]
        tables = [part.table(at) for at, part in parts if part is not None]
        return {table.name: table for table in tables}

    def _tensors(self) -> Iterator[Tensor]:
        tied = self.head.tied
        yield Tensor("embed.weight", (self.vocab_size, self.d_model), "head" if tied else "embed")
        if not tied:
            yield Tensor("head.weight", (self.vocab_size, self.d_model), "head")
        if self.head.bias:
            yield Tensor("head.bias", (self.vocab_size,))
        if self.head.projected:
            yield from matrix("head.project", (self.d_model, self.d_model), "head", bias=True)
        for place, rope in enumerate(self.ropes):
            yield from rope.tensors(f"rope.{place}")
        for name, stack in self.stacks.items():
            yield from stack.tensors(name, self.d_model)

    def roles(self) -> tuple[Role, ...]:
        """Returns the roles that the model has matrices of."""
        found = {tensor.role for tensor in self.tensors.values()}
        return tuple(role for role in ROLES if role in found)

    def contradictions(self) -> Iterator[str]:
        """Yields contradictions between parts that are each legal, which no model can have."""
        for name, stack in self.stacks.items():
            for contradiction in stack.contradictions():
                yield f"in the {name}, {contradiction}"
                return
        count = sum(stack.n_tensors(self.d_model) for stack in self.stacks.values())
        if count > MOST_TENSORS:
            yield f"it has {count} tensors outside the experts, it should have at most {MOST_TENSORS}"
            return
        if (streams := self.decoder.streams) is not None and streams.n * self.d_model > MOST_FEATURES:
            most = MOST_FEATURES // self.d_model
            yield f"it has {streams.n} streams of {self.d_model} features, it should have at most {most}"
            return
        if self.encoder is not None and self.encoder.streams is not None:
            yield "in the encoder, a layer has streams, which only decoders have"
            return
        for ngrams in (kind.ngrams for kind in self.decoder.kinds if kind.ngrams is not None):
            largest = max(self.vocab_size - 1, ngrams.end) * max(ngrams.multipliers)
            if self.vocab_size > MOST_IDS or ngrams.end >= self.vocab_size or largest > MOST_WORD:
                yield f"its tokens together are for fewer than {self.vocab_size} tokens, or for other ones"
                return
        if self.encoder is not None and (why := _unfit(self.encoder)) is not None:
            yield f"in the encoder, a layer has {why}, which only decoders have"
            return
        if not self.experts:
            yield "it has no layer with experts: such a pack can't exist"
            return
        for at, experts in self.experts.items():
            if experts != self.moe and _alike(experts) != _alike(self.moe):
                yield f"the experts of layer {at} have another number or shape than those of the first such layer"
                return
        if any(experts.router.by_token not in (None, self.vocab_size) for experts in self.experts.values()):
            yield f"a router's table is not of the model's {self.vocab_size} tokens"
        if self.encoder is not None and any(experts.router.by_token is not None for experts in self.experts.values()):
            yield "a router's table names experts by tokens, and there is an encoder"
        yield from self._positions()
        yield from self._reading()

    def _positions(self) -> Iterator[str]:
        for place, rope in enumerate(self.ropes):
            for contradiction in rope.contradictions():
                yield f"rope {place}: {contradiction}"
        for name, stack in self.stacks.items():
            for positions in (stack.positions, *(kind.positions for kind in stack.kinds)):
                if positions is not None:
                    yield from self._added(name, positions)
            for attention in (kind.attends for kind in stack.kinds):
                if attention is None or attention.rope is None:
                    continue
                if attention.rope >= len(self.ropes):
                    yield f"in the {name}, a layer has rope {attention.rope}, there are {len(self.ropes)}"
                elif (dims := self.ropes[attention.rope].dims) > attention.turning or (
                    isinstance(attention, (Latent, Pooled)) and dims != attention.turning
                ):
                    yield f"rope {attention.rope} turns {dims} features of {attention.turning}"

    def _added(self, name: StackName, positions: PositionTable) -> Iterator[str]:
        if self.max_positions is None or self.max_positions > positions.n:
            most = "any number of" if self.max_positions is None else self.max_positions
            yield f"the {name} has positions for {positions.n} tokens, the model takes {most}"
        if positions.skips_pad and self.tokens.pad is None:
            yield f"the positions of the {name} skip the pad token, and there is none"

    def _reading(self) -> Iterator[str]:
        crossing = {kind.cross is not None for kind in self.decoder.kinds}
        if self.tokens.prefix_end is not None and (why := self._unfit_for_prefix()) is not None:
            yield f"the tokens of a prompt's beginning see each other, and {why}"
        if self.encoder is None:
            if True in crossing:
                yield "the decoder attends to an encoder's output, and there is no encoder"
            if self.tokens.first is not None:
                yield "a first token is given, which is for what a decoder writes behind an encoder, and there is none"
            return
        if False in crossing:
            yield "there is an encoder that not all layers of the decoder attend to"
        if any(kind.cross is not None for kind in self.encoder.kinds):
            yield "the encoder attends to an encoder's output"
        start = self.tokens.start
        if start is None or start >= self.vocab_size:
            yield f"its start token is {start}, the decoder starts with a token below {self.vocab_size}"
        first = self.tokens.first
        if first is not None and first >= self.vocab_size:
            yield f"its first token is {first}, the decoder writes tokens below {self.vocab_size}"

    def _unfit_for_prefix(self) -> str | None:
        if self.encoder is not None:
            return "there is an encoder, which reads the prompt"
        if (why := _unfit(self.decoder)) is not None:
            return f"a layer has {why}"
        return None if self.decoder.buckets is None else "a bias by distance is for keys before the query alone"


def _unfit(stack: Stack) -> str | None:
    """Returns, in words, a part that a layer can't have whose tokens see later tokens; None if the stack has none."""
    for attention in (kind.mixer for kind in stack.kinds):
        if not isinstance(attention, Attention):
            return _called(attention)
        if attention.window is not None or attention.chunk is not None:
            return "a window"
    return None


def _called(mixer: object) -> str:
    """Returns the words for a mixer that is not attention to keys of its own."""
    if isinstance(mixer, Latent):
        return "latent attention"
    return "no mixer" if mixer is None else "a mixer with a state of fixed size"


def _alike(experts: Experts) -> tuple[int, Ffn, int, Narrow | None]:
    """Returns the properties that experts of all layers must share: caches, tables and budgets count on it."""
    ffn = replace(experts.ffn, act=replace(experts.ffn.act, bound=None))
    return experts.n, ffn, experts.router.top_k, experts.narrow
