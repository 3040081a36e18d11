"""The confidence bound of a loss, and the documents that it rests on. Pure."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moeconv.measure.metrics import F64, Metric

# The number of documents that a promise rests on, and whether they are enough for its confidence. Pure.
# Samples of one document are alike, so documents are counted; and among documents of unlike sizes, a large one counts
# for more. (Σ size)² / Σ size² is the number of equal documents that would be as noisy (Kish 1965): it counts
# documents by their sizes.
# The number that a promise needs was found by simulation (`make bench-promise`, numbers and sizes of documents): with
# BEYOND = 1.5 documents expected beyond the bound (15 at 90%, 30 at 95%, 150 at 99%) that are worth half as many of
# one size, bounds hold as often as they say, less 2 points at most. 20 of very unlike sizes, worth 12, held in 92.8%
# at 95%, and 10 of them, worth 7, in 91%. Held-out text must not be so short that a draw may have none: GUESSES times
# the number that leaves a chance of 1 − confidence for that. Where the text does not tell which rows are alike,
# documents are runs of rows. Whether rows of a run are alike shows in a plan's effects on them (`alike`). Where two
# rows together say more than one alone, rows are counted, by their worth; else runs are.

Documents = npt.NDArray[np.integer[Any]]
"""The number of each sample's document."""

BEYOND = 1.5
WORTH = 0.5  # of these, counted as if of one size
GUESSES = 2.0
MOST_ALIKE = 2.0  # rows that say as much as one; if more do, runs are counted


@dataclass(frozen=True)
class Evidence:
    """The documents [samples] of the text that plans are judged on and of the held-out text; `why` says in words how
    they were told. `runs`: they are runs of rows, which may count for more than one. `alike` as in `Terms`."""

    acceptance: Documents
    heldout: Documents
    why: str = ""
    runs: bool = False
    alike: float = 1.0

    @property
    def count(self) -> int:
        """The number of documents that plans are judged on, large and small."""
        return len(np.unique(self.acceptance))

    @property
    def number(self) -> float:
        """The number of documents that plans are judged on, as if of one size and independent."""
        return effective(self.acceptance) / self.alike

    @property
    def heldout_number(self) -> float:
        """The number of held-out documents beside these. With fewer samples from each document they are worth less: the
        smaller of the ratios of documents and of samples counts."""
        samples = len(self.heldout) / len(self.acceptance)
        return min(effective(self.heldout) / self.alike, self.number * samples)

    @property
    def is_grouped(self) -> bool:
        """Whether any two samples are of one document."""
        return self.count < len(self.acceptance)

    def enough(self, confidence: float) -> bool:
        wanted = least(confidence)
        judged = self.count >= wanted and self.number >= WORTH * wanted
        return judged and effective(self.heldout) >= least_heldout(confidence)

    def of_samples(self) -> Evidence:
        """Returns the evidence with each sample as its own document: bounds then hold for more text of the same
        documents."""
        return replace(self, acceptance=np.arange(len(self.acceptance)), heldout=np.arange(len(self.heldout)))

    def of_rows(self, effects: F64) -> Evidence:
        """Returns the evidence with rows in place of runs, where a plan's `effects` [samples] show that rows are hardly
        alike; else this evidence."""
        found = alike(effects, self.acceptance)
        is_more = found < min(MOST_ALIKE, len(self.acceptance) / self.count)
        return replace(self.of_samples(), runs=False, alike=found) if is_more else self


def effective(documents: Documents) -> float:
    """Returns the number of documents of equal size that would be as noisy."""
    _, sizes = np.unique(documents, return_counts=True)
    return float(sizes.sum() ** 2 / (sizes**2).sum())


def alike(effects: F64, runs: Documents) -> float:
    """Returns the number of rows that say as much as one independent row, 1 or more: the variance of sums over runs,
    divided by the sum of the rows' variances, and one standard error more. effects [rows] have a mean of zero."""
    _, places = np.unique(runs, return_inverse=True)
    sums = np.bincount(places.reshape(-1), effects)
    rows = float((effects**2).sum())
    if len(sums) < 2 or not rows > 0:
        return math.inf
    ratio = float((sums**2).sum()) / rows
    return max(1.0, ratio * math.exp(math.sqrt(2 / (len(sums) - 1))))


