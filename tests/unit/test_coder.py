"""The coder: what a pack stores and what a trial computes with are the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_olmoe

from moeconv.artifacts import uniform
from moeconv.errors import WeightsUnusable
from moeconv.measure.trial import LoadedModel, Trial
from moeconv.packing.emit import Label, emit
from moeconv.quantizers import QUANTIZERS, coder
from moeconv.quantizers.coder import ExpertCoder, batches
from moeconv.quantizers.moments import Moments
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import CheckpointError
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey
from tests.unit.test_emit import Rounding

KEY = ExpertKey("decoder", 1, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(tiny_olmoe(tmp_path_factory.mktemp("olmoe")))


def test_prepared_layers_hold_what_experts_get_alone(checkpoint: Checkpoint) -> None:
    alone, prepared = (ExpertCoder(checkpoint, QUANTIZERS["gptq"](None), None) for _ in range(2))
    prepared.prepare([(key, (2, 2, 2)) for key in checkpoint.spec.expert_keys() if key.layer == 1])
    one, other = alone.code(KEY, (2, 2, 2)), prepared.code(KEY, (2, 2, 2))
    for name in one:
        assert np.array_equal(one[name].qweight, other[name].qweight)


@pytest.mark.parametrize("way", ["a trial", "a pack after a search"])
def test_no_batch_is_quantized_twice_however_small_the_cache(
    checkpoint: Checkpoint, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two experts fit a batch and three the cache, of a layer of six."""
    an_expert, widths = checkpoint.spec.weights_per_expert(), uniform(checkpoint.spec, 2)
    monkeypatch.setattr(coder, "BATCH_BYTES", 2 * 4 * an_expert)
    monkeypatch.setattr(coder, "CACHE_BYTES", an_expert)
    quantizer = Rounding()
    mine = ExpertCoder(checkpoint, quantizer, None)
    if way == "a trial":
        Trial(LoadedModel(checkpoint), mine).assign(widths)
    else:
        for batch in batches(checkpoint.spec, widths.items()):
            mine.prepare(batch)
        quantizer.calls = quantizer.batches = 0
        emit(mine, widths, tmp_path / "p", seed=0, label=Label("tests"))
    n = 3 * len(checkpoint.spec.expert_keys())
    assert (quantizer.calls, quantizer.batches) == (n, n / 2)


def test_widths_that_are_not_wanted_are_not_quantized(checkpoint: Checkpoint) -> None:
    quantizer = Rounding()
    mine = ExpertCoder(checkpoint, quantizer, None)
    wanted = [(key, (2, 4, 16)) for key in checkpoint.spec.expert_keys() if key.layer == 0]
    for batch in batches(checkpoint.spec, wanted):
        mine.prepare(batch)
    assert (quantizer.batches, quantizer.calls) == (2, 2 * len(wanted))
    for key, bits in wanted:
        mine.weights(key, bits)
    assert quantizer.calls == 2 * len(wanted)


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
