"""No prediction: nothing is loaded before it is demanded."""

from __future__ import annotations

from moert.predict.predictor import Prediction, Situation


class NoPrediction:
    def predict(self, situation: Situation) -> Prediction:
        return []
