"""A model of OLMoE's shape with random weights, and its packs: what the runtime is timed with beside its peers.

Every tensor follows from the seed and its name alone, so any program makes the same model without a file in between.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np

from moert.pack.codec import F16, F32, QuantizedMatrix, pack_codes
from moert.pack.errors import PackError
from moert.pack.layout import DOWN, Neurons
from moert.pack.manifest import BACKBONE, Dense, Quantization, dense_width, stored_tensors
from moert.pack.model_spec import ExpertKey, ModelSpec
from moert.pack.reader import Pack, is_pack
from recipes.bench.sized import sized
from tests.shapes import Shape, every, frequencies, shapes_of

FOLDER = Path("build/bench/shaped")
SEED = 20261121
GROUP = 64
DENSE = {"attention": 4, "router": 16, "head": 4, "embed": 4}
"""Widths of all other matrices, by role."""
THREADS = 2

OLMOE_SHAPE = Shape(
    50304, d_model=2048, n_heads=16, n_kv_heads=16, head_dim=128, decoder=every(6), num_experts=64, top_k=8, d_ff=1024,
    scale=128**-0.5, qk_norm=True, max_positions=16384, family="olmoe",
)  # fmt: skip
NARROW_SHAPE = OLMOE_SHAPE.but(vocab_size=2048, d_model=256, n_heads=2, n_kv_heads=2, d_ff=256)
OLMOE = sized(OLMOE_SHAPE, NARROW_SHAPE).spec


def weight(name: str, shape: tuple[int, ...]) -> F32:
    """One tensor: norms are ones, frequencies those of plain rotary positions, embeddings normal, all else normal over
    √in, so that activations stay near 1."""
    if name.startswith("rope."):
        return frequencies(2 * shape[0])
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    random = np.random.Generator(np.random.SFC64([SEED, zlib.crc32(name.encode())]))
    values: F32 = random.standard_normal(shape, dtype=np.float32)
    if name != "embed.weight":
        values *= np.float32(shape[-1] ** -0.5)
    return values


def projection(spec: ModelSpec, key: ExpertKey, name: str) -> F32:
    """[out, in] of one projection of an expert."""
    return weight(f"{key}/{name}", spec.projection_shape(name))


def quantize(weights: F32, bits: int, group_size: int = GROUP) -> QuantizedMatrix:
    """Rounds to the nearest of 2^bits levels between each group's minimum and maximum. `group_size` divides in."""
    out, n = weights.shape
    groups = weights.reshape(out, n // group_size, group_size)
    low = groups.min(2)
    minimum = low.astype(np.float16)
    scale: F16 = ((groups.max(2) - low) / np.float32(2**bits - 1)).astype(np.float16)
    step = np.maximum(scale, np.float16(2**-24)).astype(np.float32)  # a group of equal weights has no width
    codes = np.rint((groups - minimum.astype(np.float32)[:, :, None]) / step[:, :, None])
    levels = np.clip(codes, 0, 2**bits - 1).astype(np.uint8).reshape(out, n)
    return QuantizedMatrix(bits, n, group_size, pack_codes(levels, bits), scale, minimum)


def _is_there(out: Path, creator: str) -> bool:
    """One of an older format is removed."""
    if not is_pack(out):
        return False
    try:
        return Pack.open(out).manifest.creator == creator
    except PackError:
        shutil.rmtree(out)
        return False


def write_pack(
    out: Path, bits: int | Mapping[ExpertKey, int], dense: Mapping[str, int], spec: ModelSpec = OLMOE,
    alike: bool = False, neurons: Neurons | None = None,
) -> None:  # fmt: skip
    """A pack with all experts at `bits`, or each at its own, and dense matrices at the widths `dense` (a role of
    `moert.pack.parts` → a width); nothing if it is there already. `alike`: the experts of all layers have the numbers
    of the first layer's, which is written in minutes at any size; widths follow from an expert's place in its layer.
    `neurons`: experts lie in such blocks. Biases of experts are 0."""
    widths = dict.fromkeys(spec.expert_keys(), bits) if isinstance(bits, int) else bits
    stated = bits if isinstance(bits, int) else zlib.crc32(bytes(widths[key] for key in spec.expert_keys()))
    laid = [] if neurons is None else [asdict(neurons)]
    creator = json.dumps(["shaped", SEED, stated, dict(dense), *(["alike"] if alike else []), *laid])
    if _is_there(out, creator):
        return
    from moeconv.writer import PackWriter  # llama.cpp's Python has this module's numbers, and no safetensors

    out.parent.mkdir(parents=True, exist_ok=True)
    quantization = Quantization("nearest", GROUP, "F16", SEED, Dense("nearest", GROUP, dict(dense)), neurons=neurons)
    writer = PackWriter(out, spec, quantization, creator)

    coded: dict[ExpertKey, dict[str, QuantizedMatrix | F32]] = {}
    first, shapes = spec.moe_layers()[0], {name: spec.projection_shape(name) for name in spec.moe.ffn.projections}
    biases = {name: np.zeros(shape[0], np.float32) for name, shape in shapes.items()} if spec.moe.ffn.bias else None

    def write(key: ExpertKey) -> None:
        source = first.expert(key.expert) if alike else key
        parts = coded.get(source)
        if parts is None:
            width, weights = widths[key], {name: projection(spec, source, name) for name in spec.moe.ffn.projections}
            if neurons is not None:
                weights[DOWN] = np.ascontiguousarray(weights[DOWN].T)
            parts = {name: matrix if width == 16 else quantize(matrix, width) for name, matrix in weights.items()}
            if alike:
                coded[source] = parts
        writer.write_expert(key, parts, biases=biases)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(write, [key for key in spec.expert_keys() if not writer.has(key)]))
    _write_backbone(writer.add_file(BACKBONE), spec, quantization)
    writer.seal_file(BACKBONE)
    writer.finish(creator, None)


def _write_backbone(path: Path, spec: ModelSpec, quantization: Quantization) -> None:
    from safetensors.numpy import save_file

    dense, names = quantization.dense, stored_tensors(spec, quantization)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in shapes_of(spec).items():
        values, width = weight(name, shape), dense_width(spec, dense, name)
        if dense is None or width in (None, 16):
            tensors[name] = values if width is None else values.astype(np.float16)
        else:
            coded = quantize(values, width)
            tensors |= zip(names[name], (coded.qweight, coded.scale, coded.minimum), strict=True)
    save_file(tensors, path)
