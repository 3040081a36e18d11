"""Plans are judged on text of their own, and noise in the search never costs what is known to hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conversions import Done, settings_for

from moeconv import conversion
from moeconv.allocation.frontier import Frontier
from moeconv.allocation.search import Found
from moeconv.artifacts import Target, uniform
from moeconv.errors import TargetMissed
from moeconv.judging import Judge, estimate


@pytest.fixture(scope="module")
def done(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("judging")
    return Done(settings_for(sources, "olmoe", folder, loss=0.9, bits=(2, 4), confidence=0.9))


def test_a_bound_goes_with_a_confidence_only(done: Done) -> None:
    judge = done.conversion.judge
    record = judge.measure(uniform(done.conversion.checkpoint.spec, 2), "all at 2")
    bound = judge.bound(record)
    assert bound is not None
    assert bound > judge.loss(record)
    assert judge.holds(record) == (bound <= 0.9)
    plain = Judge(judge.measure, judge.material)
    plain.confidence = None
    assert plain.bound(record) is None
    assert plain.text(record) == f"loss {judge.loss(record):.2%}"


def test_intervals_know_which_samples_belong_together(done: Done) -> None:
    """Samples that were all doubled say no more than one of each pair."""
    judge = done.conversion.judge
    record = judge.measure(uniform(done.conversion.checkpoint.spec, 2), "all at 2")
    count = len(record.nats)
    alone = estimate(judge.measure, record, None, seed=0)
    halves = estimate(judge.measure, record, np.arange(count) // max(1, count // 4), seed=0)
    assert halves.loss == alone.loss
    assert (halves.low, halves.high) != (alone.low, alone.high)


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
    fitting = max(plain.conversion.tried)
    assert fitting > 2, "the target must bind, or there is no search to mislead"
    monkeypatch.setattr(conversion, "search", lost)
    assert Done(settings).report.bits_histogram == {fitting: 6 * 2 * 3}


def test_a_size_that_no_plan_has_is_refused_before_anything_is_measured(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    settings = settings_for(sources, "olmoe", tmp_path, target=Target("size", 100.0))
    with pytest.raises(TargetMissed, match="more than the 100 asked"):
        Done(settings)
    assert not settings.work.exists()
