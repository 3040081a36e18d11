"""Whole packs with random weights that the engine can run: experts of mixed widths, backbone, tokenizer, paths."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from moeconv.matrices import Projection
from moeconv.routes import build
from moeconv.writer import Files, PackWriter, add_to_pack
from moert.engine.engine import Engine
from moert.kernels.backend import I64
from moert.pack.codec import (
    F32,
    Codes,
    QuantizedMatrix,
    Width,
    from_bfloat16,
    n_groups,
    pack_codes,
    to_bfloat16,
    unpack_codes,
)
from moert.pack.layout import Neurons, group_of
from moert.pack.manifest import Dense, Preference, Quantization, dense_width
from moert.pack.mixers import GatedDelta, Indexer, Mamba, Mamba2, Pooled, Pools, ShortConv
from moert.pack.model_spec import ExpertKey, Head, Join, Layer, LayerKey, ModelSpec, Stack, stack_of
from moert.pack.parts import (
    Act,
    Attention,
    Experts,
    Ffn,
    GatedStreams,
    Ngrams,
    Norm,
    PositionTable,
    Rope,
    Router,
    Streams,
)
from moert.pack.paths import PATHS
from moert.pack.reader import Pack
from tests.random_packs import random_biases, random_trellis, write_tables
from tests.shapes import Shape, every, frequencies

VOCAB, PAD, EOS, UNKNOWN = 64, 0, 1, 2
DECODER_SHAPE = Shape(
    VOCAB, d_model=24, n_heads=4, n_kv_heads=2, head_dim=6, decoder=(True, True, False, True), num_experts=8, top_k=2,
    d_ff=20, scale=0.408, qk_norm=True, max_positions=400, eos=(EOS,), pad=PAD, family="olmoe",
)  # fmt: skip
SWITCH_SHAPE = Shape(
    VOCAB, d_model=24, n_heads=4, n_kv_heads=4, head_dim=6, encoder=every(2), decoder=every(3), num_experts=6, top_k=1,
    d_ff=28, activation="relu", gated=False, capacity=5, scale=1.0, tied=True, eos=(EOS,), pad=PAD, start=PAD,
    family="switch",
)  # fmt: skip
_NORM = Norm(1e-5)
MIXERS_SHAPE = DECODER_SHAPE.but(
    decoder=(True, False, True, True, False, True),
    mixers=(
        (0, ShortConv(3)), (1, GatedDelta(4, 2, 6, 5, 4, _NORM)), (2, Mamba2(4, 6, 2, 5, 4, _NORM)), (3, None),
        (4, Mamba(30, 4, 6, 3, _NORM)),
    ),
    bare=(1,), family="mixers",
)  # fmt: skip
"""Every mixer with a state of fixed size, layers that lack a half, and one with attention."""
SHAPES = {"decoder": DECODER_SHAPE, "switch": SWITCH_SHAPE, "mixers": MIXERS_SHAPE}


def with_shortcut(spec: ModelSpec, layer: int, identities: int) -> ModelSpec:
    """The experts of a layer take a shortcut, and its router has so many numbers that stand for none."""
    layers = [spec.decoder[at] for at in range(len(spec.decoder))]
    experts = layers[layer].ffn
    assert isinstance(experts, Experts)
    part = replace(experts, router=replace(experts.router, identities=identities), shortcut=True)
    layers[layer] = replace(layers[layer], ffn=part)
    return replace(spec, decoder=stack_of(layers, spec.decoder.norm))


DECODER, SWITCH, MIXERS = DECODER_SHAPE.spec, SWITCH_SHAPE.spec, with_shortcut(MIXERS_SHAPE.spec, 2, 6)
_AFTER = Join(Norm(1e-5))
_HEADS = Attention(4, 4, 6, 0.408, None, None, rope=None, buckets=None)
_FULL = Experts(6, Ffn(28, Act("relu"), gated=False), Router(1, False, 5, overflow="itself"), bypass=True)
_DENSE = Ffn(20, Act("silu"), gated=False, bias=True)
LATE = replace(
    DECODER, family="late", ropes=(), head=Head(True, 1.0, bias=True, projected=True),
    decoder=Stack(
        (
            Layer(None, _HEADS, None, _FULL, _AFTER, _AFTER),
            Layer(None, _HEADS, None, _DENSE, _AFTER, _AFTER, positions=PositionTable(400)),
        ), (0, 0, 1), None, PositionTable(400),
    ),
    tokens=replace(DECODER.tokens, prefix_end=15),
)  # fmt: skip
"""Norms behind each half and none before it, and tokens before a prompt's first l that see each other."""


def streaming(spec: ModelSpec) -> ModelSpec:
    """A decoder with three streams around each half."""
    kinds = tuple(replace(kind, streams=Streams(3, 6, 1e-6)) for kind in spec.decoder.kinds)
    return replace(spec, family="streams", decoder=replace(spec.decoder, kinds=kinds))


TOGETHER = Ngrams(3, 4, 224, 4, EOS, (12345678901234567, 7, 99999999999), (53, 59, 61, 43), _NORM)