def least(confidence: float) -> int:
    """Returns the number of documents to judge by that a promise needs."""
    return math.ceil(round(BEYOND / (1 - confidence), 6))


def least_heldout(confidence: float) -> int:
    """Returns the number of held-out documents that a promise needs."""
    return math.ceil(-GUESSES * math.log(1 - confidence))


# The promise: a bound that the loss on text not seen yet stays under, with a stated confidence. Pure.
# A plan is judged on n acceptance samples that took no part in ranking; the promised loss is then measured once on
# m held-out samples of the same source. So two noises count, and a bound of the expected loss alone is too low: at
# n = m its 95% percentile held in 83 to 88 of 100 simulated cases.
# Where samples of a document are alike, documents take the place of samples below (`Evidence`): whole documents are
# drawn, losses are ratios of sums over the drawn ones, n and m count documents.
# The bound is a quantile of a paired bootstrap. Each draw reweights the acceptance samples (one source of text that
# could have given them: the Bayesian bootstrap, Rubin 1981, exponential weights) and takes m held-out samples from
# it (Poisson counts); both steps together are independent geometric counts of mean m/n, the same for reference and
# plan. Harm that is rare may be missing from n samples, so each draw also counts the worst sample seen as if it had
# come up once more. For plain counts of harmed samples the two give the exact predictive bound: Gamma(k + 1), then
# Poisson. Documents are few, so their quantile is taken a little further out (`widening`).
# A plan that does less harm has no larger bound. Each draw grows with the harm to any sample; gains do not make up for
# the harm that is counted once more; and that harm is no less than one middling sample lost (for metrics that are
# better when higher). For a plan that harms nothing, the harm that the mildest of other plans did to a document of the
# same text is counted (`Terms.harm`). Where no plan did any harm, nothing shows how much of a document is lost at
# once, so that a middling one is lost whole: the rule of three over documents (`Terms.unseen`).
# The metric's value must not change when all sums are scaled, as for every ratio.

DRAWS = 4000
TWO_SIDED = 0.95  # confidence of intervals
CHUNK_ELEMENTS = 1 << 21  # numbers held at once by a step of the bootstrap: 16 MB
GAP_SHARE = 0.5  # of the target; a bound further above the loss than this makes the promise a timid one
AGAIN = 16  # documents of which the worst is counted once more, in each draw the one that is worst there
STEEPEST = 4.0  # noise is carried over to a loss at most this many times the measured one


class Needed(NamedTuple):
    """The number of samples (documents, where samples are alike in them) that a promise needs in order not to be timid.

    `have` acceptance samples exist; `acceptance` would do beside the held-out ones that exist (None where no number
    makes up for too few of those), or `both` of each (None where that can't be told either).
    """

    have: int
    acceptance: int | None
    both: int | None

    @property
    def enough(self) -> bool:
        return self.acceptance is not None and self.acceptance <= self.have


@dataclass(frozen=True)
class Terms:
    """The terms of a bound: it is to hold for as much text as `heldout` samples (None: for the expected loss alone),
    with this confidence. `groups` [n] says which of the judged samples are of one document; `heldout` then counts
    documents, as `Evidence.heldout_number` does. `alike`: the number of documents that say as much as an independent
    one (see the function `alike`). `harm`: the document that another plan harmed most (`worst_harm`), which is counted
    once more for a plan that harms none; `unseen`: no plan harmed any."""

    confidence: float
    heldout: float | None
    seed: int
    groups: Documents | None = None
    draws: int = DRAWS
    alike: float = 1.0
    harm: F64 | None = None
    unseen: bool = False

    def number(self, samples: int) -> float:
        """Returns the number of judged samples, or of independent documents of one size that are worth as much."""
        return samples if self.groups is None else effective(self.groups) / self.alike

    def quantile(self, samples: int) -> float:
        """Returns the share of draws that the bound is to hold in."""
        if self.groups is None:
            return self.confidence
        further = widening(self.number(samples), self.confidence) * math.sqrt(self.alike)
        return max(self.confidence, NormalDist().cdf(further * NormalDist().inv_cdf(self.confidence)))


