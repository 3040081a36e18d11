"""The promise: the bound holds as often as it says, on metrics of every kind, and is not timid."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeconv.measure.metrics import F64, METRICS
from moeconv.promise.bound import (
    GAP_SHARE,
    Evidence,
    Terms,
    effects,
    interval,
    samples_needed,
    upper_bound,
    upper_bounds,
    widening,
    worst_harm,
)
from recipes.bench.promise import ALLOWED, WITHIN, Setting, coverage, windows
from tests.pairs import each, thinned

Rng = np.random.Generator
Source = Callable[[Rng, int, int, float], tuple[F64, F64]]  # rng, n, plans, loss -> reference, scores [n, plans, 2]
CASES = 500
LOSS = 0.03


def columns(first: F64, second: F64 | None = None) -> F64:
    return np.stack([first, np.ones_like(first) if second is None else second], axis=2)


def exact_match(rng: Rng, n: int, plans: int, loss: float) -> tuple[F64, F64]:
    """80% right; right ones break at twice the loss, wrong ones are mended half as often."""
    right = rng.random((n, plans)) < 0.8
    broken, mended = rng.random((n, plans)) < 2 * loss, rng.random((n, plans)) < 4 * loss
    return columns(right.astype(float)), columns(np.where(right, ~broken, mended).astype(float))


def rouge(rng: Rng, n: int, plans: int, loss: float) -> tuple[F64, F64]:
    """Mean 0.2; 40% of the outputs change, up and down and a little down on average."""
    before = rng.beta(0.5, 2.0, (n, plans))
    noise = rng.standard_normal((n, plans)) * 0.4 * np.minimum(before, 1 - before)
    changed = rng.random((n, plans)) < 0.4
    return columns(before), columns(np.where(changed, np.clip(before * (1 - loss / 0.4) + noise, 0, 1), before))


def perplexity(rng: Rng, n: int, plans: int, loss: float) -> tuple[F64, F64]:
    """Windows of 60 to 128 words; the damage to each is skewed and has heavy tails."""
    words = rng.integers(60, 129, (n, plans)).astype(float)
    nats = rng.gamma(9, 0.35, (n, plans))
    damage = rng.normal(0.01, 0.06, (n, plans)) + rng.exponential(np.log1p(loss) - 0.01, (n, plans))
    damage += rng.standard_t(3, (n, plans)) * 0.03
    return columns(nats * words, words), columns((nats + damage) * words, words)


SOURCES: dict[str, Source] = {"exact_match": exact_match, "rouge2": rouge, "perplexity": perplexity}


def losses(name: str, reference: F64, scores: F64) -> F64:
    metric = METRICS[name]
    lost: F64 = metric.loss(metric.value_of_sums(reference.sum(axis=0)), metric.value_of_sums(scores.sum(axis=0)))
    return lost


def heldout_noise(name: str, n: int, ratio: int) -> float:
    """Deviation of a held-out loss from that on n acceptance samples."""
    rng = np.random.default_rng(7)
    one, other = (losses(name, *SOURCES[name](rng, size, 200, LOSS)) for size in (n, ratio * n))
    return float(np.std(one - other))


@thinned("ratio, n, name", [1, 4], [100, 400, 2000], SOURCES, facts=each)
def test_the_bound_holds_as_often_as_it_says(name: str, n: int, ratio: int) -> None:
    """And is not timid: on average at most 1.6 times as far away as the noise alone puts it."""
    rng, source, metric = np.random.default_rng(n + ratio), SOURCES[name], METRICS[name]
    reference, scores = source(rng, n, CASES, LOSS)
    measured, heldout = losses(name, reference, scores), losses(name, *source(rng, ratio * n, CASES, LOSS))
    noise = heldout_noise(name, n, ratio)
    for confidence, deviations in ((0.9, 1.28), (0.95, 1.64)):
        bounds = upper_bounds(metric, reference, scores, Terms(confidence, ratio * n, 1, draws=800))
        assert (heldout <= bounds).mean() >= confidence - 0.02
        assert (bounds - measured).mean() < 1.6 * deviations * noise


@pytest.mark.parametrize("name", SOURCES)
def test_a_bound_of_the_expected_loss_alone_breaks_the_promise(name: str) -> None:
    """At equal sizes a 95% bound of the mean is passed by 7 to 13 of 100 held-out measurements."""
    rng = np.random.default_rng(2)
    reference, scores = SOURCES[name](rng, 2000, CASES, LOSS)
    heldout = losses(name, *SOURCES[name](rng, 2000, CASES, LOSS))
    plain = upper_bounds(METRICS[name], reference, scores, Terms(0.95, None, 1, draws=800))
    assert 0.82 < (heldout <= plain).mean() < 0.935


def test_rare_harm_counts_before_it_is_seen() -> None:
    """Of 100 samples 2.4 break on average, so one case in eleven shows none at all."""
    rng, metric = np.random.default_rng(3), METRICS["exact_match"]

    def draw() -> tuple[F64, F64]:
        right = rng.random((100, CASES)) < 0.8
        return columns(right.astype(float)), columns((right & (rng.random((100, CASES)) >= 0.03)).astype(float))

    reference, scores = draw()
    bounds = upper_bounds(metric, reference, scores, Terms(0.95, 100, 1))
    assert (losses("exact_match", *draw()) <= bounds).mean() >= 0.93
    unharmed = losses("exact_match", reference, scores) == 0
    assert unharmed.any()
    assert bounds[unharmed].min() > 0.02


def test_all_right_is_no_proof() -> None:
    """20 of 20 right before and after: up to some 15% may still break (the rule of three)."""
    ones = np.ones((20, 2))
    bound = upper_bound(METRICS["exact_match"], ones, ones, Terms(0.95, None, 1))
    assert bound == pytest.approx(3 / 20, rel=0.1)


@st.composite
def nested(draw: st.DrawFn) -> tuple[str, F64, list[F64], npt.NDArray[np.int64]]:
    """A metric, a reference [n, 2], plans that each harm every sample no less than the plan before, and documents."""
    name, n = draw(st.sampled_from(["exact_match", "rouge2", "perplexity"])), draw(st.integers(4, 40))
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    before = np.append(1.0, rng.random(n - 1))
    step = rng.exponential(draw(st.sampled_from([1e-6, 0.1, 2.0])), (3, n)) * (
        rng.random((3, n)) < draw(st.floats(0, 1))
    )
    harm = np.cumsum(step, axis=0)
    if name == "perplexity":
        plans = [before + 5 * one for one in harm]
    else:
        before = (before < 0.6).astype(float) if name == "exact_match" else before
        before[0] = 1.0
        plans = [np.maximum(before - (one > 0 if name == "exact_match" else one), 0) for one in harm]
    groups = np.sort(rng.integers(0, draw(st.integers(2, n)), n))
    rows = [np.stack([one, np.ones(n)], axis=1) for one in (before, *plans)]
    return name, rows[0], rows[1:], groups


@given(nested(), st.sampled_from([0.8, 0.95]), st.sampled_from([None, 2.0, 30.0]), st.sampled_from([1.0, 1.7]))
@settings(max_examples=150)
def test_a_plan_that_harms_less_has_no_larger_bound(
    found: tuple[str, F64, list[F64], npt.NDArray[np.int64]], confidence: float, heldout: float | None, alike: float
) -> None:
    """And one that changes nothing has the smallest, also beside one that gains."""
    name, reference, plans, groups = found
    metric, terms = METRICS[name], Terms(confidence, heldout, 1, groups, draws=300, alike=alike)
    better = 2 * reference - plans[0] if metric.higher_is_better else np.maximum(2 * reference - plans[0], 0)
    bounds = [upper_bound(metric, reference, scores, terms) for scores in (reference, *plans)]
    for less, more in itertools.pairwise(bounds):
        assert less <= more + 1e-12
    assert bounds[0] <= upper_bound(metric, reference, better, terms) + 1e-12
    for one, bound in zip(plans, bounds[1:], strict=True):
        harm = worst_harm(metric, reference, one, groups)
        if harm is not None:
            assert bounds[0] <= upper_bound(metric, reference, reference, replace(terms, harm=harm)) <= bound + 1e-12


def test_a_plan_that_changes_nothing_is_not_judged_by_whole_documents_lost() -> None:
    """60 documents of 12 rows, a third of them right, as they were before: 3 documents may lose a row each, and not all
    of their rows; where another plan lost three rows of a document, each may lose three."""
    rng = np.random.default_rng(12)
    groups, right = np.repeat(np.arange(60), 12), (rng.random(720) < 1 / 3).astype(float)
    reference = np.stack([right, np.ones(720)], axis=1)
    terms = Terms(0.95, 60, 1, groups)
    bound = upper_bound(METRICS["exact_match"], reference, reference, terms)
    assert 3 / right.sum() < bound < 5 / right.sum()
    other = reference.copy()
    fullest = right.reshape(60, 12).sum(axis=1).argmax()
    other[np.flatnonzero(right * (groups == fullest))[:3], 0] = 0
    assert worst_harm(METRICS["exact_match"], reference, reference, groups) is None
    harm = worst_harm(METRICS["exact_match"], reference, other, groups)
    assert harm is not None
    assert harm[[1, 3]].tolist() == [12, 12]
    assert harm[0] - harm[2] == 3
    wider = upper_bound(METRICS["exact_match"], reference, reference, replace(terms, harm=harm))
    assert 2 * bound < wider < 4 * bound


def test_few_documents_take_the_quantile_further_out() -> None:
    """Of 30 documents alike in the damage's spread, the bound is as much further away as Student's t has it."""
    rng = np.random.default_rng(13)
    nats = rng.normal(3.5, 0.4, (30, 200))
    reference, scores = columns(nats), columns(nats + rng.normal(0.03, 0.05, nats.shape))
    metric, measured = METRICS["perplexity"], losses("perplexity", reference, scores)

    def gap(groups: npt.NDArray[np.int64] | None) -> float:
        bounds = upper_bounds(metric, reference, scores, Terms(0.95, 30, 1, groups, draws=2000))
        return float((bounds - measured).mean())

    assert widening(30, 0.95) == pytest.approx(1.066, abs=0.002)
    assert widening(1, 0.95) == np.inf
    assert gap(np.arange(30)) / gap(None) == pytest.approx(widening(30, 0.95), abs=0.03)
    alone, alike = Terms(0.95, 30, 1, np.arange(30)), Terms(0.95, 30, 1, np.arange(30), alike=1.5)
    assert alike.number(30) == 20
    assert 0.95 < alone.quantile(30) < alike.quantile(30)
    further = NormalDist().inv_cdf(alike.quantile(30)) / NormalDist().inv_cdf(0.95)
    assert further == pytest.approx(widening(20, 0.95) * np.sqrt(1.5))


@pytest.mark.parametrize("within", [0.0, pytest.param(0.05, marks=pytest.mark.slow), 0.7])
def test_bounds_of_rows_in_runs_hold_whatever_neighbours_have_in_common(within: float) -> None:
    """720 rows in 60 runs; `within` of the damage's variance is common to a run. Independent rows are counted as such,
    and rows that are alike by runs."""
    rng, metric, runs = np.random.default_rng(14), METRICS["perplexity"], np.repeat(np.arange(60), 12)
    (reference, scores), later = (windows(rng, np.full(60, 12), within, 200) for _ in range(2))
    heldout, held, of_rows, gaps = losses("perplexity", *later), [], 0, [0.0, 0.0]
    for plan in range(200):
        before, after = reference[:, plan], scores[:, plan]
        evidence = Evidence(runs, runs, runs=True)
        counted = evidence.of_rows(effects(metric, before, after))
        of_rows += counted.count == 720
        for at, one in enumerate((evidence, counted)):
            terms = Terms(0.95, one.heldout_number, plan, one.acceptance, draws=400, alike=one.alike)
            bound = upper_bound(metric, before, after, terms)
            gaps[at] += bound - losses("perplexity", before[:, None], after[:, None])[0]
        held.append(heldout[plan] <= bound)
    assert np.mean(held) >= 0.93
    assert of_rows >= 190 if within == 0 else of_rows <= 10 if within == 0.7 else True
    assert gaps[1] < gaps[0] * (1 if within == 0 else 1.03)


def test_a_reference_of_nothing_promises_nothing() -> None:
    none_right = np.array([[0.0, 1.0]] * 30)
    bound = upper_bound(METRICS["exact_match"], none_right, none_right, Terms(0.95, 30, 1))
    assert bound == np.inf


def test_bounds_of_several_plans_are_those_of_each() -> None:
    reference, scores = rouge(np.random.default_rng(4), 50, 3, LOSS)
    metric = METRICS["rouge2"]
    several = upper_bounds(metric, reference, scores, Terms(0.9, 80, 5, draws=500))
    for plan in range(3):
        one = upper_bound(metric, reference[:, plan], scores[:, plan], Terms(0.9, 80, 5, draws=500))
        assert one == pytest.approx(several[plan], rel=1e-9)


def test_more_confidence_and_less_heldout_text_raise_the_bound() -> None:
    reference, scores = (rows[:, 0] for rows in rouge(np.random.default_rng(5), 300, 1, LOSS))

    def bound(confidence: float, heldout: int | None) -> float:
        return upper_bound(METRICS["rouge2"], reference, scores, Terms(confidence, heldout, 1))

    assert bound(0.9, 300) < bound(0.95, 300) < bound(0.95, 100)
    assert bound(0.95, None) < bound(0.95, 300)


def test_clustered_samples_need_their_groups() -> None:
    """Ten windows an article, half of the damage's variance shared by an article: drawn one by one, the windows look
    like far more evidence than they are."""
    rng, metric, articles, windows, plans = np.random.default_rng(6), METRICS["perplexity"], 40, 10, 500
    groups = np.repeat(np.arange(articles), windows)

    def draw() -> tuple[F64, F64]:
        nats = rng.gamma(9, 0.35, (articles * windows, plans))
        shared = np.repeat(rng.normal(0, 0.05, (articles, plans)), windows, axis=0)
        damage = LOSS + shared + rng.normal(0, 0.05, nats.shape)
        return columns(nats * 100, np.full_like(nats, 100)), columns((nats + damage) * 100, np.full_like(nats, 100))

    reference, scores = draw()
    heldout = losses("perplexity", *draw())

    def held(groups: npt.NDArray[np.int64] | None) -> float:
        bounds = upper_bounds(
            metric, reference, scores, Terms(0.95, 400 if groups is None else articles, 1, groups, draws=1000)
        )
        return float((heldout <= bounds).mean())

    assert held(None) < 0.85
    assert held(groups) >= 0.93


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("within", WITHIN)
def test_bounds_hold_where_a_promise_is_given(heavy: bool, within: str) -> None:
    """A small part of the bench's simulation: 40 documents and as many held out, 800 cases."""
    setting = Setting(40, heavy, within, 1.0, 0.9)
    found = coverage(setting, seed=3, rounds=4, draws=400)
    assert found.given >= found.cases / 2
    assert found.held_given >= 0.9 - ALLOWED - 0.01  # the cases' own noise is one point


