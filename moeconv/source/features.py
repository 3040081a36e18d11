"""What a model's parts are, in words: one short phrase for each thing that not all families have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moert.pack.model_spec import Layer, ModelSpec, Stack
from moert.pack.parts import Attention, Experts, Ffn, FixedState, GatedDelta, Latent, Mamba, Mamba2, Router, ShortConv


def features(spec: ModelSpec) -> list[str]:
    """Phrases without an order of rank; each says a thing once, of however many layers."""
    layers = [stack[at] for stack in spec.stacks.values() for at in range(len(stack))]
    mixers = [*_fixed_states(layers), *_attention(layers), *_positions(spec, layers)]
    return list(dict.fromkeys([*mixers, *_experts(spec, layers), *_stream(spec, layers)]))


def _fixed_states(layers: Sequence[Layer]) -> Iterator[str]:
    for part in dict.fromkeys(layer.mixer for layer in layers):
        if isinstance(part, FixedState):
            count = sum(layer.mixer == part for layer in layers)
            yield f"{_fixed(part)} in place of attention in {count} of {len(layers)} layers"


def _fixed(part: FixedState) -> str:
    if isinstance(part, ShortConv):
        return f"convolutions over {part.taps} tokens"
    if isinstance(part, GatedDelta):
        return f"gated delta rules of {part.n} heads"
    if isinstance(part, Mamba2):
        return f"Mamba-2 of {part.n} heads with {part.state} numbers a feature"
    assert isinstance(part, Mamba)
    return f"Mamba of {part.features} channels with {part.state} numbers each"


def _attention(layers: Sequence[Layer]) -> Iterator[str]:
    for part in dict.fromkeys(layer.mixer for layer in layers):
        if isinstance(part, Latent):
            yield f"latent attention of {part.kv_rank} + {part.turning} features a token"
        elif isinstance(part, Attention):
            yield from _heads(part)
    for what in ("window", "chunk"):
        sizes = [size for layer in layers if (size := getattr(layer.mixer, what, None)) is not None]
        if sizes:
            named = " or ".join(map(str, sorted(set(sizes))))
            yield f"{what}s of {named} tokens in {len(sizes)} of {len(layers)} layers"


def _heads(part: Attention) -> Iterator[str]:
    yield f"{part.n} heads" if part.n == part.kv else f"{part.n} heads, {part.kv} of keys"
    if part.qk_norm is not None:
        turned = ", after they turn" if part.norm_turned else ""
        yield f"queries and keys normed {'as a whole' if part.qk_norm == 'whole' else 'by head'}{turned}"
    if part.v_norm:
        yield "values normed by head"
    if part.biases is not None:
        yield f"biases of {', '.join(part.biases).replace('g', 'gate')}"
    if part.sinks:
        yield "attention sinks"
    if part.gate:
        yield "a gate on what heads give"
    if part.stretch is not None:
        yield "queries that look more sharply from far on"
    if part.clip is not None:
        yield f"queries, keys and values within {part.clip:g}"
    if part.softcap is not None:
        yield f"scores within {part.softcap:g}"


def _positions(spec: ModelSpec, layers: Sequence[Layer]) -> Iterator[str]:
    if any(stack.buckets is not None for stack in spec.stacks.values()):
        yield "positions by buckets of distances"
    for n in dict.fromkeys(stack.positions.n for stack in spec.stacks.values() if stack.positions is not None):
        yield f"a table of {n} positions"
    if any(layer.positions is not None for layer in layers):
        yield "a table of positions of some layers' own"
    for part in dict.fromkeys(layer.attention for layer in layers):
        if part is not None and part.rope is not None and (dims := spec.ropes[part.rope].dims) < part.turning:
            yield f"rotary positions of {dims} of {part.turning} features"
    if without := sum(_has_no_positions(stack, at) for stack in spec.stacks.values() for at in range(len(stack))):
        yield f"no positions in {without} of {len(layers)} layers"


def _has_no_positions(stack: Stack, layer: int) -> bool:
    attention, own = stack[layer].attention, stack[layer].positions
    unturned = attention is not None and attention.rope is None
    return unturned and own is None and stack.positions is None and stack.buckets is None


def _experts(spec: ModelSpec, layers: Sequence[Layer]) -> Iterator[str]:
    experts = [layer.ffn for layer in layers if isinstance(layer.ffn, Experts)]
    if dense := len(layers) - len(experts):
        yield f"{dense} of {len(layers)} layers without experts"
    for part in dict.fromkeys(experts):
        if part.n == 1:
            yield "one network a layer, which is its only expert"
        else:
            yield from _router(part.router)
        if part.shared is not None:
            yield f"a shared expert of width {part.shared.d_ff}{' with a gate' if part.shared_gate else ''}"
        if part.narrow is not None:
            yield f"experts that see {part.narrow.features} features in place of {spec.d_model}"
        if part.bypass:
            yield "a projection beside the experts"
        if part.beside is not None:
            yield f"a network of width {part.beside.ffn.d_ff} beside the experts"
        yield from _network(part.ffn)


_ROUTERS = {
    "softmax": "softmax", "sigmoid": "sigmoid", "sigmoid_of_chosen": "sigmoid",
    "sparsemixer": "a sparsemixer in place of",
}  # fmt: skip


def _router(part: Router) -> Iterator[str]:
    yield f"{_ROUTERS[part.score]} routers{' with biases' if part.bias else ''}"
    if part.choice_bias:
        yield "a bias for the choice of experts"
    if part.groups is not None and part.groups.n > 1:
        yield f"experts of {part.groups.best} of {part.groups.n} groups"
    if part.capacity is not None:
        kept = ", of which others keep what they are" if part.overflow == "itself" else ""
        yield f"at most {part.capacity} tokens an expert{kept}"
    if part.own_norm:
        yield "a norm of the routers' own"
    if part.weigh == "input":
        yield "weights on what experts get"


def _network(part: Ffn) -> Iterator[str]:
    gated = "" if part.gated else " without gates"
    yield f"{part.act.name} experts{gated}{' with biases' if part.bias else ''}"
    if part.act.limit is not None:
        yield f"gates within {part.act.limit:g}"


def _stream(spec: ModelSpec, layers: Sequence[Layer]) -> Iterator[str]:
    if spec.encoder is not None:
        yield "an encoder"
    norms = [layer.norm or layer.mixer_join.after or layer.ffn_join.after for layer in layers]
    if any(norm is not None and norm.kind == "layer" for norm in norms):
        yield "LayerNorms with biases"
    if any(layer.norm is None for layer in layers):
        yield "no norms before attention and experts"
    if any(layer.mixer_join.after is not None or layer.ffn_join.after is not None for layer in layers):
        yield "norms after attention and experts"
    if any(layer.scaled or (layer.mixer_join.add, layer.ffn_join.add) != (1, 1) for layer in layers):
        yield "factors of the stream"
    if spec.embed_scale != 1:
        yield "a factor of the embedding"
    if spec.head.tied:
        yield "a tied head"
    if spec.head.bias:
        yield "a head with a bias"
    if spec.head.projected:
        yield "a projection before the head"
    if spec.tokens.prefix_end is not None:
        yield f"a prompt's beginning, up to token {spec.tokens.prefix_end}, that sees itself whole"
    if spec.head.softcap is not None:
        yield f"logits within {spec.head.softcap:g}"
