"""The bench of the promise: how text is divided, and how refusals count."""

from __future__ import annotations

import dataclasses

from recipes.bench.promise import CASES, Split, halves, summary

CASE = dataclasses.replace(CASES[0], target=0.05)


def split(seed: int, loss: float | None, *, narrowest: bool = False) -> Split:
    nbytes = None if loss is None else 1_000_000
    return Split(seed, loss, loss and 0.05, nbytes, narrowest, 1.0, None if loss else "too much", "abc")


def values(splits: list[Split]) -> dict[str, tuple[float, bool | None]]:
    return {row.name.removeprefix(f"{CASE.name}: "): (row.value, row.met) for row in summary(CASE, splits)}


def test_halves_share_no_input_and_lose_no_row() -> None:
    rows = [{"input": f"word{number // 2}", "target": str(number)} for number in range(40)]
    first, second = halves(rows, 3)
    assert {row["input"] for row in first}.isdisjoint(row["input"] for row in second)
    assert len(first) == len(second) == 20
    assert sorted(int(row["target"]) for row in [*first, *second]) == list(range(40))


def test_halves_depend_on_the_seed_alone() -> None:
    rows = [{"text": f"article {number}"} for number in range(30)]
    assert halves(rows, 1) == halves(rows[::-1], 1)
    assert halves(rows, 1) != halves(rows, 2)


def test_one_of_twenty_may_lie_above_its_bound_two_may_not() -> None:
    met = "held-out loss stayed under its bound"
    good = [split(seed, 0.04) for seed in range(20)]
    assert values([*good[:19], split(19, 0.06)])[met] == (19, True)
    assert values([*good[:18], split(18, 0.06), split(19, 0.07)])[met] == (18, False)


def test_a_refusal_is_no_broken_promise_and_no_pack() -> None:
    found = values([*[split(seed, 0.04) for seed in range(19)], split(19, None)])
    assert found["packs"] == (19, None)
    assert found["held-out loss stayed under its bound"] == (19, True)
    assert values([split(0, None)])["held-out loss stayed under its bound"] == (0, False)


def test_timid_is_what_could_have_been_narrower() -> None:
    timid = "median held-out loss"
    assert values([split(seed, 0.01) for seed in range(4)])[timid] == (1.0, False)
    assert values([split(seed, 0.04) for seed in range(4)])[timid] == (4.0, True)
    assert values([split(seed, 0.01, narrowest=True) for seed in range(4)])[timid] == (1.0, None)
