"""ModelSpec: all that the runtime must know of an architecture, as a tree of parts; and how its layers are named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Literal, NamedTuple

from moert.pack.parts import ROLES, Attention, Experts, Ffn, Latent, Narrow, PositionTable, Role, Rope, Stack, Tensor
from moert.pack.parts.base import Factor, Limit, matrix
from moert.pack.reading import MAX_COUNT, Within

MOST_TENSORS = 1 << 16
"""Outside the experts; a model of 61 layers with latent attention has 1,400."""
StackName = Literal["encoder", "decoder"]
STACKS: tuple[StackName, ...] = ("encoder", "decoder")


class LayerKey(NamedTuple):
    """Names one layer: which stack, and which of all its layers, whether these have experts or not."""

    stack: StackName
    layer: int

    @lru_cache(maxsize=1 << 16)  # noqa: B019 - keys are few, and asked for at every layer of every token
    def expert(self, number: int) -> ExpertKey:
        return ExpertKey(self.stack, self.layer, number)

    def __str__(self) -> str:
        return f"{self.stack[0].upper()}{self.layer:02d}"


class ExpertKey(NamedTuple):
    """Names one expert of a layer."""

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
    """From the last norm to logits: hidden · scale, times a matrix of its own or, if `tied`, the embedding; plus a
    bias. Logits become softcap · tanh(logit / softcap). If it is `projected`, hidden becomes
    silu(project · hidden + its bias) first."""

    tied: bool
    scale: Factor
    softcap: Limit = None
    bias: bool = False
    projected: bool = False


@dataclass(frozen=True)
class Tokens:
    """Special tokens. `start` is what an encoder–decoder's decoder reads first; `first` what it then writes, whatever
    is likeliest: of a model that translates, the language. Of a prompt that has `prefix_end`, the tokens before the
    first such see each other, those after themselves as well; all else sees what is before it."""

    bos: Annotated[int | None, Within(0, MAX_COUNT)]
    eos: Annotated[tuple[int, ...], Within(0, MAX_COUNT)]
    pad: Annotated[int | None, Within(0, MAX_COUNT)]
    start: Annotated[int | None, Within(0, MAX_COUNT)]
    first: Annotated[int | None, Within(0, MAX_COUNT)] = None
    prefix_end: Annotated[int | None, Within(0, MAX_COUNT)] = None


@dataclass(frozen=True)
class ModelSpec:
    """An architecture; the converter fills it from a family's config. With an encoder, every layer of the decoder also
    attends to what that has made of the input."""

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
        """Tokens after which there is room for one more; None for no limit. Behind an encoder, which reads the prompt,
        the decoder has positions of its own."""
        limit = self.max_positions
        return limit if limit is None or self.encoder is not None else limit - 1

    def room(self, prompt_tokens: int) -> int | None:
        """Tokens that can be written after a prompt of so many, which is not too long; None for no limit."""
        limit = self.max_positions
        return limit if limit is None or self.encoder is not None else limit - prompt_tokens

    @property
    def continues(self) -> bool:
        """Whether what it has read stays as it is when more comes: not behind an encoder, and not where the tokens of
        a prompt see each other."""
        return self.encoder is None and self.tokens.prefix_end is None

    def stack(self, name: StackName) -> Stack | None:
        return self.encoder if name == "encoder" else self.decoder

    @cached_property
    def stacks(self) -> dict[StackName, Stack]:
        """Those that the model has, in the order of execution."""
        return {name: stack for name in STACKS if (stack := self.stack(name)) is not None}

    @cached_property
    def experts(self) -> dict[LayerKey, Experts]:
        """Those of every layer that has some, in the order of execution."""
        return {
            LayerKey(name, layer): ffn
            for name, stack in self.stacks.items()
            for layer in range(len(stack))
            if isinstance(ffn := stack[layer].ffn, Experts)
        }

    @property
    def moe(self) -> Experts:
        """What all layers with experts have alike: see `contradictions`."""
        return next(iter(self.experts.values()))

    def moe_layers(self, name: StackName | None = None) -> list[LayerKey]:
        """Every layer with experts, in the order of execution; of one stack if it is named."""
        return [at for at in self.experts if name in (None, at.stack)]

    def expert_keys(self) -> list[ExpertKey]:
        """Every expert, in the order of execution."""
        return [at.expert(number) for at, experts in self.experts.items() for number in range(experts.n)]

    @property
    def expert_width(self) -> int:
        """Features that an expert gets and gives."""
        return self.moe.width(self.d_model)

    def projection_shape(self, projection: str) -> tuple[int, int]:
        """(out_features, in_features) of one projection of an expert."""
        return self.moe.ffn.shape(projection, self.expert_width)

    def weights_per_expert(self) -> int:
        return len(self.moe.ffn.projections) * self.expert_width * self.moe.ffn.d_ff

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that stays in memory, by its canonical name: the contract of backbone.safetensors."""
        return {tensor.name: tensor for tensor in self._tensors()}

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
        """The roles that the model has matrices of."""
        found = {tensor.role for tensor in self.tensors.values()}
        return tuple(role for role in ROLES if role in found)

    def contradictions(self) -> Iterator[str]:
        """What parts that are each legal say together, and no model can have."""
        for name, stack in self.stacks.items():
            for contradiction in stack.contradictions():
                yield f"in the {name}, {contradiction}"
                return
        count = sum(stack.n_tensors(self.d_model) for stack in self.stacks.values())
        if count > MOST_TENSORS:
            yield f"it has {count} tensors outside the experts, it should have at most {MOST_TENSORS}"
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
            for attention in (kind.attention for kind in stack.kinds):
                if attention is None or attention.rope is None:
                    continue
                if attention.rope >= len(self.ropes):
                    yield f"in the {name}, a layer has rope {attention.rope}, there are {len(self.ropes)}"
                elif (dims := self.ropes[attention.rope].dims) > attention.turning or (
                    isinstance(attention, Latent) and dims != attention.turning
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
    """What a layer can't have whose tokens see those after them."""
    for attention in (kind.mixer for kind in stack.kinds):
        if not isinstance(attention, Attention):
            return _called(attention)
        if attention.window is not None or attention.chunk is not None:
            return "a window"
    return None


def _called(mixer: object) -> str:
    """Of those that are no attention to keys of their own."""
    if isinstance(mixer, Latent):
        return "latent attention"
    return "no mixer" if mixer is None else "a mixer with a state of fixed size"


def _alike(experts: Experts) -> tuple[int, Ffn, int, Narrow | None]:
    """What experts of all layers must share: caches, tables and budgets count on it."""
    return experts.n, experts.ffn, experts.router.top_k, experts.narrow
