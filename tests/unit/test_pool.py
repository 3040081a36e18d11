"""Two opinions as one: the better of both gets the say."""

from __future__ import annotations

import numpy as np
import pytest

from moert.beside.sida.foresight import Pool
from moert.pack.model_spec import LayerKey

AT = LayerKey("decoder", 1)


def opinion(rng: np.random.Generator, right: int | None) -> np.ndarray:
    numbers = rng.random(8) + 0.01
    if right is not None:
        numbers[right] += 4
    shares: np.ndarray = numbers / numbers.sum()
    return shares


@pytest.mark.parametrize("knows", [0, 1])
def test_who_is_right_more_often_is_listened_to(knows: int) -> None:
    rng, pool, right = np.random.default_rng(0), Pool(), []
    for turn in range(400):
        chosen = int(rng.integers(8))
        said = [opinion(rng, chosen if who == knows else int(rng.integers(8))) for who in range(2)]
        pooled = pool.both(AT, *said)
        assert pooled.sum() == pytest.approx(1)
        if turn >= 300:
            right.append(pooled.argmax() == chosen)
        pool.came(AT, (chosen,))
    assert np.mean(right) > 0.95


def test_answers_of_other_layers_and_of_nothing_teach_nothing() -> None:
    pool, rng = Pool(), np.random.default_rng(1)
    said = opinion(rng, 2), opinion(rng, 3)
    first = pool.both(AT, *said)
    pool.came(LayerKey("decoder", 2), (2,))
    pool.came(AT, ())
    assert np.array_equal(pool.both(AT, *said), first)
    pool.came(AT, (2,))
    pool.came(AT, (2,))
    later = pool.both(AT, *said)
    assert later[2] > first[2]


def test_an_impossible_expert_is_no_error() -> None:
    sure = np.zeros(4)
    sure[1] = 1.0
    pool = Pool()
    assert np.isfinite(pool.both(AT, sure, sure[::-1])).all()
    pool.came(AT, (3,))
    assert np.isfinite(pool.both(AT, sure, sure)).all()
