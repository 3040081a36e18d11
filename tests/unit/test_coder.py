"""The coder: what a pack stores and what a trial computes with are the same weights."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import tiny_olmoe

from moeconv.artifacts import uniform
from moeconv.errors import WeightsUnusable
from moeconv.measure.trial import LoadedModel, Trial
from moeconv.quantizers import QUANTIZERS, coder
from moeconv.quantizers.coder import ORIGINAL, ExpertCoder, batches
from moeconv.quantizers.moments import Moments
from moeconv.quantizers.quantizer import Inputs, Wants
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import CheckpointError
from moert.pack.codec import F32, QuantizedMatrix, dequantize
from moert.pack.model_spec import ExpertKey

KEY = ExpertKey("decoder", 1, 2)


class Counting:
    """The channel quantizer, counting what it is asked for."""

    name, group_size = "channel", 0
    wants: Wants = "nothing"

    def __init__(self) -> None:
        self.calls = self.matrices = 0

    def too_few(self, rows: int, in_features: int) -> bool:
        return False

    def quantize(self, weights: F32, bits: int, inputs: Inputs | None) -> list[QuantizedMatrix]:
        self.calls, self.matrices = self.calls + 1, self.matrices + len(weights)
        return QUANTIZERS["channel"](None).quantize(weights, bits, inputs)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(tiny_olmoe(tmp_path_factory.mktemp("olmoe")))


def test_weights_are_what_a_pack_gives_back(checkpoint: Checkpoint) -> None:
    mine = ExpertCoder(checkpoint, QUANTIZERS["group"](32), None)
    coded, weights = mine.code(KEY, (2, 3, 16)), mine.weights(KEY, (2, 3, 16))
    for name, bits in (("gate", 2), ("up", 3)):
        matrix = coded[name]
        assert isinstance(matrix, QuantizedMatrix)
        assert matrix.bits == bits
        assert np.array_equal(dequantize(matrix), weights[name])
    assert np.array_equal(weights["down"], checkpoint.expert(KEY)["down"])  # bfloat16 as it was
    assert np.array_equal(mine.weights(KEY, (ORIGINAL,) * 3)["up"], checkpoint.expert(KEY)["up"])


def test_prepared_layers_hold_what_experts_get_alone(checkpoint: Checkpoint) -> None:
    alone, prepared = (ExpertCoder(checkpoint, QUANTIZERS["gptq"](None), None) for _ in range(2))
    prepared.prepare([(key, (2, 2, 2)) for key in checkpoint.spec.expert_keys() if key.layer == 1])
    one, other = alone.code(KEY, (2, 2, 2)), prepared.code(KEY, (2, 2, 2))
    for name in one:
        first, second = one[name], other[name]
        assert isinstance(first, QuantizedMatrix)
        assert isinstance(second, QuantizedMatrix)
        assert np.array_equal(first.qweight, second.qweight)


def test_no_batch_is_quantized_twice_however_small_the_cache(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two experts fit a batch and three the cache, of a layer of six."""
    an_expert = checkpoint.spec.weights_per_expert()
    monkeypatch.setattr(coder, "BATCH_BYTES", 2 * 4 * an_expert)
    monkeypatch.setattr(coder, "CACHE_BYTES", an_expert)
    quantizer = Counting()
    mine = ExpertCoder(checkpoint, quantizer, None)
    Trial(LoadedModel(checkpoint), mine).assign(uniform(checkpoint.spec, 2))
    n = len(checkpoint.spec.expert_keys())
    assert quantizer.matrices == 3 * n
    assert quantizer.calls == 3 * n / 2


def test_widths_that_are_not_wanted_are_not_quantized(checkpoint: Checkpoint) -> None:
    quantizer = Counting()
    mine = ExpertCoder(checkpoint, quantizer, None)
    wanted = [(key, (2, 4, 16)) for key in checkpoint.spec.expert_keys() if key.layer == 0]
    for batch in batches(checkpoint.spec, wanted):
        mine.prepare(batch)
    assert (quantizer.calls, quantizer.matrices) == (2, 2 * len(wanted))
    for key, bits in wanted:
        mine.weights(key, bits)
    assert quantizer.matrices == 2 * len(wanted)


def test_experts_with_too_few_tokens_are_named(checkpoint: Checkpoint) -> None:
    tensors = {}
    for layer in range(2):
        tensors[f"D{layer:02d}.rows"] = np.full(6, 30)  # enough for 24 inputs, too few for 40
        tensors[f"D{layer:02d}.in"] = np.zeros((6, 24, 24), np.float32)
        tensors[f"D{layer:02d}.mid"] = np.zeros((6, 40, 40), np.float32)
    mine = ExpertCoder(checkpoint, QUANTIZERS["gptq"](None), Moments("products", tensors))
    assert mine.fallbacks == [(key, "down") for key in checkpoint.spec.expert_keys()]
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
