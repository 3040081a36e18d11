"""A control: as many predictions at the same price, of the wrong experts. What it brings is not prediction."""

from __future__ import annotations

import random

from moert.predict.predictor import Prediction, Predictor, Situation


class Shuffled:
    """Another predictor's answers, each expert's number exchanged for another one's, the same all the time."""

    def __init__(self, predictor: Predictor, num_experts: int, seed: int = 0) -> None:
        self._predictor = predictor
        self._numbers = list(range(num_experts))
        random.Random(seed).shuffle(self._numbers)

    def predict(self, situation: Situation) -> Prediction:
        return [(self._numbers[expert], probability) for expert, probability in self._predictor.predict(situation)]