def upper_bound(metric: Metric, reference: F64, scores: F64, terms: Terms) -> float:
    """Returns the bound of one plan; see `upper_bounds`. reference, scores [n, columns]."""
    return float(upper_bounds(metric, reference[:, None], scores[:, None], terms)[0])


def upper_bounds(metric: Metric, reference: F64, scores: F64, terms: Terms) -> F64:
    """Returns, for each plan, the bound that its loss on held-out samples (documents) stays under, on these terms.
    Infinite where the acceptance samples can't tell.

    reference, scores [n, plans, columns]; all plans share the counts of a seed.

    The smallest accepted of several judged plans was lucky, yet a bisection over plans that contain each other costs
    nothing: in 700 simulated conversions at 95% its plan met the target in 98%, like the smallest accepted of all 129
    plans. Unrelated searches would cost something: the smallest plan of four met it in 93%.
    """
    number, least = terms.number(len(scores)), _one_lost(metric, reference)
    ratio = None if terms.heldout is None else terms.heldout / number
    both = _summed(np.concatenate([reference, scores], axis=2), terms.groups)
    worst = _worst(metric, both)
    unharmed = _alone(metric, both).max(axis=0) <= 0
    if terms.harm is not None:
        worst[:, unharmed] = terms.harm
    if terms.unseen:
        least = np.where(unharmed, _one_lost(metric, _summed(reference, terms.groups)), least)
    losses, again = _resampled(metric, both, ratio, (terms.seed, terms.draws), worst)
    losses = np.maximum(losses, again[:, None] * least)
    found = np.where(np.isnan(losses), np.inf, losses)
    return np.asarray(np.quantile(found, terms.quantile(len(scores)), axis=0, method="higher"))


def worst_harm(metric: Metric, reference: F64, scores: F64, groups: Documents | None) -> F64 | None:
    """Returns the sums of the document that the plan harmed most [2 × columns], the reference's and the plan's; None
    where the plan harmed none. reference, scores [n, columns]."""
    both = _summed(np.concatenate([reference, scores], axis=1)[:, None], groups)
    alone = _alone(metric, both)[:, 0]
    return np.asarray(both[alone.argmax(), 0]) if alone.max() > 0 else None


def widening(number: float, confidence: float) -> float:
    """Returns the factor by which the quantile from `number` documents must lie further out than the bootstrap's, which
    knows only the spread that these documents show: Student's t beside the normal quantile (first term of its expansion
    in 1/ν), and the variance of n weights, too small by (n - 1) / (n + 1)."""
    if number <= 1:
        return math.inf
    z, free = NormalDist().inv_cdf(confidence), number - 1
    student = 1 + (z * z + 1) / (4 * free)
    return student * math.sqrt((number + 1) / free)


def effects(metric: Metric, reference: F64, scores: F64) -> F64:
    """Returns the rise of the loss with one more of each sample, or of the reference's value where the plan changes no
    sample [n]. reference, scores [n, columns]."""
    if np.array_equal(reference, scores):
        return np.asarray(metric.value_of_sums(reference.sum(axis=0) + reference) - metric.value(reference))
    total, planned = reference.sum(axis=0), scores.sum(axis=0)
    more = metric.loss(metric.value_of_sums(total + reference), metric.value_of_sums(planned + scores))
    return np.asarray(more - metric.loss(metric.value_of_sums(total), metric.value_of_sums(planned)))


def interval(
    metric: Metric,
    reference: F64,
    scores: F64,
    *,
    seed: int,
    groups: Documents | None = None,
    draws: int = DRAWS,
) -> tuple[float, float]:
    """Returns the two-sided 95% interval of the expected loss, by the same paired bootstrap. reference, scores [n,
    columns]."""
    both = _summed(np.concatenate([reference, scores], axis=1)[:, None], groups)
    losses, _ = _resampled(metric, both, None, (seed, draws), None)
    low, high = np.nanquantile(losses, [(1 - TWO_SIDED) / 2, (1 + TWO_SIDED) / 2])
    return float(low), float(high)


