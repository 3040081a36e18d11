"""The unquantised answers: what every loss is measured against. Kept on disk, so that a rerun need not repeat them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from moeconv.scorers import Scorer, Scores
from moeconv.trial import Trial


def measured_reference(trial: Trial, scorer: Scorer, path: Path) -> Scores:
    """Scores of the unquantised model, from `path` if they are there, else measured and written to it."""
    if path.is_file():
        with np.load(path) as stored:
            outputs = tuple(str(text) for text in stored["outputs"])
            return Scores(stored["per_sample"], float(stored["nll"]), outputs)
    trial.assign(dict.fromkeys(trial.spec.expert_keys(), 16))
    scores = scorer.score()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, per_sample=scores.per_sample, nll=scores.nll, outputs=np.array(scores.outputs, dtype=str))
    os.replace(temporary, path)
    return scores
