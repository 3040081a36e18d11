"""The golden pack, byte for byte: one MoE layer, two experts, every width. Writes tiny.pack beside this file.

Run it again only when the format changes on purpose: python tests/golden/golden_pack.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from moert.pack.codec import QuantizedMatrix, pack_codes
from moert.pack.manifest import LossEstimate, Quality, Quantization
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Projection
from moert.pack.writer import PackWriter
from tests.shapes import Shape

HERE = Path(__file__).parent
SPEC = Shape(
    4, d_model=6, n_heads=1, n_kv_heads=1, head_dim=6, decoder=(True,), num_experts=2, top_k=1, d_ff=5, tied=True,
    eos=(1, 3), pad=0, family="olmoe",
).spec  # fmt: skip
QUALITY = Quality("perplexity", 0.05, LossEstimate(8.0, 8.2, 0.025, 0.02, 0.03, 50), None, "1" * 64, "2" * 64)
# Neither a safetensors file nor anything else: the format only promises that these bytes come back.
FILES = {"backbone.safetensors": b"backbone\n", "config.json": b"{}\n"}
WIDTHS = {0: {"gate": 2, "up": 3, "down": 4}, 1: {"gate": 8, "up": 16, "down": 16}}


def codes(out_features: int, in_features: int, bits: int) -> np.ndarray:
    """Codes that count up and start again, so that a reader's mistake in order shows."""
    count = np.arange(out_features * in_features).reshape(out_features, in_features)
    return (count * 7 % (1 << bits)).astype(np.uint8)


def projection(name: str, bits: int) -> Projection:
    out_features, in_features = SPEC.projection_shape(name)
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


if __name__ == "__main__":
    build(HERE / "tiny.pack")
    sys.stdout.write(f"wrote {HERE / 'tiny.pack'}\n")
