"""The promise: a bound that the loss on text not seen yet stays under, with a stated confidence. Pure.

A plan is judged on n acceptance samples that took no part in ranking; what was promised is then measured once on m
held-out samples of the same source. So two noises count, and a bound of the expected loss alone is too low: at n = m
a 95% percentile of that kind held in 83 to 88 of 100 simulated cases.

What is said here of samples is done with documents where samples are alike in them (`evidence`): whole documents are
drawn, losses are ratios of sums over what was drawn, n and m count documents.

The bound is a quantile of a paired bootstrap. Each draw reweights the acceptance samples (one source of text that
could have given them: the Bayesian bootstrap, Rubin 1981, exponential weights) and takes m held-out samples from it
(Poisson counts); both steps together are independent geometric counts of mean m/n, the same for reference and plan.
Harm that is rare may be missing from n samples, so each draw also counts the worst sample seen as if it had come up
once more. For plain counts of harmed samples the two give the exact predictive bound: Gamma(k + 1), then Poisson.
Documents are few, so their bound is moved a little further away (`widening`).

Needs a metric whose value stays when all sums are scaled, as that of every ratio does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from moeconv.measure.metrics import F64, Metric
from moeconv.promise.evidence import Documents, effective

DRAWS = 4000
TWO_SIDED = 0.95  # confidence of intervals
CHUNK_ELEMENTS = 1 << 21  # numbers held at once by a step of the bootstrap: 16 MB
GAP_SHARE = 0.5  # of the target; a bound further above the loss than this makes the promise a timid one
STEEPEST = 4.0  # noise is carried over to a loss at most this many times the measured one


class Needed(NamedTuple):
    """How many samples (documents, where samples are alike in them) a promise takes that is not timid.

    There are `have` acceptance samples; `acceptance` would do beside the held-out ones that there are (None where no
    number makes up for so few of those), or `both` of each (None where that can't be told either).
    """

    have: int
    acceptance: int | None
    both: int | None

    @property
    def enough(self) -> bool:
        return self.acceptance is not None and self.acceptance <= self.have


@dataclass(frozen=True)
class Terms:
    """What a bound is to hold for: as much text as `heldout` samples, with this confidence; None bounds the expected
    loss alone. `groups` [n] says which of the samples judged on are of one document; `heldout` then counts documents,
    as `Evidence.heldout_number` does."""

    confidence: float
    heldout: float | None
    seed: int
    groups: Documents | None = None
    draws: int = DRAWS

    def number(self, samples: int) -> float:
        """How many samples are judged on, or documents worth as many of one size."""
        return samples if self.groups is None else effective(self.groups)


def upper_bound(metric: Metric, reference: F64, scores: F64, terms: Terms) -> float:
    """The bound of one plan; see `upper_bounds`. reference, scores [n, columns]."""
    return float(upper_bounds(metric, reference[:, None], scores[:, None], terms)[0])


def upper_bounds(metric: Metric, reference: F64, scores: F64, terms: Terms) -> F64:
    """For each plan the bound that its loss on held-out samples (documents) stays under, on these terms. Infinite where
    the acceptance samples can't tell.

    reference, scores [n, plans, columns]; all plans share the counts of a seed.

    A plan that is the smallest of several that were judged is a lucky one, yet a bisection over plans that contain each
    other costs nothing: in 700 simulated conversions at 95% what it found met the target in 98%, like the smallest
    accepted of all 129 plans. Unrelated searches would: the smallest found by four met it in 93%.
    """
    groups, confidence = terms.groups, terms.confidence
    number = terms.number(len(scores))
    if groups is not None:
        reference, scores = _summed(reference, groups), _summed(scores, groups)
    ratio = None if terms.heldout is None else terms.heldout / number
    losses, again = _resampled(metric, reference, scores, ratio, terms.seed, terms.draws)
    losses += again[:, None] * _worst_harm(metric, reference, scores)
    bounds = np.quantile(np.where(np.isnan(losses), np.inf, losses), confidence, axis=0, method="higher")
    if groups is None:
        return np.asarray(bounds)
    before, after = (metric.value_of_sums(rows.sum(axis=0)) for rows in (reference, scores))
    measured = metric.loss(before, after)
    return np.where(bounds > measured, measured + widening(number, confidence) * (bounds - measured), bounds)


def widening(number: float, confidence: float) -> float:
    """By how much a bound from `number` documents must be further away than the bootstrap has it, which knows their
    spread no better than they show it: Student's t beside the normal quantile (first term of its expansion in 1/ν), and
    the variance of n weights, n - 1 over n + 1 of what it should be."""
    if number <= 1:
        return math.inf
    z, free = NormalDist().inv_cdf(confidence), number - 1
    student = 1 + (z * z + 1) / (4 * free)
    return student * math.sqrt((number + 1) / free)


def interval(
    metric: Metric,
    reference: F64,
    scores: F64,
    *,
    seed: int,
    groups: Documents | None = None,
    draws: int = DRAWS,
) -> tuple[float, float]:
    """Two-sided 95% interval of the expected loss, by the same paired bootstrap. reference, scores [n, columns]."""
    if groups is not None:
        reference, scores = _summed(reference, groups), _summed(scores, groups)
    losses, _ = _resampled(metric, reference[:, None], scores[:, None], None, seed, draws)
    low, high = np.nanquantile(losses, [(1 - TWO_SIDED) / 2, (1 + TWO_SIDED) / 2])
    return float(low), float(high)


def samples_needed(metric: Metric, reference: F64, plans: Sequence[F64], terms: Terms, *, target: float) -> Needed:
    """How many samples keep the bound within GAP_SHARE of the target above the loss, for a plan just accepted.

    `plans` are scores [n, columns] of plans measured on the acceptance samples, such as uniform widths; the one whose
    loss is nearest to that of a plan just accepted speaks for the noise. Its variance is taken to grow with the loss
    (twice the samples changed: twice the loss, twice the variance) and to fall with 1/n + 1/m.
    """
    likely = (1 - GAP_SHARE) * target
    losses = [metric.loss(metric.value(reference), metric.value(scores)) for scores in plans]
    nearest = min(range(len(plans)), key=lambda plan: _distance(losses[plan], likely))
    upper = upper_bound(metric, reference, plans[nearest], terms)
    have, heldout = terms.number(len(reference)), terms.heldout
    heldout_part = 0.0 if heldout is None else 1 / heldout
    if not math.isfinite(upper):
        return Needed(round(have), None, None)
    gap = (upper - losses[nearest]) * math.sqrt(likely / max(losses[nearest], likely / STEEPEST))
    allowed = (1 / have + heldout_part) * (GAP_SHARE * target / gap) ** 2 if gap > 0 else math.inf  # 1/n + 1/m
    acceptance = math.ceil(1 / (allowed - heldout_part)) if allowed > heldout_part else None
    return Needed(round(have), acceptance, math.ceil((1 if heldout is None else 2) / allowed))


def _distance(loss: float, wanted: float) -> float:
    return abs(math.log(loss / wanted)) if loss > 0 else math.inf


def _summed(rows: F64, groups: Documents) -> F64:
    """Rows [n, ...] added up by group → [groups, ...]."""
    names, places = np.unique(groups, return_inverse=True)
    sums = np.zeros((len(names), *rows.shape[1:]))
    np.add.at(sums, places.reshape(-1), rows)
    return sums


def _resampled(
    metric: Metric, reference: F64, scores: F64, ratio: float | None, seed: int, draws: int
) -> tuple[F64, F64]:
    """Losses [draws, plans], and the weight that one sample more would have had: [draws], 1 on average.

    reference, scores [n, plans, columns]. `ratio` is m/n; None stands for endless held-out text.
    """
    rng = np.random.default_rng(seed)
    n, plans, columns = scores.shape
    both = np.concatenate([reference, scores], axis=2).reshape(n, -1)  # [n, plans × 2 × columns]
    losses, again = np.empty((draws, plans)), np.empty(draws)
    step = max(1, CHUNK_ELEMENTS // max(n + 1, both.shape[1]))
    for start in range(0, draws, step):
        shape = (min(step, draws - start), n + 1)
        if ratio is None:
            counts = rng.standard_exponential(shape)
        else:
            counts = (rng.geometric(1 / (1 + ratio), shape) - 1) / ratio
        sums = (counts[:, :n] @ both).reshape(-1, plans, 2 * columns)
        with np.errstate(divide="ignore", invalid="ignore"):  # a draw may miss every sample that counts: NaN
            before, after = metric.value_of_sums(sums[..., :columns]), metric.value_of_sums(sums[..., columns:])
        losses[start : start + step] = metric.loss(before, after)
        again[start : start + step] = counts[:, n]
    return losses, again


def _worst_harm(metric: Metric, reference: F64, scores: F64) -> F64:
    """How much higher the loss would be with one more of the sample (document) that the plan harmed most: [plans].

    Where nothing was harmed, where values are better when higher: what it would take for one of the reference's best
    samples to score nothing.
    """
    total, planned = reference.sum(axis=0), scores.sum(axis=0)  # [plans, columns]
    with np.errstate(divide="ignore", invalid="ignore"):
        now = metric.loss(metric.value_of_sums(total), metric.value_of_sums(planned))  # [plans]
        more = metric.loss(metric.value_of_sums(total + reference), metric.value_of_sums(planned + scores))
        harm: F64 = np.nan_to_num(more - now, nan=0.0).max(axis=0)
        if not metric.higher_is_better:
            return np.maximum(harm, 0.0)
        best = np.nan_to_num(metric.value_of_sums(reference), nan=0.0).max(axis=0)
        lost = best / metric.value_of_sums(total) / len(scores)
    return np.where(harm > 0, harm, lost)
