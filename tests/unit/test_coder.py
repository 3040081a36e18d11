"""The coder: what a pack stores and what a trial computes with are the same weights."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import tiny_olmoe

from moeconv.checkpoint import Checkpoint, CheckpointError
from moeconv.coder import ORIGINAL, ExpertCoder
from moeconv.errors import WeightsUnusable
from moeconv.moments import Moments
from moeconv.quantizers import QUANTIZERS
from moert.pack.codec import F32, QuantizedMatrix, dequantize
from moert.pack.model_spec import ExpertKey

KEY = ExpertKey("decoder", 1, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(tiny_olmoe(tmp_path_factory.mktemp("olmoe")))


def test_weights_are_what_a_pack_gives_back(checkpoint: Checkpoint) -> None:
    coder = ExpertCoder(checkpoint, QUANTIZERS["group"](32), None)
    coded, weights = coder.code(KEY, (2, 3, 16)), coder.weights(KEY, (2, 3, 16))
    for name, bits in (("gate", 2), ("up", 3)):
        matrix = coded[name]
        assert isinstance(matrix, QuantizedMatrix)
        assert matrix.bits == bits
        assert np.array_equal(dequantize(matrix), weights[name])
    assert np.array_equal(weights["down"], checkpoint.expert(KEY)["down"])  # bfloat16 as it was
    assert np.array_equal(coder.weights(KEY, (ORIGINAL,) * 3)["up"], checkpoint.expert(KEY)["up"])


def test_prepared_layers_hold_what_experts_get_alone(checkpoint: Checkpoint) -> None:
    alone, prepared = (ExpertCoder(checkpoint, QUANTIZERS["gptq"](None), None) for _ in range(2))
    prepared.prepare("decoder", 1, 2)
    one, other = alone.code(KEY, (2, 2, 2)), prepared.code(KEY, (2, 2, 2))
    for name in one:
        first, second = one[name], other[name]
        assert isinstance(first, QuantizedMatrix)
        assert isinstance(second, QuantizedMatrix)
        assert np.array_equal(first.qweight, second.qweight)


def test_experts_with_too_few_tokens_are_named(checkpoint: Checkpoint) -> None:
    tensors = {}
    for layer in range(2):
        tensors[f"D{layer:02d}.rows"] = np.full(6, 30)  # enough for 24 inputs, too few for 40
        tensors[f"D{layer:02d}.in"] = np.zeros((6, 24, 24), np.float32)
        tensors[f"D{layer:02d}.mid"] = np.zeros((6, 40, 40), np.float32)
    coder = ExpertCoder(checkpoint, QUANTIZERS["gptq"](None), Moments("products", tensors))
    assert coder.fallbacks == [(key, "down") for key in checkpoint.spec.expert_keys()]
    assert ExpertCoder(checkpoint, QUANTIZERS["channel"](None), Moments("products", tensors)).fallbacks == []


class Damaged(Checkpoint):
    """A checkpoint of which every matrix holds one value that is not a number."""

    def expert(self, key: ExpertKey) -> dict[str, F32]:
        weights = super().expert(key)
        for weight in weights.values():
            weight[0, 0] = np.nan
        return weights


@pytest.mark.parametrize(("bits", "error"), [(4, WeightsUnusable), (16, CheckpointError)])
def test_damaged_weights_are_refused_by_name(checkpoint: Checkpoint, bits: int, error: type[Exception]) -> None:
    damaged = Damaged.open(checkpoint.path)
    with pytest.raises(error, match="D01/E002"):
        ExpertCoder(damaged, QUANTIZERS["channel"](None), None).code(KEY, (bits,) * 3)
