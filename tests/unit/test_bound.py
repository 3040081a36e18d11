"""The parts of the confidence bound, held against values that are counted by hand or known from elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from moeconv.measure.metrics import METRICS
from moeconv.promise import bound
from moeconv.promise.bound import Evidence, Needed, Terms, alike, effects, samples_needed, widening, worst_harm

EXACT = METRICS["exact_match"]


def right(count: int, of: int) -> np.ndarray:
    return np.stack([np.arange(of) < count, np.ones(of)], axis=1).astype(float)


def near(number: int | None) -> object:
    """A number that rounding may make one more."""
    return None if number is None else pytest.approx(number, abs=1)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("number", [20, 60, 1000])
def test_the_quantile_is_widened_as_student_has_it(number: int, confidence: float) -> None:
    student = stats.t.ppf(confidence, number - 1) / stats.norm.ppf(confidence)
    expected = student * math.sqrt((number + 1) / (number - 1))
    assert widening(number, confidence) == pytest.approx(expected, rel=0.01)


def test_one_document_shows_no_spread() -> None:
    assert widening(1, 0.95) == math.inf
    assert widening(2, 0.95) < math.inf


def test_the_quantile_goes_further_out_for_documents_that_are_alike_and_never_in() -> None:
    groups, z = np.arange(60), stats.norm.ppf(0.95)
    assert Terms(0.95, None, 0).quantile(60) == 0.95
    assert Terms(0.95, None, 0, groups).quantile(60) == pytest.approx(stats.norm.cdf(z * widening(60, 0.95)))
    doubled = Terms(0.95, None, 0, groups, alike=2.0)
    assert doubled.number(60) == pytest.approx(30)
    assert doubled.quantile(60) == pytest.approx(stats.norm.cdf(z * widening(30, 0.95) * math.sqrt(2)))
    assert Terms(0.4, None, 0, groups).quantile(60) == 0.4, "below the middle, further out would be less"


def test_rows_that_say_less_than_half_are_counted_in_runs() -> None:
    """Runs of three rows: the sums' variance beside the rows' is the number of rows that say as much as one."""
    runs = np.repeat(np.arange(400), 3)
    apart, evidence = np.tile([1.0, 0.0, -1.0], 400), Evidence(runs, runs, runs=True)
    assert alike(apart, runs) == 1.0
    assert evidence.of_rows(apart).count == 1200
    common = np.repeat(np.resize([1.0, -1.0], 400), 3)
    assert alike(common, runs) == pytest.approx(3 * math.exp(math.sqrt(2 / 399)))
    assert evidence.of_rows(common) is evidence
    assert alike(common[:3], runs[:3]) == math.inf, "one run shows no spread"
    assert math.isfinite(alike(common[:6], runs[:6]))


@pytest.mark.parametrize(("same", "opposite", "documents"), [(7, 3, 4800), (7, 2, 400)])
def test_runs_are_counted_where_more_than_two_rows_say_as_much_as_one(same: int, opposite: int, documents: int) -> None:
    """Runs of twelve: of (same - opposite)^2 / (same + opposite) rows, 1.6 and 2.8, and a little more."""
    run = np.concatenate([np.ones(same), -np.ones(opposite), np.zeros(12 - same - opposite)])
    runs = np.repeat(np.arange(400), 12)
    found = Evidence(runs, runs, runs=True).of_rows(np.concatenate([run, -run] * 200))
    assert found.count == documents
    assert found.runs == (documents == 400)


def test_pairs_of_equal_rows_stay_pairs() -> None:
    """Two rows that say as much as one are no more than their document."""
    runs = np.repeat(np.arange(400), 2)
    evidence = Evidence(runs, runs, runs=True)
    assert evidence.of_rows(np.repeat(np.resize([1.0, -1.0], 400), 2)) is evidence


def test_of_one_more_of_each_row_the_loss_changes_as_counted() -> None:
    before, after = right(3, 4), right(2, 4)
    found = effects(EXACT, before, after)
    loss = lambda reference, plan: 1 - plan / reference  # noqa: E731
    assert found == pytest.approx([loss(4, 3) - loss(3, 2)] * 2 + [loss(4, 2) - loss(3, 2), 0.0])
    same = effects(EXACT, before, before)
    assert same == pytest.approx([0.8 - 0.75] * 3 + [0.6 - 0.75])


def test_of_each_plan_the_documents_that_may_count_once_more_are_those_that_it_harmed_most() -> None:
    """The worst by itself, and 15 by their effect in all. Of two plans, one harms the last most, one the first."""
    before, kept = np.ones(40), 1 - np.arange(40) / 100
    both = np.stack([np.stack([before, before, after, before], axis=1) for after in (kept, kept[::-1])], axis=1)
    found = bound._worst(EXACT, both)
    assert found.shape == (bound.AGAIN, 2, 4) == (16, 2, 4)
    assert found[:, 0, 2].tolist() == found[:, 1, 2].tolist() == [kept[-1], *kept[:-16:-1]]


@pytest.mark.parametrize(("heldout", "lost"), [(80, 13 / 4), (20, 4), (10, 2 / 0.5), (None, 3.0)])
def test_with_no_harm_seen_one_sample_counts_as_often_as_the_heldout_text_may_have_it(
    heldout: float | None, lost: float
) -> None:
    """Geometric counts of mean m/n, whose 95% quantile is known; of endless text an exponential one, -ln 0.05."""
    ones = right(20, 20)
    found = bound.upper_bound(EXACT, ones, ones, Terms(0.95, heldout, 1, draws=20_000))
    assert found == pytest.approx(lost / 20, rel=0.02)


@pytest.mark.parametrize("documents", [2000, 200])
def test_an_interval_holds_what_lies_between_the_normal_quantiles(documents: int) -> None:
    """Half of the samples are lost; documents of ten samples have one lost more or less."""
    before, after = right(2000, 2000), right(2000, 2000)
    after[: 1000 if documents == 2000 else 0, 0] = 0.0
    groups = np.arange(2000) * documents // 2000
    if documents == 200:
        after[:, 0] = np.arange(2000) % 10 < 4 + 2 * (groups % 2)
    deviation = {2000: 0.5, 200: 0.1}[documents] / math.sqrt(documents)
    low, high = bound.interval(EXACT, before, after, seed=0, groups=groups)
    assert (0.5 - low, high - 0.5) == (pytest.approx(1.96 * deviation, rel=0.05),) * 2


def test_the_document_that_was_harmed_most_is_named_by_its_sums() -> None:
    before, after = right(6, 6), right(6, 6)
    groups = np.array([0, 0, 1, 1, 2, 2])
    assert worst_harm(EXACT, before, after, groups) is None
    after[[0, 2, 3], 0] = 0.0
    assert worst_harm(EXACT, before, after, groups).tolist() == [2, 2, 0, 2]
    assert worst_harm(EXACT, after, before, groups) is None, "gains are no harm"
    assert worst_harm(EXACT, right(0, 6), right(0, 6), groups) is None, "where nothing was right, nothing is lost"


@pytest.mark.parametrize(
    ("right_ones", "upper", "heldout", "acceptance", "both"),
    [
        (90, 0.2, 50.0, 100, 67),  # the gap is the allowed one: as many as there are do
        (90, 0.2, None, 100, 100),
        (90, 0.15, 50.0, 10, 17),  # of half the gap, a fourth
        (90, 0.3, 50.0, None, 267),  # held-out samples are too few for any number of others
        (100, 0.1, None, 400, 400),  # without a loss, its noise is taken to be up to twice as large
        (90, 0.05, None, 0, 0),  # no gap at all
        (90, math.inf, 50.0, None, None),
    ],
)
def test_the_samples_that_a_promise_needs_are_those_of_its_formula(
    right_ones: int, upper: float, heldout: float | None, acceptance: int | None, both: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of 100 samples and a target of 20%, whose just accepted plan loses 10% and may have a gap of 10%."""
    monkeypatch.setattr(bound, "upper_bound", lambda *_: upper)
    found = samples_needed(EXACT, right(100, 100), [right(right_ones, 100)], Terms(0.95, heldout, 0), target=0.2)
    assert found.have == 100
    assert (found.acceptance, found.both) == (near(acceptance), near(both))


def test_of_several_plans_the_one_like_an_accepted_one_gives_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(bound, "upper_bound", lambda metric, reference, scores, terms: asked.append(scores) or 0.2)
    plans = [right(100, 100), right(50, 100), right(88, 100), right(97, 100)]
    samples_needed(EXACT, right(100, 100), plans, Terms(0.95, None, 0), target=0.2)
    assert asked[0] is plans[2]


def test_as_many_as_are_needed_are_enough() -> None:
    assert [Needed(100, number, None).enough for number in (99, 100, 101, None)] == [True, True, False, False]
