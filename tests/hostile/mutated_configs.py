"""Mutated settings of published models, each read once: a process for test_hostile_checkpoints, which bounds it.

Prints how many were refused and how many were read; what is neither ends it.
"""

from __future__ import annotations

import copy
import random
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from published import PUBLISHED

from moeconv.errors import ConversionError
from moeconv.source.outline import Outline

FILE = Path("folder/config.json")
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 7, 65, 4097, 1 << 16, 1 << 24, 10**9, 10**12, 10**30, -(10**9), 0.5, -2.5, 1e-300,
    1e30, 1e300, float("inf"), float("nan"), "", "x", "7", [], [1], [[]], ["full_attention"], {}, {"a": 1}, [0] * 5000,
    {"rope_type": "yarn", "factor": 1e300}, {"rope_type": "default", "rope_theta": 1e-300},
]  # fmt: skip
SLOWEST_S = 60


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if here:
        yield here
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*here, key))


def mutated(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Another value in one or two places, or none."""
    found = copy.deepcopy(config)
    for _ in range(rng.randint(1, 2)):
        *way, last = rng.choice(list(places(found)))
        inner: Any = found
        for key in way:
            inner = inner[key]
        if rng.random() < 0.1:
            del inner[last]
        else:
            inner[last] = rng.choice(VALUES)
    return found


def check_line(said: str) -> None:
    assert "\n" not in said
    assert len(said) < 1000, said


def main(each: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (600, 600))
    counts = [0, 0]
    for name, config in PUBLISHED.items():
        rng = random.Random(name)
        for _ in range(each):
            asked, started = mutated(dict(config), rng), time.process_time()
            try:
                Outline.of(asked, {}, FILE)
                counts[1] += 1
            except ConversionError as error:
                check_line(str(error))
                counts[0] += 1
            taken = time.process_time() - started
            assert taken < SLOWEST_S, (name, taken, asked)
    print(*counts)


if __name__ == "__main__":
    main(int(sys.argv[1]))
