"""The baseline: each layer's experts by how often the calibration text went to them, whatever happened before."""

from __future__ import annotations

from moert.pack.paths import TransitionTable
from moert.predict.predictor import Prediction, Situation, of_any_token, of_one_token, ranked


class Popularity:
    def __init__(self, tables: TransitionTable) -> None:
        self._tables = tables

    def predict(self, situation: Situation) -> Prediction:
        share = self._tables.probabilities(situation.at)
        return ranked(of_any_token(of_one_token(share, situation.top_k), situation.n_tokens))
