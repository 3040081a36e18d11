"""Plans are judged on text of their own, and noise in the search never costs what is known to hold."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conversions import Done, settings_for

from moeconv.artifacts import Target, uniform
from moeconv.conversion import choosing
from moeconv.errors import TargetMissed
from moeconv.measure.trial import Evaluation
from moeconv.plan.problem import Frontier
from moeconv.plan.search import Found
from moeconv.promise.judging import Judge, estimate


@pytest.fixture(scope="module")
def done(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("judging")
    return Done(settings_for(sources, "olmoe", folder, loss=0.9, bits=(2, 4), confidence=0.9))


def test_a_bound_goes_with_a_confidence_only(done: Done) -> None:
    judge = done.judge
    record = judge.measure(uniform(done.bench.spec, 2), "all at 2")
    bound = judge.bound(record)
    assert bound is not None
    assert bound > judge.loss(record)
    assert judge.holds(record) == (bound <= 0.9)
    plain = Judge(judge.measure, judge.evidence, judge.planned_loss, None, judge.seed)
    assert plain.bound(record) is None
    assert plain.text(record) == f"loss {judge.loss(record):.2%}"


def test_intervals_know_which_samples_belong_together(done: Done) -> None:
    """Samples that were all doubled say no more than one of each pair; taken for new ones, they seem to."""
    measure = done.judge.measure
    evaluation = measure(uniform(done.bench.spec, 2), "all at 2")
    alone = estimate(measure, evaluation, None, seed=0)
    twice = copy(measure)
    twice.reference = doubled(measure.reference)
    pairs = np.repeat(np.arange(len(evaluation.nats)), 2)
    together = estimate(twice, doubled(evaluation), pairs, seed=0)
    assert [together.loss, together.low, together.high] == pytest.approx([alone.loss, alone.low, alone.high])
    apart = estimate(twice, doubled(evaluation), None, seed=0)
    assert apart.loss == pytest.approx(alone.loss)
    assert apart.high - apart.low < 0.85 * (alone.high - alone.low)  # about 1 / sqrt(2)


def doubled(evaluation: Evaluation) -> Evaluation:
    """Of each sample and its copy, one after the other."""
    columns = {
        name: tuple(value for value in getattr(evaluation, name) for _ in range(2))
        for name in ("scores", "nats", "tokens", "kls")
    }
    return replace(evaluation, **columns)


@pytest.mark.parametrize("misled", ["finds nothing", "finds a larger one"])
def test_a_search_that_noise_misled_ends_at_what_holds(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, misled: str
) -> None:

    def lost(frontier: Frontier, *_: object) -> Found:
        if misled == "finds nothing":
            raise TargetMissed("the largest plan has too large a loss")
        return Found(len(frontier) - 1, frontier[len(frontier) - 1], ())

    settings = settings_for(sources, "olmoe", tmp_path, loss=0.02, bits=(2, 3, 4, 8), quantizer="channel")
    plain = Done(settings)
    fitting = max(plain.tried)
    assert fitting > 2, "the target must bind, or there is no search to mislead"
    monkeypatch.setattr(choosing, "search", lost)
    assert Done(settings).report.bits_histogram == {fitting: 6 * 2 * 3}


def test_a_size_that_no_plan_has_is_refused_before_anything_is_measured(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    settings = settings_for(sources, "olmoe", tmp_path, target=Target("size", 100.0))
    with pytest.raises(TargetMissed, match="more than the 100 asked"):
        Done(settings)
    assert not settings.work.exists()
