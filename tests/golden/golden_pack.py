"""The golden packs, byte for byte: one MoE layer, two experts, every width. Writes tiny.pack beside this file, and
neurons.pack with experts in blocks of neurons, together.pack with rows that are read at once, trellis.pack with trellis
codes.

Run it again only when the format changes on purpose: python tests/golden/golden_pack.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from moeconv.matrices import Projection
from moeconv.writer import PackWriter
from moert.pack.codec import QuantizedMatrix, TrellisMatrix, Width, pack_codes, stream_bytes
from moert.pack.layout import Neurons
from moert.pack.manifest import LossEstimate, Quality, Quantization
from moert.pack.model_spec import ExpertKey
from moert.pack.parts import Act, Ffn
from tests.shapes import Shape

HERE = Path(__file__).parent
SPEC = Shape(
    4, d_model=6, n_heads=1, n_kv_heads=1, head_dim=6, decoder=(True,), num_experts=2, top_k=1, d_ff=5, tied=True,
    eos=(1, 3), pad=0, family="olmoe",
).spec  # fmt: skip
_RELU = Ffn(60, Act("relu"), gated=True, bias=True)
NEURONS_SPEC = replace(
    SPEC,
    decoder=replace(
        SPEC.decoder, kinds=tuple(replace(kind, ffn=replace(kind.ffn, ffn=_RELU)) for kind in SPEC.decoder.kinds)
    ),
)
QUALITY = Quality("perplexity", 0.05, LossEstimate(8.0, 8.2, 0.025, 0.02, 0.03, 50), None, "1" * 64, "2" * 64)
# Neither a safetensors file nor anything else: the format only promises that these bytes come back.
FILES = {"backbone.safetensors": b"backbone\n", "config.json": b"{}\n"}
TRELLIS_WIDTHS: dict[int, dict[str, Width]] = {
    0: {"gate": 1, "up": 1.5, "down": 2}, 1: {"gate": 2.5, "up": 3, "down": 4},
}  # fmt: skip
WIDTHS = {0: {"gate": 2, "up": 3, "down": 4}, 1: {"gate": 8, "up": 16, "down": 16}}


def codes(out_features: int, in_features: int, bits: int) -> np.ndarray:
    """Codes that count up and start again, so that a reader's mistake in order shows."""
    count = np.arange(out_features * in_features).reshape(out_features, in_features)
    return (count * 7 % (1 << bits)).astype(np.uint8)


def projection(name: str, bits: int) -> Projection:
    return matrix(*SPEC.projection_shape(name), bits)


def matrix(out_features: int, in_features: int, bits: int) -> Projection:
    if bits == 16:
        return np.arange(out_features * in_features, dtype=np.float32).reshape(out_features, in_features) / 8 - 1
    groups = (in_features + 3) // 4
    scale = (np.arange(out_features * groups).reshape(out_features, groups) + 1) / 4
    return QuantizedMatrix(
        bits, in_features, 4, pack_codes(codes(out_features, in_features, bits), bits), scale.astype(np.float16),
        (-scale - 0.5).astype(np.float16),
    )  # fmt: skip


def build(out: Path) -> None:
    writer = PackWriter(out, SPEC, Quantization("group", 4, "BF16", 11), "golden")
    for expert, widths in WIDTHS.items():
        parts = {name: projection(name, bits) for name, bits in widths.items()}
        writer.write_expert(ExpertKey("decoder", 0, expert), parts, importance=None if expert else 0.125)
    for relative, body in FILES.items():
        writer.write_file(relative, body)
    writer.finish("golden_pack.py", QUALITY)


def build_neurons(out: Path, together: bool = False) -> None:
    """The same widths in blocks of neurons, `down` as its transpose."""
    spec, neurons = NEURONS_SPEC, Neurons(512, bundled=False, together=together)
    writer = PackWriter(out, spec, Quantization("group", 4, "BF16", 11, neurons=neurons), "golden")
    d_ff, d_model = spec.projection_shape("up")
    biases = {name: np.arange(spec.projection_shape(name)[0], dtype=np.float32) / 4 for name in WIDTHS[0]}
    for expert, widths in WIDTHS.items():
        parts = {name: matrix(d_ff, d_model, bits) for name, bits in widths.items()}
        writer.write_expert(ExpertKey("decoder", 0, expert), parts, biases=biases)
    for relative, body in FILES.items():
        writer.write_file(relative, body)
    writer.finish("golden_pack.py", QUALITY)


def stream(out_features: int, in_features: int, bits: Width) -> np.ndarray:
    return (np.arange(stream_bytes(bits, out_features, in_features)) * 37 % 251).astype(np.uint8)


def build_trellis(out: Path) -> None:
    writer = PackWriter(out, SPEC, Quantization("trellis", 0, "BF16", 11, codes="trellis"), "golden")
    for expert, widths in TRELLIS_WIDTHS.items():
        parts: dict[str, Projection] = {}
        for name, bits in widths.items():
            rows, columns = SPEC.projection_shape(name)
            scale = (np.arange(rows)[:, None] + 1) / 64
            parts[name] = TrellisMatrix(bits, columns, stream(rows, columns, bits), scale.astype(np.float16))
        writer.write_expert(ExpertKey("decoder", 0, expert), parts)
    for relative, body in FILES.items():
        writer.write_file(relative, body)
    writer.finish("golden_pack.py", QUALITY)


if __name__ == "__main__":
    build(HERE / "tiny.pack")
    build_neurons(HERE / "neurons.pack")
    build_neurons(HERE / "together.pack", together=True)
    build_trellis(HERE / "trellis.pack")
    sys.stdout.write(f"wrote tiny.pack, neurons.pack, together.pack and trellis.pack in {HERE}\n")
