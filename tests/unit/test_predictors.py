from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeconv.routes import build
from moert.experts.predictors import GateAhead, Situation, Transitions, of_any_token, of_one_token, ranked
from moert.pack.model_spec import LayerKey
from recipes.bench.controls import Oracle, Popularity, Shuffled

EXPERTS = 5
FIRST, SECOND = np.array([[0], [0], [0], [1]]), np.array([[2], [2], [3], [4]])
LAYERS = [LayerKey("decoder", layer) for layer in range(2)]
TABLE = build(EXPERTS, dict(zip(LAYERS, [FIRST, SECOND], strict=True)))
SCORES = np.array([0.1, 0.3, 0.0, 0.5, 0.1])
AFTER_1 = Situation(LayerKey("decoder", 1), [np.array([[1]])], n_tokens=1, top_k=1, scores=lambda: SCORES)


def rounded(prediction: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(expert, round(probability, 9)) for expert, probability in prediction]


def test_each_predictor_answers_from_its_own_evidence() -> None:
    assert rounded(Transitions(TABLE).predict(AFTER_1)) == [(4, 1.0)]
    assert rounded(GateAhead().predict(AFTER_1)) == rounded([(3, 25 / 36), (1, 9 / 36), (0, 1 / 36), (4, 1 / 36)])
    assert rounded(Popularity(TABLE).predict(AFTER_1)) == [(2, 0.5), (3, 0.25), (4, 0.25)]


def test_at_the_first_layer_transitions_know_how_popular_experts_are_and_the_gate_knows_nothing() -> None:
    start = Situation(LayerKey("decoder", 0), [], n_tokens=1, top_k=1)
    assert Transitions(TABLE).predict(start) == [(0, 0.75), (1, 0.25)]
    assert GateAhead().predict(start) == []


def test_transitions_join_the_tokens_of_a_group() -> None:
    table = build(EXPERTS, {LAYERS[0]: np.array([[0], [0], [1], [1]]), LAYERS[1]: np.array([[2], [3], [3], [3]])})
    transitions = Transitions(table)
    both = Situation(LayerKey("decoder", 1), [np.array([[0], [1]])], n_tokens=2, top_k=1)
    assert transitions.predict(both) == [(3, 1.0), (2, 0.5)]
    twice = replace(both, history=[np.array([[0], [0]])])
    assert transitions.predict(twice) == [(2, 0.75), (3, 0.75)]
    many = replace(both, history=[np.array([[0]] * 1000)], n_tokens=1000)  # answered from a sample
    assert rounded(transitions.predict(many)) == [(2, 1.0), (3, 1.0)]


weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=20).map(np.array)


@given(weights, st.integers(1, 8))
def test_probabilities_of_one_token_add_up_to_top_k_and_keep_the_order(weights, top_k) -> None:
    probabilities = of_one_token(weights, top_k)
    assert ((probabilities >= 0) & (probabilities <= 1)).all()
    assert ((probabilities > 0) == (weights > 0)).all()
    assert probabilities.sum() == pytest.approx(min(top_k, np.count_nonzero(weights)))
    order = np.argsort(weights, kind="stable")
    assert (np.diff(probabilities[order]) >= -1e-12).all()
    below = probabilities < 1  # these stay in proportion
    if below.sum() > 1 and (weights[below] > 0).all():
        assert np.ptp(np.log(probabilities[below] / weights[below])) < 1e-9


def test_a_router_that_is_sure_leaves_next_to_nothing_for_the_others() -> None:
    weights = np.array([1e-40, 1.0, 1e-20, 0.0])
    assert of_one_token(weights, 1).tolist() == pytest.approx([0, 1, 0, 0])
    assert ranked(of_one_token(weights, 1))[0] == (1, 1.0)
    assert of_one_token(weights, 2).tolist() == pytest.approx([0, 1, 1, 0])
    assert of_one_token(np.zeros(3), 2).tolist() == [0, 0, 0]


def test_a_group_demands_what_any_of_its_tokens_does() -> None:
    assert of_any_token(np.array([0.0, 0.5, 1.0]), 3).tolist() == [0.0, 0.875, 1.0]
    assert of_any_token(np.array([0.3]), 1).tolist() == [0.3]


def test_ranking_leaves_out_what_is_not_expected_and_breaks_ties_by_number() -> None:
    assert ranked(np.array([0.25, 0.0, 0.5, 0.25])) == [(2, 0.5), (0, 0.25), (3, 0.25)]


def test_the_oracle_names_exactly_what_comes() -> None:
    oracle = Oracle([(LAYERS[0], (1,)), (LAYERS[1], (3, 2)), (LAYERS[0], (4,))])
    layer_1, layer_0 = replace(AFTER_1, at=LAYERS[1]), replace(AFTER_1, at=LAYERS[0])
    assert oracle.predict(layer_1) == [(3, 1.0), (2, 1.0)]
    with pytest.raises(ValueError, match="trace has D00"):
        oracle.predict(layer_1)
    assert oracle.predict(layer_0) == []


def test_shuffled_answers_name_as_many_experts_at_the_same_price_by_a_fixed_exchange() -> None:
    plain = GateAhead()
    control = Shuffled(plain, EXPERTS, seed=1)
    answer = control.predict(AFTER_1)
    assert [price for _, price in answer] == [price for _, price in plain.predict(AFTER_1)]
    exchanged = {right: wrong for (right, _), (wrong, _) in zip(plain.predict(AFTER_1), answer, strict=True)}
    assert len(set(exchanged.values())) == 4
    assert any(right != wrong for right, wrong in exchanged.items())
    assert control.predict(AFTER_1) == answer == Shuffled(plain, EXPERTS, seed=1).predict(AFTER_1)
