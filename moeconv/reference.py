"""The unquantised answers: what every loss is measured against. Kept on disk, so that a rerun need not repeat them."""

from __future__ import annotations

import math

from moeconv.errors import SettingsError
from moeconv.metrics import Metric
from moeconv.scorers import Scorer, Scores
from moeconv.trial import ORIGINAL, Trial
from moeconv.workdir import WorkDir

LARGEST_VALUE = 1e30


def measured_reference(trial: Trial, scorer: Scorer, metric: Metric, work: WorkDir, name: str) -> Scores:
    """Scores of the unquantised model, from the work directory if they are there, else measured and kept.

    Raises SettingsError where the model scores nothing, so that no loss could be measured against it.
    """
    scores = work.load_scores(f"{name}.npz")
    if scores is None or len(scores.per_sample) != scorer.n_samples:
        trial.assign(dict.fromkeys(trial.spec.expert_keys(), ORIGINAL))
        scores = scorer.score()
        work.save_scores(f"{name}.npz", scores)
    value = metric.value(scores.per_sample)
    if not math.isfinite(value) or not 0 < value < LARGEST_VALUE:
        raise SettingsError(
            f"the unquantised model has {metric.name} {value:.4g} on this text, so no loss can be measured: check the "
            "text, --metric and --max-new-tokens"
        )
    return scores
