"""Gate-ahead (Eliseev and Mazur 2023, Mixtral-offloading): the coming layer's router, asked before its time.

Between two layers the hidden state changes little, so that this router says nearly the same of the present one.
"""

from __future__ import annotations

from moert.predict.predictor import Prediction, Situation, of_any_token, of_one_token, ranked


class GateAhead:
    def predict(self, situation: Situation) -> Prediction:
        """Nothing where there is no present hidden state: before the first layer of a token."""
        scores = situation.scores()
        if scores is None:
            return []
        # Squared, since only the largest are selected: claims of trained models came out closer to what was demanded.
        return ranked(of_any_token(of_one_token(scores**2, situation.top_k), situation.n_tokens))
