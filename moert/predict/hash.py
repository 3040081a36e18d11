"""What the pack's hash function says (SiDA, Du et al. 2023): alone, or together with the coming layer's router."""

from __future__ import annotations

import numpy as np

from moert.predict.foresight import Foresight
from moert.predict.predictor import Prediction, Situation, of_any_token, of_one_token, ranked


class HashAhead:
    """Nothing about passes that have not begun."""

    def __init__(self, foresight: Foresight) -> None:
        self._foresight = foresight

    def predict(self, situation: Situation) -> Prediction:
        return self._foresight.ranked(situation.at)


class HashAndGate:
    """For one token the product of both, as if they were independent witnesses; before the first layer, for many
    tokens, and where one of both can't tell, what the other says."""

    def __init__(self, foresight: Foresight) -> None:
        self._foresight = foresight

    def predict(self, situation: Situation) -> Prediction:
        hashed = self._foresight.likely(situation.at)
        if hashed is not None and situation.n_tokens > 1:
            return self._foresight.ranked(situation.at)
        scores = situation.scores()
        if scores is None:
            return self._foresight.ranked(situation.at)
        weights = scores if hashed is None else scores * np.sqrt(hashed)
        return ranked(of_any_token(of_one_token(weights**2, situation.top_k), situation.n_tokens))
