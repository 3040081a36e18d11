"""The small devices that benches imitate, and what is said of programs that end early there."""

from __future__ import annotations

import sys

from recipes.bench.race import Device, Outcome

DEVICES = {
    "board": Device("board", 100_000_000),
    "ssd": Device("ssd", 500_000_000),
    "nvme": Device("nvme", None),
}
PROCESS_BYTES = 300_000_000
"""Python, its libraries, keys, values, activations: what a budget gets beside the weights."""


def alive(where: str, outcomes: dict[str, Outcome], failed: list[str]) -> dict[str, Outcome]:
    """Without those whose programs ended: `failed` gets their names, and they cost their own rows only."""
    for name, outcome in outcomes.items():
        if outcome.ended is not None:
            tell(f"{where}: {name}", outcome.ended, failed)
    return {name: outcome for name, outcome in outcomes.items() if outcome.ended is None}


def tell(what: str, why: object, failed: list[str]) -> None:
    print(f"{what} failed: {why}", file=sys.stderr, flush=True)
    failed.append(what)