def samples_needed(metric: Metric, reference: F64, plans: Sequence[F64], terms: Terms, *, target: float) -> Needed:
    """Returns the number of samples that keeps the bound within GAP_SHARE of the target above the loss, for a plan just
    accepted.

    `plans` are scores [n, columns] of plans measured on the acceptance samples, like uniform widths; the plan with the
    loss nearest to a just accepted one's gives the noise. Its variance is taken to grow with the loss (twice the
    samples changed: twice the loss, twice the variance) and to fall with 1/n + 1/m.
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


def _summed(rows: F64, groups: Documents | None) -> F64:
    """Returns rows [n, ...] added up by group [groups, ...]; without groups, the rows themselves."""
    if groups is None:
        return rows
    names, places = np.unique(groups, return_inverse=True)
    sums = np.zeros((len(names), *rows.shape[1:]))
    np.add.at(sums, places.reshape(-1), rows)
    return sums


def _resampled(
    metric: Metric, both: F64, ratio: float | None, draws: tuple[int, int], worst: F64 | None
) -> tuple[F64, F64]:
    """Returns losses [draws, plans], and the weight of one additional sample: [draws], 1 on average.

    both [n, plans, 2 × columns]: the reference's and the plan's. `ratio` is m/n; None stands for endless held-out text.
    `draws`: their seed and number. `worst` [.., plans, 2 × columns]: the additional sample is the one among these that
    makes the draw's loss largest, whether the plan's other changes count or do not.
    """
    (seed, number), (n, plans, width) = draws, both.shape
    rng, columns = np.random.default_rng(seed), width // 2
    losses, again = np.empty((number, plans)), np.empty(number)
    step = max(1, CHUNK_ELEMENTS // max(n + 1, plans * width))

    def lost(sums: F64) -> F64:
        return metric.loss(metric.value_of_sums(sums[..., :columns]), metric.value_of_sums(sums[..., columns:]))

    for start in range(0, number, step):
        shape = (min(step, number - start), n + 1)
        if ratio is None:
            counts = rng.standard_exponential(shape)
        else:
            counts = (rng.geometric(1 / (1 + ratio), shape) - 1) / ratio
        sums = (counts[:, :n] @ both.reshape(n, -1)).reshape(-1, plans, width)
        same = np.concatenate([sums[..., :columns]] * 2, axis=-1)
        with np.errstate(divide="ignore", invalid="ignore"):  # a draw may miss every sample that counts: NaN
            found = lost(sums)
            for more in () if worst is None else counts[:, n, None, None] * worst[:, None]:
                found = np.maximum(found, np.maximum(lost(sums + more), lost(same + more)))
        losses[start : start + step], again[start : start + step] = found, counts[:, n]
    return losses, again


def _alone(metric: Metric, both: F64) -> F64:
    """Returns the loss by each sample (document) alone, with the reference's scores for all others [n, plans]."""
    before, after = np.split(both, 2, axis=2)
    total = before.sum(axis=0)  # [plans, columns]
    with np.errstate(divide="ignore", invalid="ignore"):
        alone = metric.loss(metric.value_of_sums(total), metric.value_of_sums(total - before + after))
    return np.nan_to_num(alone, nan=0.0)


def _worst(metric: Metric, both: F64) -> F64:
    """Returns the samples (documents) that a plan harmed most [AGAIN or fewer, plans, 2 × columns]: the first one by
    its own harm, the others by their effect beside the plan's whole loss."""
    before, after = np.split(both, 2, axis=2)
    total, planned = before.sum(axis=0), after.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        more = metric.loss(metric.value_of_sums(total + before), metric.value_of_sums(planned + after))
    most = np.argsort(-np.nan_to_num(more, nan=0.0), axis=0, kind="stable")[: AGAIN - 1]
    chosen = np.concatenate([_alone(metric, both).argmax(axis=0)[None], most])
    return np.asarray(np.take_along_axis(both, chosen[:, :, None], axis=0))


def _one_lost(metric: Metric, reference: F64) -> F64:
    """Returns the loss if one sample (document), the middle of those that score anything, scored nothing [plans]; 0 for
    metrics that are better when lower, which have no worst value."""
    if not metric.higher_is_better:
        return np.zeros(reference.shape[1])
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where no sample scores: NaN
        values = metric.value_of_sums(reference)  # [n, plans]
        middle = np.nanmedian(np.where(values > 0, values, np.nan), axis=0)
        return np.nan_to_num(middle / metric.value_of_sums(reference.sum(axis=0)) / len(reference))
