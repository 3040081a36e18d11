"""Products of parameters, thinned: `make test` runs few cases with every pair of values, the slow suite all others,
which it marks as "product"."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

import pytest

OTHERS = [pytest.mark.slow, pytest.mark.product]
Case = tuple[Any, ...]
Facts = Callable[[Case], Iterable[Hashable]]


def pairs(case: Case) -> Iterator[Hashable]:
    """Yields every pair of a case's values, each with its place."""
    yield from combinations(enumerate(map(_key, case)), 2)


def each(case: Case) -> Iterator[Hashable]:
    """Yields every value of a case, with its place."""
    yield from enumerate(map(_key, case))


def _key(value: Any) -> Hashable:
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def covering(cases: Sequence[Case], facts: Facts = pairs) -> list[int]:
    """Returns the places, in order, of few cases that have every fact of `cases` between them. Greedy: the next case is
    the one with most facts that are still missing, and of several the first."""
    known = [frozenset(facts(case)) for case in cases]
    missing, chosen = set().union(*known), list[int]()
    queue = [(-len(of), place) for place, of in enumerate(known)]
    heapq.heapify(queue)
    while missing:
        _, place = heapq.heappop(queue)
        count = len(known[place] & missing)
        if count and queue and (-count, place) > queue[0]:
            heapq.heappush(queue, (-count, place))
        elif count:
            chosen.append(place)
            missing -= known[place]
    return sorted(chosen)


def thinned(
    names: str,
    *axes: Iterable[Any],
    facts: Facts = pairs,
    ids: Callable[[Case], str] | None = None,
    indirect: Sequence[str] = (),
) -> pytest.MarkDecorator:
    """Parametrizes a test with the product of `axes`; cases beyond those that meet all `facts` are slow.

    An axis of tuples stands for several names. Marks of a value are those of its cases. `indirect`: names of fixtures
    that take the value.
    """
    cases, marks = list[Case](), list[list[Any]]()
    for one in product(*(list(axis) for axis in axes)):
        wrapped = [value if isinstance(value, type(pytest.param())) else None for value in one]
        values = [w.values if w else v if type(v) is tuple else (v,) for w, v in zip(wrapped, one, strict=True)]
        cases.append(tuple(value for several in values for value in several))
        marks.append([mark for w in wrapped if w for mark in w.marks])
    few = set(covering(cases, facts))
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(*case, marks=marks[at] + OTHERS * (at not in few), id=ids and ids(case))
            for at, case in enumerate(cases)
        ],
        indirect=indirect,
    )


def thinned_fixture(*axes: Iterable[str]) -> Callable[[Callable[..., Any]], Any]:
    """Makes a fixture of a module, of the product of `axes`; cases beyond those that have every value are slow."""
    cases = list(product(*map(list, axes)))
    few = set(covering(cases, each))
    params = [pytest.param(case, marks=OTHERS * (at not in few), id="-".join(case)) for at, case in enumerate(cases)]
    return pytest.fixture(scope="module", params=params)
