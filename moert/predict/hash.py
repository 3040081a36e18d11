"""What the pack's hash function says (SiDA, Du et al. 2023): alone, or together with the coming layer's router."""

from __future__ import annotations

from moert.predict.foresight import Foresight
from moert.predict.pool import Pool
from moert.predict.predictor import Prediction, Situation, of_any_token, of_one_token, ranked


class HashAhead:
    """Nothing about passes that have not begun."""

    def __init__(self, foresight: Foresight) -> None:
        self._foresight = foresight

    def predict(self, situation: Situation) -> Prediction:
        return self._foresight.ranked(situation.at)


class HashAndGate:
    """For one token the pool of both; before the first layer, for many tokens, and where one of both can't tell, what
    the other says."""

    def __init__(self, foresight: Foresight) -> None:
        self._foresight, self._pool = foresight, Pool()
        foresight.came = self._pool.came

    def predict(self, situation: Situation) -> Prediction:
        at, hashed = situation.at, self._foresight.shares(situation.at)
        foreseen = self._foresight.ranked(at)
        scores = situation.scores() if hashed is not None or not foreseen else None
        if scores is None:
            return foreseen
        weights = scores**2 if hashed is None else self._pool.both(at, scores, hashed)
        return ranked(of_any_token(of_one_token(weights, situation.top_k), situation.n_tokens))