def gated(spec: ModelSpec) -> ModelSpec:
    """A decoder with three streams that gates mix, and tokens together in its first layer and its fifth."""
    layers = [
        replace(
            spec.decoder[at], norm=None, streams=GatedStreams(3, 5, _NORM), ngrams=TOGETHER if at in (0, 4) else None
        )
        for at in range(len(spec.decoder))
    ]
    return replace(spec, family="gated", decoder=stack_of(layers, None))


def pooling(capacity: int | None = None) -> ModelSpec:
    """Attention to pools of every kind, between streams that end in a weighted sum, and a router with a table."""
    streams, network = Streams(3, 6, 1e-6, weighed=True), Ffn(20, Act("silu", 2.0), gated=True)
    near = Pooled(4, 8, 4, 10, 5, 0.354, _NORM, 0, 2, 6, None)
    few, many = replace(near, pools=Pools(3, True, Indexer(6, 6, 4))), replace(near, pools=Pools(7, False, None))
    router = Router(2, True, capacity, "sqrt_softplus", factor=1.5)
    chosen = Experts(8, network, router, network)
    named = replace(chosen, router=replace(router, capacity=None, by_token=VOCAB))
    parts = ((near, named), (few, chosen), (many, chosen), (few, named))
    layers = [Layer(_NORM, mixer, None, experts, streams=streams) for mixer, experts in parts]
    return replace(DECODER, family="pools", ropes=(Rope(4),), decoder=stack_of(layers, _NORM))


STREAMS, GATED, POOLS = streaming(MIXERS_SHAPE.spec), gated(MIXERS_SHAPE.spec), pooling()
SPECS = {
    "decoder": DECODER, "switch": SWITCH, "mixers": MIXERS, "late": LATE, "streams": STREAMS, "gated": GATED,
    "pools": POOLS,
}  # fmt: skip


def with_ends(spec: ModelSpec, eos: tuple[int, ...]) -> ModelSpec:
    return replace(spec, tokens=replace(spec.tokens, eos=eos))


def with_capacity(name: str, capacity: int | None) -> ModelSpec:
    """One of SPECS, whose experts take so many tokens."""
    if name in ("streams", "gated"):
        return (streaming if name == "streams" else gated)(with_capacity("mixers", capacity))
    if name == "pools":
        return pooling(capacity)
    if name != "late":
        return SHAPES[name].but(capacity=capacity).spec
    part = replace(_FULL, router=Router(1, False, capacity, overflow="nothing" if capacity is None else "itself"))
    kinds = tuple(replace(kind, ffn=part) if kind.ffn == _FULL else kind for kind in LATE.decoder.kinds)
    return replace(LATE, decoder=replace(LATE.decoder, kinds=kinds))


PROMPTS = ("one small step", "hello world", "zigzag", "the quick brown fox jumps over the lazy dog")
_GROUP = 8
_COUNTED: dict[Hashable, bytes] = {}  # paths of packs by all that the weights are made from


def write_pack(
    out: Path, spec: ModelSpec, paths: bool = True, tokenizer: bool = True, seed: int = 0,
    bits: Sequence[Width] = (2, 16, 3, 8, 4), preferences: tuple[Preference, ...] = (), files: Files = "expert",
    neurons: Neurons | None = None, codes: Codes = "plain", coded: Mapping[str, int] | None = None,
) -> Path:  # fmt: skip
    """`paths` are counted on PROMPTS, so that predictions come true. `bits`: of projections, in turn; of 16 alone, the
    weights are the same with `neurons` and without. `coded`: widths of roles whose matrices have trellis codes."""
    dense = Dense("trellis", _GROUP, coded, trellis=tuple(coded)) if coded else None
    quantization = Quantization("group", _GROUP, "BF16", seed, dense, neurons=neurons, codes=codes)
    writer = PackWriter(out, spec, quantization, f"seed {seed}", files)
    rng = np.random.default_rng(seed)
    for index, key in enumerate(spec.expert_keys()):
        widths = [bits[(index + at) % len(bits)] for at in range(len(spec.moe.ffn.projections))]
        names = zip(spec.moe.ffn.projections, widths, strict=True)
        matrices: dict[str, Projection] = {
            name: random_trellis(rng, *spec.projection_shape(name), width) if quantization.coding.is_trellis(width)
            else _matrix(rng, *spec.projection_shape(name), int(width))
            for name, width in names
        }  # fmt: skip
        if neurons is not None:
            matrices["down"] = _transposed(matrices["down"])
        writer.write_expert(key, matrices, biases=random_biases(spec, key, seed))
    weights = backbone(spec, seed)
    for name in [name for name, tensor in spec.tensors.items() if tensor.role in (coded or ())]:
        matrix = random_trellis(rng, *weights[name].shape, dense_width(spec, dense, name) or 0)
        scale = weights.pop(name).float().std() / 48  # which the numbers of the table deviate by
        stem = name.removesuffix(".weight")
        weights[f"{stem}.trellis"] = torch.from_numpy(matrix.stream)
        weights[f"{stem}.scale"] = scale.half().expand(len(matrix.scale)).clone()
    writer.write_file("backbone.safetensors", save(weights))
    write_tables(writer, spec, seed)
    writer.write_file("config.json", b"{}\n")
    if tokenizer:
        writer.write_file("tokenizer.json", _tokenizer().to_str().encode())
    manifest = writer.finish("tests", None, preferences)
    if paths:
        made_of = spec, seed, *bits, files, neurons, codes, *(coded or {}).items()
        if made_of not in _COUNTED:
            _COUNTED[made_of] = build(spec.moe.n, record_routes(out)).to_bytes()
        add_to_pack(out, manifest, PATHS, _COUNTED[made_of])
    return out


