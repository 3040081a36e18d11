"""How often neurons fire, counted beside a plain loop, in memory and layer by layer; and the order that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tiny import tiny_of, tiny_olmoe, tiny_switch

from moeconv.calibration import Sample
from moeconv.measure import firing
from moeconv.measure.firing import activity_of, by_frequency, covered, firing_counts
from moeconv.measure.metrics import METRICS
from moeconv.measure.passes import LayeredModel, Room
from moeconv.measure.scoring import Extent, build_scorer, load_tokenizer
from moeconv.measure.trial import LoadedModel
from moeconv.progress import unseen
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import DenseCoder, ExpertCoder
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.experts import Call
from moert.pack.model_spec import LayerKey
from moert.pack.tensors import TOKENIZER

TEXTS = ["a few words", "zigzag", "the quick brown fox", "one small step"] * 4
FAMILIES = {
    "switch": tiny_switch, "gated": lambda path: tiny_olmoe(path, hidden_act="relu"), "dense": tiny_of("opt"),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(FAMILIES[request.param](tmp_path_factory.mktemp(request.param) / "hf"))


def scorer_of(subject: Any, folder: Path) -> Any:
    target = subject.spec.encoder is not None
    samples = [Sample(text, text if target else "") for text in TEXTS]
    tokenizer = load_tokenizer(folder / TOKENIZER)
    return build_scorer(subject, tokenizer, samples, METRICS["perplexity"], Extent(None, 16, 5))


def calls_of(loaded: LoadedModel, scorer: Any) -> list[tuple[LayerKey, Call]]:
    """What experts are asked, batch by batch; of text that is written the whole is asked about last."""
    found, latest = list[tuple[LayerKey, Call]](), dict[LayerKey, Call]()
    with loaded.calls.answering(lambda place, call: latest.update({place: call})), torch.inference_mode():
        for _ in scorer.routes():
            found += latest.items()
            latest.clear()
    return found


def test_counts_are_those_of_a_plain_loop(source: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firing, "ROWS", 3)
    loaded, moe = LoadedModel(source), source.spec.moe
    scorer = scorer_of(loaded, source.path)
    found = firing_counts(loaded, scorer, unseen)
    assert list(found) == list(source.spec.moe_layers())
    expected = {place: np.zeros((moe.n, moe.ffn.d_ff), int) for place in source.spec.moe_layers()}
    for place, call in calls_of(loaded, scorer):
        for x, chosen in zip(call.x, call.chosen.tolist(), strict=True):
            for expert in (number for number in chosen if number >= 0):
                inner = loaded.calls.inner(place.expert(expert), x[None])[0].tolist()
                for neuron, value in enumerate(inner):
                    expected[place][expert, neuron] += value != 0
    for place, counts in found.items():
        assert counts.dtype == np.int64
        assert 0 < counts.sum() < expected[place].size * len(TEXTS) * 20
        assert abs(counts - expected[place]).max() <= 1, "but for what rounding makes zero"
        assert (counts == expected[place]).mean() > 0.99
    activity = activity_of(loaded, scorer, unseen("", 1).__enter__())
    assert activity is not None
    assert all(abs(activity[place].fired - counts).max() <= 1 for place, counts in found.items())


def test_layer_by_layer_they_are_the_same(source: Checkpoint, tmp_path: Path) -> None:
    if source.spec.encoder is not None:
        pytest.skip("encoder-decoders are converted in memory")
    loaded = LoadedModel(source)
    coder = ExpertCoder(source, QUANTIZERS["group"](None), None)
    layered = LayeredModel(coder, DenseCoder(source, None), Room(tmp_path, 1, 200_000), unseen)
    layered.original_experts()
    whole, apart = (firing_counts(subject, scorer_of(subject, source.path), unseen) for subject in (loaded, layered))
    assert list(whole) == list(apart)
    for place, counts in whole.items():
        assert abs(counts - apart[place]).max() <= 1
        assert (counts == apart[place]).mean() > 0.99
    again = firing_counts(layered, scorer_of(layered, source.path), unseen)
    assert all((again[place] == counts).all() for place, counts in apart.items())


counts = arrays(np.int64, st.tuples(st.integers(1, 4), st.integers(1, 30)), elements=st.integers(0, 5))


@given(counts)
def test_an_order_is_a_bijection_with_the_most_frequent_first(fired: np.ndarray) -> None:
    at = LayerKey("decoder", 3)
    order = by_frequency({at: fired})
    rows = order.layers[at]
    assert rows.dtype == np.uint32
    for mine, row in zip(fired, rows.tolist(), strict=True):
        assert sorted(row) == list(range(len(mine)))
        assert row == sorted(range(len(mine)), key=lambda neuron: (-mine[neuron], neuron))
    assert by_frequency({at: np.zeros_like(fired)}).layers[at].tolist() == [list(range(fired.shape[1]))] * len(fired)


def test_what_the_most_frequent_cover() -> None:
    at = LayerKey("decoder", 0)
    fired = {at: np.array([[0, 6, 1, 1], [4, 0, 0, 0]])}
    assert covered(fired, 0.25) == 10 / 12
    assert covered(fired, 0.5) == 11 / 12
    assert covered(fired, 1.0) == 1.0
    assert covered({at: np.zeros((2, 4), np.int64)}, 0.25) == 0.0