def test_interval_covers_the_true_loss_and_is_paired() -> None:
    rng, metric = np.random.default_rng(8), METRICS["rouge2"]
    before = rng.beta(0.5, 2.0, 400)
    reference = np.stack([before, np.ones(400)], axis=1)
    low, high = interval(metric, reference, reference * [0.95, 1.0], seed=1)
    assert low == pytest.approx(0.05)
    assert high == pytest.approx(0.05)
    covered = 0
    for _ in range(100):
        one, other = (rows[:, 0] for rows in perplexity(rng, 200, 1, LOSS))
        low, high = interval(METRICS["perplexity"], one, other, seed=1, draws=500)
        covered += low <= LOSS + 0.001 <= high
    assert 90 <= covered <= 99


@pytest.mark.parametrize("name", SOURCES)
def test_the_samples_said_to_be_needed_do(name: str) -> None:
    """Estimated from another plan of twice the loss; a plan at half the target is then bounded near the target. The
    synthetic perplexity's noise hardly falls with its loss, so that its estimate is the worst."""
    rng, metric, target = np.random.default_rng(9), METRICS[name], 0.05
    pilot, worse = (rows[:, 0] for rows in SOURCES[name](rng, 400, 1, 2 * (1 - GAP_SHARE) * target))
    needed = samples_needed(metric, pilot, [worse, worse * [0.5, 1.0]], Terms(0.95, 4000, 1), target=target)
    assert needed.have == 400
    assert needed.acceptance is not None
    assert needed.enough == (needed.acceptance <= 400)
    reference, scores = SOURCES[name](rng, needed.acceptance, 60, (1 - GAP_SHARE) * target)
    bounds = upper_bounds(metric, reference, scores, Terms(0.95, 4000, 1, draws=500))
    gap = float((bounds - losses(name, reference, scores)).mean())
    assert 0.6 * GAP_SHARE * target < gap < 1.5 * GAP_SHARE * target