def backbone(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """In bfloat16, each matrix of a size that keeps the signal's."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, (_, shape, _) in spec.tensors.items():
        if name.startswith("rope."):
            weights[name] = torch.from_numpy(frequencies(2 * shape[0]))
            continue
        if name.endswith(".table"):
            experts = torch.rand((shape[0], spec.moe.n), generator=generator).argsort(dim=1)
            weights[name] = experts[:, : shape[1]].float()
            continue
        noise = torch.randn(shape, generator=generator)
        keep = name.startswith("embed") or "bias" in name
        values = 1 + 0.1 * noise if len(shape) == 1 else noise if keep else 1.5 * noise * shape[-1] ** -0.5
        weights[name] = values.to(torch.bfloat16)
    return weights


def run_greedy(engine: Engine, ids: list[int], n_tokens: int) -> tuple[list[int], F32]:
    """(tokens, logits [n_tokens, vocab]) of a greedy run that no end token stops."""
    engine.reserve(len(ids), n_tokens)
    state, logits = engine.model.prefill(ids)
    tokens, rows = [int(logits.argmax())], [logits]
    while len(tokens) < n_tokens:
        rows.append(engine.model.step(state, tokens[-1]))
        tokens.append(int(rows[-1].argmax()))
    return tokens, np.stack(rows)


def record_routes(root: Path, prompts: tuple[str, ...] = PROMPTS) -> dict[LayerKey, I64]:
    """What the routers select on the prompts and 30 greedy tokens after each: one [tokens, top_k] a layer.

    On the reference, so that they are the same on all machines.
    """
    seen: dict[LayerKey, list[I64]] = {}
    with Engine.open(root, predict="none", kernels="reference") as engine:
        inner = engine.runner.run

        def run(at: LayerKey, hidden: F32, experts: I64, weights: F32, out: F32, x: F32) -> None:
            seen.setdefault(at, []).append(experts.copy())
            inner(at, hidden, experts, weights, out, x)

        engine.runner.run = run  # type: ignore[method-assign]
        for prompt in prompts:
            run_greedy(engine, engine.encode(prompt), 30)
        order = engine.spec.moe_layers()
    return {at: np.concatenate(seen[at]) for at in order}


def damage_expert(root: Path, key: ExpertKey) -> None:
    """Flips one byte of the weights of an expert, so that only reading it can tell."""
    path = root / Pack.open(root).entry(key).path
    body = bytearray(path.read_bytes())
    body[5000] ^= 1
    path.write_bytes(body)


def _matrix(rng: np.random.Generator, out_features: int, in_features: int, bits: int) -> Projection:
    spread = 1.5 * in_features**-0.5
    if bits == 16:
        return from_bfloat16(to_bfloat16((rng.normal(size=(out_features, in_features)) * spread).astype(np.float32)))
    group = group_of(in_features, _GROUP)
    shape = (out_features, n_groups(in_features, group))
    codes = rng.integers(0, 1 << bits, (out_features, in_features)).astype(np.uint8)
    scale = np.full(shape, 3.4 * spread / ((1 << bits) - 1), dtype=np.float16)
    return QuantizedMatrix(
        bits, in_features, group, pack_codes(codes, bits), scale, np.full(shape, -1.7 * spread, dtype=np.float16)
    )


def _transposed(matrix: Projection) -> Projection:
    """As many codes, in other rows."""
    if not isinstance(matrix, QuantizedMatrix):
        return np.ascontiguousarray(matrix.T)
    codes = unpack_codes(matrix.qweight, matrix.bits, matrix.in_features).T
    group, shape = group_of(len(matrix.qweight), _GROUP), (matrix.in_features, n_groups(len(matrix.qweight), _GROUP))
    scale, minimum = (np.full(shape, part.flat[0], np.float16) for part in (matrix.scale, matrix.minimum))
    return QuantizedMatrix(matrix.bits, len(matrix.qweight), group, pack_codes(codes, matrix.bits), scale, minimum)


def _tokenizer() -> Tokenizer:
    """One token per letter; words begin with a mark; the rest of the vocabulary are pairs that nothing encodes to."""
    letters = "▁abcdefghijklmnopqrstuvwxyz"
    vocabulary = {"<pad>": PAD, "</s>": EOS, "<unk>": UNKNOWN}
    for piece in [*letters, *(f"{a}{b}" for a in letters for b in letters)]:
        if len(vocabulary) < VOCAB:
            vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return tokenizer
