"""Programs that are measured in turns, each in a process of its own. One that ends costs its own figures only."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeVar

from recipes.bench.result import Row, row_of_runs
from recipes.bench.runner import ProgramEnded, Runner

OURS = "moert"

T = TypeVar("T")
Measure = Callable[[Runner, int], T]
"""Asks a program for something in the round of that number; the same number means the same prompt for all."""


def alternate(
    what: str, sides: Mapping[str, Callable[[int], T]], rounds: int, failures: list[str]
) -> dict[str, list[T]]:
    """All in turns, every other round in reverse order; round 0 warms up and does not count.

    A side whose program ends is left out of the result, and `failures` gets a line that names it.
    """
    runs: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(runs) if number < 2 or number % 2 else list(reversed(runs)):
            try:
                value = sides[name](number)
            except ProgramEnded as error:
                failures.append(f"{what}: {name}: {error}")
                del runs[name]
                continue
            if number:
                runs[name].append(value)
    return runs


class Sides:
    """Programs that are loaded at once; to be used in a with block. `where` begins the names of their rows."""

    def __init__(self, where: str, commands: Mapping[str, Sequence[str]], failures: list[str]) -> None:
        self._where, self._failures, self._stack = where, failures, ExitStack()
        self._runners = {name: self._stack.enter_context(Runner(command)) for name, command in commands.items()}

    def __enter__(self) -> Sides:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def turns(
        self, what: str, measure: Measure[T], rounds: int, names: Iterable[str] | None = None
    ) -> dict[str, list[T]]:
        """What `measure` gives for each side, or for those of `names`, in each round."""
        chosen = self._runners if names is None else {name: self._runners[name] for name in names}
        bound = {name: lambda number, runner=runner: measure(runner, number) for name, runner in chosen.items()}
        return alternate(f"{self._where}: {what}", bound, rounds, self._failures)

    def once(self, *command: Any) -> dict[str, Any]:
        """The answer of each side to one command."""
        answers = self.turns(str(command[0]), lambda runner, _: [runner.ask(*command)], 1)
        return {name: answer[0][0] for name, answer in answers.items()}


def best_peer(runs: Mapping[str, Sequence[float]], least: bool = False) -> str | None:
    """The peer, or its setting, with the greatest or least median; None where none is left."""
    others = [name for name in runs if name != OURS]
    sign = -1 if least else 1
    return max(others, key=lambda name: sign * statistics.median(runs[name]), default=None)


def compared(
    what: str, runs: Mapping[str, Sequence[float]], unit: str = "tokens/s", aim: Callable[[Row], Row] | None = None
) -> list[Row]:
    """A row for each side and last, if both are there, the ratio of ours to the best of the peer's, round by round,
    with its aim. Of seconds the best are the fewest."""
    rows = [row_of_runs(f"{what}: {name}", values, unit) for name, values in runs.items()]
    peer = best_peer(runs, least=unit == "s")
    if OURS in runs and peer is not None:
        ratios = [mine / other for mine, other in zip(runs[OURS], runs[peer], strict=True)]
        ratio = row_of_runs(f"{what}: ratio", ratios, "× the peer's" if len(runs) == 2 else "× the peer's best")
        rows.append(ratio if aim is None else aim(ratio))
    return rows