def test_too_little_heldout_text_is_beyond_any_acceptance_samples() -> None:
    reference, scores = (rows[:, 0] for rows in exact_match(np.random.default_rng(10), 400, 1, LOSS))
    metric = METRICS["exact_match"]
    needed = samples_needed(metric, reference, [scores], Terms(0.95, 50, 1), target=0.05)
    assert needed.acceptance is None
    assert not needed.enough
    enough = samples_needed(metric, reference, [scores], Terms(0.95, needed.both, 1), target=0.05)
    assert enough.acceptance == pytest.approx(needed.both, rel=0.2)


def test_bisection_over_nested_plans_costs_the_promise_nothing() -> None:
    """64 steps, each harming a few samples more; the largest step accepted is the plan, as a conversion finds it."""
    rng, metric, n, steps, target = np.random.default_rng(11), METRICS["rouge2"], 300, 64, 0.05
    met = 0
    for _ in range(100):
        before = rng.beta(0.5, 2.0, 2 * n)
        hit = rng.random((steps, 2 * n)) < 0.02
        moved = before * 0.88 + rng.standard_normal((steps, 2 * n)) * 0.4 * np.minimum(before, 1 - before)
        latest = np.maximum.accumulate(np.where(hit, np.arange(steps)[:, None], -1), axis=0)  # [steps, 2n]
        after = np.where(latest < 0, before, np.take_along_axis(np.clip(moved, 0, 1), np.maximum(latest, 0), axis=0))
        plans = columns(after.T)
        reference = columns(before[:, None])
        low, high = -1, steps
        while high - low > 1:
            middle = (low + high) // 2
            bound = upper_bound(metric, reference[:n, 0], plans[:n, middle], Terms(0.95, n, 1, draws=400))
            low, high = (middle, high) if bound <= target else (low, middle)
        met += int(low < 0 or losses("rouge2", reference[n:, 0], plans[n:, low]) <= target)
    assert met / 100 >= 0.93
