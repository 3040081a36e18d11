"""Hash functions with random weights, for packs that tests make."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from moeconv.writer import add_to_pack
from moert.pack.learnt import ATTENTION, HASH, HashFunction, Lstm, RoutedLoss, StackHash
from moert.pack.model_spec import ModelSpec
from moert.pack.reader import Pack


def random_stack(
    width: int, d_model: int, layers: int, experts: int, *, both_ways: bool, encoded: bool, seed: int = 0
) -> StackHash:
    """`encoded`: a decoder that looks at an encoder."""
    generator = np.random.default_rng(seed)

    def some(*shape: int) -> npt.NDArray[np.float16]:
        made: npt.NDArray[np.float16] = (2 * generator.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float16)
        return made

    cells = width // 2 if both_ways else width
    return StackHash(
        some(width, d_model),
        some(width),
        tuple(
            tuple(Lstm(some(4 * cells, width), some(4 * cells), some(cells, 4 * cells)) for _ in range(1 + both_ways))
            for _ in range(2)
        ),
        {name: some(width, width) for name in ATTENTION},
        {name: some(width, width) for name in ATTENTION} if encoded else {},
        some(layers, experts, width),
        some(layers, experts),
        generator.random((layers, 2), np.float32),
    )


def random_hash(spec: ModelSpec, seed: int = 0, routed: RoutedLoss | None = None) -> HashFunction:
    """For a model of this shape."""
    width = 8
    layers = {name: len(spec.moe_layers(name)) for name in spec.stacks}
    return HashFunction(
        spec.moe.n,
        {
            name: random_stack(
                width, spec.d_model, count, spec.moe.n, both_ways=name == "encoder",
                encoded=name == "decoder" and bool(layers.get("encoder")), seed=seed + len(name),
            )
            for name, count in layers.items() if count
        },
        routed,
    )  # fmt: skip


def add_hash(path: Path, function: HashFunction | None = None) -> Path:
    """To a pack, a random one by default."""
    manifest = Pack.open(path).manifest
    made = random_hash(manifest.model) if function is None else function
    add_to_pack(path, manifest, HASH, made.to_bytes())
    return path
