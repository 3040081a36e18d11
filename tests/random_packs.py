"""Small packs for tests: tiny architectures with odd shapes, random weights of every width."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from moeconv.matrices import Projection, biases_of, matrices_of, read_expert
from moeconv.writer import EXTENDED_MINOR, NGRAMS_MINOR, PARALLEL_MINOR, POOLS_MINOR, STREAMS_MINOR, PackWriter, seal
from moert.pack.codec import E2M1, F32, QuantizedMatrix, TrellisMatrix, Width, n_groups, pack_codes, stream_bytes
from moert.pack.documents import plain
from moert.pack.layout import Neurons, group_of
from moert.pack.manifest import NGRAMS, WIDTHS_OF, LossEstimate, Manifest, Quality, Quantization
from moert.pack.mixers import GatedDelta, Indexer, Mamba, Mamba2, Pooled, Pools, ShortConv
from moert.pack.model_spec import ExpertKey, Head, Join, Layer, ModelSpec, Tokens, stack_of  # fmt: skip
from moert.pack.parts import (
    Act,
    Attention,
    Beside,
    Experts,
    Ffn,
    GatedStreams,
    Groups,
    Latent,
    Narrow,
    Ngrams,
    Norm,
    PositionTable,
    Rope,
    Router,
    Streams,
    Stretch,
)
from moert.pack.reader import Pack
from tests.shapes import Shape, every

DECODER = Shape(
    11, d_model=10, n_heads=2, n_kv_heads=1, head_dim=6, decoder=(True, False, True), num_experts=3, top_k=2, d_ff=7,
    d_ff_dense=9, scale=0.408, qk_norm=True, max_positions=64, eos=(1,), pad=0, family="olmoe",
).spec  # fmt: skip
_ENCODER_DECODER = Shape(
    11, d_model=10, n_heads=2, n_kv_heads=2, head_dim=6, encoder=(False, True), decoder=every(2), num_experts=2,
    top_k=1, d_ff=13, activation="relu", gated=False, capacity=4, d_ff_dense=9, scale=1.0, tied=True, max_positions=64,
    eos=(1,), pad=0, start=0, family="switch",
).spec  # fmt: skip

ENCODER_DECODER = replace(
    _ENCODER_DECODER,
    encoder=replace(_ENCODER_DECODER.stacks["encoder"], positions=PositionTable(64, skips_pad=True)),
    decoder=replace(_ENCODER_DECODER.decoder, positions=PositionTable(70)),
    tokens=replace(_ENCODER_DECODER.tokens, first=3),
)

_NORM, _LAYER_NORM, _ACT = Norm(1e-5), Norm(1e-6, "layer"), Act("silu", 7.0, 1.702, 1.0, bound=0.5)
_EXPERT, _WIDE = Ffn(7, _ACT, gated=True, bias=True), Ffn(9, Act("gelu"), gated=False, bias=True)
_EXPERTS = Experts(
    4, _EXPERT,
    Router(
        2, True, None, "sigmoid", bias=True, choice_bias=True, groups=Groups(2, 1, 2), factor=2.5, own_norm=True,
        expert_scale=True,
    ),
    _WIDE, shared_gate=True, beside=Beside(_WIDE, _LAYER_NORM, _NORM, _NORM), narrow=Narrow(8, bias=True),
)  # fmt: skip
_HEADS = Attention(
    4, 2, 6, 0.408, "head", 9.0, 1, None, window=5, softcap=30.0, sinks=True, biases="qkvog", norm_turned=True,
    v_norm=True, chunk=8, gate=True, stretch=Stretch(4, 0.1), gate_by_head=True,
)  # fmt: skip
_PLAIN_MAMBA = Mamba(6, 4, 5, 4, None, conv_bias=False)
_LATENT = Latent(2, 7, 8, 5, 4, 6, 0.333, _LAYER_NORM, 0, bias=True)
RICH = ModelSpec(
    family="rich", vocab_size=11, d_model=10, encoder=None,
    decoder=stack_of(
        [
            Layer(_LAYER_NORM, _LATENT, None, _EXPERTS, Join(_LAYER_NORM, 0.5), Join(_NORM, 0.25), scaled=True,
                  parallel=True),
            Layer(_NORM, _HEADS, None, _WIDE, Join(), Join(None, 0.5), parallel=True),
            Layer(_NORM, replace(_LATENT, q_rank=None), None,
                  replace(_EXPERTS, ffn=replace(_EXPERT, act=replace(_ACT, bound=None)), shared=_EXPERT,
                          router=Router(2, False, None, "sparsemixer", jitter=0.01), shared_gate=False, beside=None)),
        ],
        _LAYER_NORM,
    ),
    ropes=(Rope(4), Rope(6, 0.5)), head=Head(False, 0.5, softcap=20.0, bias=True), tokens=Tokens(None, (1,), 0, None),
    max_positions=64, embed_scale=2.0,
)  # fmt: skip
"""Every part with every field that it may have, but for what mixes tokens through a state of fixed size."""

_SQUARED = Ffn(9, Act("relu2"), gated=False)
_DELTA = GatedDelta(4, 2, 5, 6, 4, _NORM)
_FEW = Experts(3, Ffn(7, Act("silu"), gated=True), Router(2, True, None, "sigmoid", choice_bias=True))
_IDENTITIES = replace(
    _FEW, router=replace(_FEW.router, identities=2), shared=Ffn(9, Act("silu"), gated=True), shortcut=True
)
MIXERS = ModelSpec(
    family="mixers", vocab_size=11, d_model=10, encoder=None,
    decoder=stack_of(
        [
            Layer(_NORM, ShortConv(3, bias=True), None, _FEW, Join(None, 0.5)),
            Layer(_NORM, _DELTA, None, None, Join(_NORM)),
            Layer(_LAYER_NORM, Mamba2(4, 3, 2, 5, 4, _NORM, bias=True), None, _SQUARED),
            Layer(_NORM, None, None, _FEW, Join(), Join(_NORM, 0.5)),
            Layer(_NORM, Mamba(12, 5, 6, 4, _NORM, bias=True), None, _FEW, scaled=True),
            Layer(_NORM, Attention(2, 1, 6, 0.408, "head", None, 0, None), None, _IDENTITIES),
            Layer(_NORM, replace(_PLAIN_MAMBA, taps=1), None, _FEW),
            Layer(_NORM, replace(_DELTA, by_feature=True, rank=4, gate="sigmoid", bound=5.0), None, None),
            Layer(_NORM, replace(_LATENT, rope=None, gate=True), None, None),
        ],
        _NORM,
    ),
    ropes=(Rope(6),), head=Head(True, 1.0), tokens=Tokens(None, (1,), 0, None), max_positions=64,
)  # fmt: skip
"""Every mixer with a state of fixed size, layers that lack a half, and experts with a shortcut."""

_STREAMS = Streams(3, 5, 1e-6)
STREAMING = ModelSpec(
    family="streaming", vocab_size=11, d_model=10, encoder=None,
    decoder=stack_of(
        [
            Layer(_LAYER_NORM, replace(_LATENT, rope=None), None, _EXPERTS, Join(), Join(_NORM), streams=_STREAMS),
            Layer(_NORM, _DELTA, None, _SQUARED, Join(_NORM), Join(None, 0.5), streams=_STREAMS),
            Layer(_NORM, None, None, replace(_EXPERTS, beside=None, shared=_EXPERT), streams=_STREAMS),
            Layer(_NORM, Attention(2, 1, 6, 0.408, "head", None, 0, None), None, None, streams=_STREAMS),
        ],
        _NORM,
    ),
    ropes=(Rope(6),), head=Head(True, 1.0), tokens=Tokens(None, (1,), 0, None), max_positions=64,
)  # fmt: skip
"""Several streams around every kind of half, and layers that lack one."""

_WEIGHED = replace(_STREAMS, weighed=True)
_NEAR = Pooled(4, 6, 4, 7, 5, 0.408, _NORM, 0, 2, 4, None)
_ROOTS = replace(_FEW, router=Router(2, True, None, "sqrt_softplus", choice_bias=True, factor=1.5))
POOLING = ModelSpec(
    family="pooling", vocab_size=11, d_model=10, encoder=None,
    decoder=stack_of(
        [
            Layer(_NORM, _NEAR, None, replace(_FEW, router=Router(2, False, None, by_token=11)), streams=_WEIGHED),
            Layer(_NORM, replace(_NEAR, pools=Pools(4, True, Indexer(3, 5, 2))), None, _ROOTS, streams=_WEIGHED),
            Layer(_NORM, replace(_NEAR, groups=1, pools=Pools(5, False, None)), None, _SQUARED, streams=_WEIGHED),
            Layer(_NORM, replace(_LATENT, rope=None), None, None, streams=_WEIGHED),
        ],
        _NORM,
    ),
    ropes=(Rope(4),), head=Head(True, 1.0), tokens=Tokens(None, (1,), 0, None), max_positions=64,
)  # fmt: skip
"""Attention to pools of every kind, routers by token and of √softplus, and streams that end in a weighted sum."""

_GATED, _TOGETHER = GatedStreams(3, 2, _NORM), Ngrams(3, 2, 32, 4, 1, (5, 7, 9), (5, 7, 8, 11), _NORM)
GATED = ModelSpec(
    family="gated", vocab_size=11, d_model=10, encoder=None,
    decoder=stack_of(
        [
            Layer(None, _DELTA, None, _FEW, streams=_GATED, ngrams=_TOGETHER),
            Layer(None, Attention(2, 1, 6, 0.408, "head", None, 0, None), None, _FEW, streams=_GATED),
            Layer(_NORM, ShortConv(3), None, _SQUARED, streams=_GATED, ngrams=replace(_TOGETHER, rows=31)),
        ],
        None,
    ),
    ropes=(Rope(6),), head=Head(True, 1.0), tokens=Tokens(None, (1,), 0, None), max_positions=64,
)  # fmt: skip
"""Streams that gates mix, and tokens together."""

_LATE = Join(_LAYER_NORM)
_PLAIN_HEADS = Attention(2, 2, 5, 0.447, None, None, None, None)
_FULL = Experts(
    3, Ffn(7, Act("relu"), gated=False), Router(1, False, 4, bias=True, overflow="itself"), bypass=True
)  # fmt: skip
LATE = ModelSpec(
    family="late", vocab_size=11, d_model=10, encoder=None,
    decoder=replace(
        stack_of(
            [
                Layer(None, _PLAIN_HEADS, None, _FULL, _LATE, _LATE),
                Layer(None, _PLAIN_HEADS, None, _WIDE, _LATE, _LATE, positions=PositionTable(70)),
                Layer(None, _PLAIN_HEADS, None, _FULL, _LATE, _LATE),
            ],
            None,
        ),
        positions=PositionTable(64),
    ),
    ropes=(), head=Head(True, 1.0, bias=True, projected=True), tokens=Tokens(None, (1,), 0, None, prefix_end=3),
    max_positions=64,
)  # fmt: skip
"""Norms behind each half and none before it, and tokens at the beginning of a prompt that see each other."""

_RELU = replace(_EXPERT, d_ff=75, act=Act("relu", 7.0, plus=0.5))
FIRING = replace(
    RICH,
    family="firing",
    decoder=replace(
        RICH.decoder,
        kinds=tuple(
            replace(kind, ffn=replace(kind.ffn, ffn=_RELU)) if isinstance(kind.ffn, Experts) else kind
            for kind in RICH.decoder.kinds
        ),
    ),
)
"""RICH with experts that give exact zeros: gated, with biases, narrow, with neurons for several blocks."""
NEURON_SPECS = {"encoder-decoder": ENCODER_DECODER, "late": LATE, "firing": FIRING}
"""Of which packs can have experts in blocks of neurons."""

SPECS = {
    "decoder": DECODER, "encoder-decoder": ENCODER_DECODER, "rich": RICH, "mixers": MIXERS, "streaming": STREAMING,
    "pooling": POOLING, "late": LATE, "gated": GATED,
}  # fmt: skip
QUANTIZATION = Quantization(quantizer="group", group_size=4, dtype16="F16", seed=7)
QUALITY = Quality(
    metric="exact_match", target_loss=0.05, calibration=LossEstimate(0.5, 0.49, 0.02, 0.01, 0.03, 100), heldout=None,
    calibration_sha256="0" * 64, heldout_sha256="a" * 64,
)  # fmt: skip
NEURONS = [
    Neurons(512, bundled=True), Neurons(512, bundled=False), Neurons(4096, bundled=False),
    Neurons(512, bundled=False, together=True),
]  # fmt: skip
FILES = {"backbone.safetensors": bytes(range(256)) * 3, "config.json": b'{"model_type": "tiny"}\n'}


def random_matrix(rng: np.random.Generator, out_features: int, in_features: int, bits: int, group: int) -> Projection:
    """A projection of any width; with 16 bits, values that float16, bfloat16 and MXFP4 hold exactly."""
    if bits == 16:
        signs = rng.choice(np.array([-0.125, 0.125], np.float32), (out_features, in_features))
        return signs * rng.choice(E2M1, (out_features, in_features))
    group = group_of(in_features, group)
    groups = n_groups(in_features, group)
    codes = rng.integers(0, 1 << bits, (out_features, in_features)).astype(np.uint8)
    scale, minimum = rng.normal(size=(2, out_features, groups)).astype(np.float16)
    return QuantizedMatrix(bits, in_features, group, pack_codes(codes, bits), scale, minimum)


def random_expert(
    spec: ModelSpec, key: ExpertKey, group: int, seed: int = 0, neurons: bool = False
) -> dict[str, Projection]:
    """Projections of one expert; widths differ from expert to expert and from projection to projection. With `neurons`
    down is given as its transpose."""
    index = spec.expert_keys().index(key)
    rng = np.random.default_rng([seed, index])
    widths = (2, 3, 4, 8, 16)
    shapes = {name: spec.projection_shape(name) for name in spec.moe.ffn.projections}
    if neurons:
        shapes["down"] = shapes["up"]
    return {
        name: random_matrix(rng, *shape, widths[(2 * index + at) % 5], group)
        for at, (name, shape) in enumerate(shapes.items())
    }


def random_trellis(rng: np.random.Generator, out_features: int, in_features: int, bits: Width) -> TrellisMatrix:
    stream = rng.integers(0, 256, stream_bytes(bits, out_features, in_features)).astype(np.uint8)
    scale = rng.uniform(0.2, 1, (out_features, 1)) * 0.05 * in_features**-0.5
    return TrellisMatrix(bits, in_features, stream, scale.astype(np.float16))


def trellis_expert(spec: ModelSpec, key: ExpertKey, group: int, seed: int = 0) -> dict[str, Projection]:
    """The same of a pack with trellis codes."""
    index, widths = spec.expert_keys().index(key), WIDTHS_OF["trellis"]
    found, rng = dict[str, Projection](), np.random.default_rng([seed, index])
    for at, name in enumerate(spec.moe.ffn.projections):
        width, shape = widths[(3 * index + at) % len(widths)], spec.projection_shape(name)
        plain = width >= 8
        found[name] = random_matrix(rng, *shape, int(width), group) if plain else random_trellis(rng, *shape, width)
    return found


def random_biases(spec: ModelSpec, key: ExpertKey, seed: int = 0) -> dict[str, F32]:
    """Of the projections of one expert; none where experts have none."""
    rng, ffn = np.random.default_rng([seed, 1000 + spec.expert_keys().index(key)]), spec.moe.ffn
    sizes = {name: spec.projection_shape(name)[0] for name in ffn.projections} if ffn.bias else {}
    return {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}


def write_pack(
    out: Path, spec: ModelSpec = DECODER, quantization: Quantization = QUANTIZATION, seed: int = 0
) -> dict[ExpertKey, dict[str, Projection]]:
    """Writes a pack with random experts; returns what was put in."""
    writer = PackWriter(out, spec, quantization, f"seed {seed}")
    neurons = quantization.neurons is not None
    group, trellis = quantization.group_size, quantization.codes == "trellis"
    given = {
        key: trellis_expert(spec, key, group, seed) if trellis else random_expert(spec, key, group, seed, neurons)
        for key in spec.expert_keys()
    }
    for index, (key, projections) in enumerate(given.items()):
        importance = None if index % 2 else index / 8
        writer.write_expert(key, projections, importance, random_biases(spec, key, seed))
    for relative, body in FILES.items():
        writer.write_file(relative, body)
    write_tables(writer, spec)
    writer.finish("tests", QUALITY)
    return given


def write_tables(writer: PackWriter, spec: ModelSpec, seed: int = 0) -> None:
    """Writes the rows of tokens together, where the model has them, in bfloat16."""
    rng = np.random.default_rng(seed)
    if spec.tables:
        found = {name: rng.normal(size=table.shape) for name, table in spec.tables.items()}
        writer.write_file(NGRAMS, save({name: torch.from_numpy(each).bfloat16() for name, each in found.items()}))


def flat(projection: Projection) -> list[Any]:
    """Everything that a projection holds, fit for comparison."""
    if isinstance(projection, TrellisMatrix):
        return [projection.bits, projection.in_features, projection.stream.tobytes(), projection.scale.tobytes()]
    if isinstance(projection, QuantizedMatrix):
        parts = (projection.qweight, projection.scale, projection.minimum)
        head: list[Any] = [projection.bits, projection.in_features, projection.group_size]
        return head + [(part.dtype.str, part.shape, part.tobytes()) for part in parts]
    return [projection.dtype.str, projection.shape, projection.tobytes()]


def flat_experts(experts: dict[ExpertKey, dict[str, Projection]]) -> dict[ExpertKey, dict[str, list[Any]]]:
    return {key: {name: flat(part) for name, part in parts.items()} for key, parts in experts.items()}


def read_experts(pack: Pack) -> dict[ExpertKey, dict[str, Projection]]:
    return {entry.key: matrices_of(pack, entry.key, read_expert(pack, entry.key)) for entry in pack.manifest.experts}


def read_biases(pack: Pack) -> dict[ExpertKey, dict[str, list[float]]]:
    found = {entry.key: biases_of(pack, entry.key, read_expert(pack, entry.key)) for entry in pack.manifest.experts}
    return {key: {name: bias.tolist() for name, bias in biases.items()} for key, biases in found.items()}


def read_all(root: Path) -> tuple[Manifest, Any, dict[str, bytes]]:
    """Every value that can be read from a pack."""
    pack = Pack.open(root)
    files = {name: pack.read_file(name) for name in pack.manifest.files}
    biases = read_biases(pack)
    return pack.manifest, {key: (part, biases[key]) for key, part in flat_experts(read_experts(pack)).items()}, files


def minor_of(spec: ModelSpec, without: int) -> int:
    """Returns the minor version of a model's pack; `without`: the one that it would have without parallel layers and
    later fields of parts."""
    kinds = [kind for stack in spec.stacks.values() for kind in stack.kinds]
    if any(isinstance(kind.streams, GatedStreams) for kind in kinds):
        return NGRAMS_MINOR
    if any(isinstance(kind.mixer, Pooled) for kind in kinds):
        return POOLS_MINOR
    if any(kind.streams is not None for kind in kinds):
        return STREAMS_MINOR
    if any(f'"{name}": ' in json.dumps(plain(kinds)) for name in ("by_feature", "gate_by_head", "bound", "shortcut")):
        return EXTENDED_MINOR
    return PARALLEL_MINOR if any(kind.parallel for kind in kinds) else without


def sealed(document: dict[str, Any]) -> str:
    """A manifest as text whose own checksum is right, so that what it says is looked at."""
    text = json.dumps({name: value for name, value in document.items() if name != "crc32"})  # without an indent, quick
    return seal(text.removesuffix("}"))
