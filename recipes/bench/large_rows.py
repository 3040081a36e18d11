"""What `make bench-large` says of long prompts, and of where the time of a token goes. Pure."""

from __future__ import annotations

from recipes.bench.race import Outcome
from recipes.bench.result import Row

PROMPT_AIM, PYTHON_AIM, DECIDING_AIM = 1.3, 10.0, 5.0


def prompt_rows(where: str, mine: Outcome, resident: Outcome, reading_s: float) -> list[Row]:
    """A prompt beside the longer of reading every expert once and of computing; `resident`: the same with all experts
    in memory. Nothing where one of them read no prompt."""
    if mine.prompt is None or resident.prompt is None:
        return []
    bound_s = max(reading_s, resident.prompt.seconds)
    name = f"{where}: prompt of {mine.prompt.tokens} tokens"
    return [
        Row(f"{name}: reading each expert once", reading_s, "s"),
        Row(f"{name}: computing", resident.prompt.seconds, "s"),
        Row(f"{name} to the longer of both", mine.prompt.seconds / bound_s, "× its time").at_most(PROMPT_AIM),
    ]


def spent_rows(where: str, mine: Outcome) -> list[Row]:
    """Nothing where it was not looked at."""
    spent = mine.spent
    if spent is None:
        return []
    shares = {"kernels": spent.kernels, "waiting for the disk": spent.waiting}
    rows = [Row(f"{where}: share of a token: {name}", 100 * each / spent.whole, "%") for name, each in shares.items()]
    python = Row(f"{where}: share of a token: Python", 100 * spent.python / spent.whole, "%")
    deciding = Row(f"{where}: share of a token: deciding", 100 * spent.deciding / spent.whole, "%")
    return [*rows, python.at_most(PYTHON_AIM), deciding.at_most(DECIDING_AIM)]
