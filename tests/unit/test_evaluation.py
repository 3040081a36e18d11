"""Records: what the journal keeps of an evaluation, and the figures that are computed from it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moeconv.measure.metrics import METRICS
from moeconv.measure.scorers import Scores
from moeconv.measure.trial import Evaluation, joined


def scores(seed: int, count: int = 4) -> Scores:
    rng = np.random.default_rng(seed)
    columns = np.stack([rng.random(count), np.ones(count)], axis=1)
    return Scores(columns, rng.random(count) * 9, np.arange(1.0, count + 1), rng.random(count))


def test_a_record_comes_back_from_json_as_it_was() -> None:
    record = Evaluation.of("all at 4", scores(0), 1.23456789, 10**12, 3)
    again = Evaluation.from_json({"widths": [[2, 4]], "samples": "x", **json.loads(json.dumps(record.to_json()))})
    assert again == record
    assert (again.what, again.flops, again.near_ties, again.seconds) == ("all at 4", 10**12, 3, 1.2346)
    assert again.columns().shape == (4, 2)
    assert again.tokens == (1, 2, 3, 4)


@pytest.mark.parametrize("values", [{}, {"what": "x"}])
def test_values_that_are_no_record_are_refused(values: dict[str, str]) -> None:
    with pytest.raises((KeyError, TypeError)):
        Evaluation.from_json(values)


def test_figures_are_over_all_samples() -> None:
    before, after = Evaluation.of("reference", scores(1), 0.0, 0), Evaluation.of("changed", scores(2), 0.0, 0)
    found, expected = after.summary(METRICS["rouge1"], before), scores(2)
    first, second = scores(1).scores[:, 0].mean(), expected.scores[:, 0].mean()
    assert found.value == pytest.approx(second, abs=1e-6)
    assert found.loss == pytest.approx((first - second) / first, abs=1e-5)
    assert found.nll == pytest.approx(expected.nll, abs=1e-6)
    assert found.kl == pytest.approx(expected.kl, abs=1e-6)


def test_joined_records_are_one_over_all_their_samples() -> None:
    parts = [Evaluation.of("x", scores(seed, 3), 1.5, 100, seed) for seed in (1, 2)]
    whole = joined(parts)
    assert whole.scores == parts[0].scores + parts[1].scores
    assert whole.nats == parts[0].nats + parts[1].nats
    assert whole.kls == parts[0].kls + parts[1].kls
    assert (whole.tokens, whole.seconds, whole.flops, whole.near_ties) == ((1, 2, 3, 1, 2, 3), 3.0, 200, 3)
    assert joined(parts[:1]) == parts[0]
