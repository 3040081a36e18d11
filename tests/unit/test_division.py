"""Dividing samples: nothing in both parts, nothing lost, running text stays running text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeconv.calibration import Sample as S
from moeconv.calibration import divide
from moeconv.errors import CalibrationError

SAMPLES = st.lists(st.integers(0, 5).map(lambda i: S(str(i), "t")), min_size=2, max_size=40)


@given(SAMPLES.filter(lambda samples: len(set(samples)) > 1), st.floats(0.1, 0.9))
def test_equal_samples_never_land_in_both_parts(samples: list[S], share: float) -> None:
    first, second = divide(samples, True, share, 3)
    assert not set(first) & set(second)
    assert sorted([*first, *second], key=str) == sorted(set(samples), key=str)


@given(st.lists(st.text("ab \n", min_size=1).map(S), min_size=2, max_size=40), st.floats(0.1, 0.9))
def test_running_text_is_cut_once(samples: list[S], share: float) -> None:
    first, second = divide(samples, False, share, 3)
    assert first
    assert second
    assert [*first, *second] == samples


def test_share_counts_samples_or_characters() -> None:
    pairs = [S(f"word {i}", f"w {i}") for i in range(100)]
    first, second = divide(pairs, True, 0.6, 0)
    assert (len(first), len(second)) == (60, 40)
    assert divide(pairs, True, 0.6, 0) == (first, second)
    assert divide(pairs, True, 0.6, 1)[0] != first
    text = [S("x" * 600)] + [S(f"{i:0100d}") for i in range(4)]
    assert [len(part) for part in divide(text, False, 0.6, 0)] == [1, 4]


def test_copies_with_other_white_space_are_dropped() -> None:
    first, second = divide([S("a b", "c"), S("a  b ", "c"), S("d", "e")], True, 0.5, 0)
    assert {sample.source for sample in (*first, *second)} == {"a b", "d"}
    text = [S("first " * 20), S("= Heading ="), S("second " * 20), S("= Heading ="), S("first  " * 20)]
    assert divide(text, False, 0.4, 0)[1] == (text[2], text[3])


@pytest.mark.parametrize("seq2seq", [True, False])
def test_one_sample_can_not_be_divided(seq2seq: bool) -> None:
    with pytest.raises(CalibrationError, match="nothing to divide: give more"):
        divide([S("a", "b"), S("a ", "b")], seq2seq, 0.5, 0)
