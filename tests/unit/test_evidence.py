"""How many documents a promise takes, how looks at a text are counted, and what is said of both."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeconv.artifacts import SensitivityTable, Summary
from moeconv.measure.evaluation import Evaluation
from moeconv.measure.metrics import METRICS
from moeconv.measure.scorers.build import entropy_of
from moeconv.promise.bound import Terms, samples_needed
from moeconv.promise.evidence import Evidence, effective, least, least_heldout
from moeconv.promise.judging import at_chance
from moeconv.promise.looks import LOOKS, look
from moeconv.promise.standing import bound_doubt, looks_text, needed_text, unreached_text
from moert.pack.model_spec import ExpertKey


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_documents_of_unlike_sizes_count_for_less(numbers: list[int]) -> None:
    found = effective(np.array(numbers))
    distinct = len(set(numbers))
    assert 1 <= found <= distinct + 1e-9
    assert effective(np.repeat(numbers, 3)) == pytest.approx(found)
    if len({numbers.count(number) for number in numbers}) == 1:
        assert found == pytest.approx(distinct)


def test_a_promise_takes_thirty_documents_at_95_percent() -> None:
    assert [least(share) for share in (0.9, 0.95, 0.99)] == [15, 30, 150]
    assert least_heldout(0.95) == 6
    many, few = np.repeat(np.arange(30), 5), np.repeat(np.arange(29), 5)
    assert Evidence(many, few).enough(0.95)
    assert not Evidence(few, many).enough(0.95)
    assert Evidence(np.append(many, [0] * 15), many).enough(0.95), "worth 22 of one size"
    assert not Evidence(many, np.repeat(np.arange(5), 40)).enough(0.95)
    assert not Evidence(np.append(many, [0] * 100), many).enough(0.95), "one large document is no thirty"


def test_the_heldout_text_counts_in_documents_and_never_for_more_than_its_samples() -> None:
    judged = np.repeat(np.arange(40), 10)
    assert Evidence(judged, np.repeat(np.arange(20), 10)).heldout_number == pytest.approx(20)
    assert Evidence(judged, np.repeat(np.arange(20), 80)).heldout_number == pytest.approx(20)
    assert Evidence(judged, np.arange(40)).heldout_number == pytest.approx(4), "one sample of each is little"


def test_looks_at_one_text_are_counted_once_each(tmp_path) -> None:
    root = tmp_path / "work"
    assert look(root, "seed 0", ["text"]) == 1
    assert look(root, "seed 0", ["text"]) == 1, "resumed"
    assert look(root, "seed 1", ["text", "other"]) == 2
    assert look(root, "seed 0", ["text"]) == 2
    assert look(root, "seed 2", ["other"]) == 2
    assert look(root, "seed 3", ["new"]) == 1
    assert len((root / LOOKS).read_text().splitlines()) == 4


def test_a_line_cut_short_is_left_out(tmp_path) -> None:
    look(tmp_path, "a", ["text"])
    path = tmp_path / LOOKS
    path.write_bytes(path.read_bytes() + b'{"conversion": "b", "te')
    assert look(tmp_path, "c", ["text"]) == 2
    assert look(tmp_path, "d", ["text"]) == 3
    path.write_bytes(path.read_bytes() + b'3\n"x"\n{"conversion": 1}\n\xff\n')
    assert look(tmp_path, "d", ["text"]) == 3


def test_what_is_said_is_one_true_line() -> None:
    assert looks_text(1, 0.95) is None
    assert "all 3 together at 85%" in str(looks_text(3, 0.95))
    assert "95%" not in str(looks_text(3, None))
    assert bound_doubt(None) is bound_doubt(0.04) is None
    assert "negative (-8.84%)" in str(bound_doubt(-0.0884))
    assert "no bound" in str(bound_doubt(np.inf))


def test_a_model_that_guesses_by_frequency_is_at_chance() -> None:
    entropy = entropy_of([0, 1, 2, 3] * 1000)
    assert entropy == pytest.approx(np.log(4), abs=1e-3)
    assert entropy_of([7]) == 0
    assert at_chance(evaluation(nats=1.2), entropy, "held-out") is None
    found = at_chance(evaluation(nats=1.5), entropy, "held-out")
    assert "at chance on the held-out text: 1.50 nats a token" in str(found)


def evaluation(nats: float) -> Evaluation:
    """Two samples of ten tokens."""
    return Evaluation("unquantised", ((0.0, 1.0),) * 2, (10 * nats,) * 2, (10, 10), (0.0, 0.0), 0.0, 0)


def test_experts_that_hardly_a_token_reached_are_named() -> None:
    keys = [ExpertKey("decoder", 0, at) for at in range(20)]

    def table(*unseen: int) -> SensitivityTable:
        return SensitivityTable(
            4, Summary(1, 0, 0, 0), {}, {key: 9 * (at not in unseen) for at, key in enumerate(keys)}
        )

    assert unreached_text(table()) is None
    assert "2 of 20 experts saw fewer than 8 tokens" in str(unreached_text(table(3, 5)))
    assert "D00/E003, D00/E005;" in str(unreached_text(table(3, 5)))
    assert "D00/E007 and 4 more" in str(unreached_text(table(*range(12))))


def test_an_infinite_bound_needs_more_text_and_divides_by_nothing() -> None:
    """Nothing is right, before and after: no draw gives a loss."""
    rows = np.array([[0.0, 1.0]] * 6)
    found = samples_needed(METRICS["exact_match"], rows, [rows], Terms(0.95, 6, 0), target=0.05)
    assert (found.have, found.acceptance, found.both, found.enough) == (6, None, None, False)
    line = needed_text(found, Evidence(np.arange(6), np.arange(6)), "5% at 95%")
    assert "6 calibration samples" in line
    assert "no bound can be told" in line
