"""What `make bench-large` says of long prompts, and of where the time of a token goes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from moert.bench.measure import bound_s
from recipes.bench.race import Device, Outcome
from recipes.bench.result import Row, row_of_runs

# What the races of `make bench-stream` say, as rows with the aims of each. Pure.

# What our speed should be of each baseline's, by device; the paper has an aim for its SSD and its slower disk.
AIMS: Mapping[str, Mapping[str, float]] = {
    "IO-EXP": {"board": 6.0, "ssd": 4.0},
    "IO-QEXP": {"board": 1.8, "ssd": 1.8, "nvme": 1.8},
    "mixed bits, + cache": {"board": 1.0, "ssd": 1.0, "nvme": 1.0},
    "STI-like": {"board": 2.5, "ssd": 2.5, "nvme": 2.5},
    "INT4, LRU": {"board": 1.0, "ssd": 1.0, "nvme": 1.0},
    "INT4, LFU": {"board": 1.0, "ssd": 1.0, "nvme": 1.0},
}
BOUND_AIM, LLAMA_AIM = 0.8, 4.0
MEMORY_AIM, SPEED_AIM = 4.0, 0.5  # so many times less memory than IO-FREE, at this share of its speed


def speed_rows(where: str, outcomes: Mapping[str, Outcome]) -> list[Row]:
    """Tokens per second of each entry, experts that were in memory or still being read when they were demanded, the
    prompt, and what its process held."""
    rows = []
    for name, outcome in outcomes.items():
        what = f"{where}: {name}"
        rows.append(row_of_runs(f"{what}: decode", outcome.speeds, "tokens/s"))
        requests = sum(segment.requests for segment in outcome.segments)
        if requests:
            late = sum(segment.in_flight for segment in outcome.segments)
            there = sum(segment.hits for segment in outcome.segments) - late
            rows.append(Row(f"{what}: hits in memory", 100 * there / requests, "%"))
            rows.append(Row(f"{what}: hits still being read", 100 * late / requests, "%"))
        if outcome.prompt is not None:
            prompt = f"prompt of {outcome.prompt.tokens} tokens"
            rows.append(Row(f"{what}: {prompt}", outcome.prompt.speed, "tokens/s"))
            rows.append(Row(f"{what}: first token after a {prompt}", outcome.prompt.seconds, "s"))
        peak = outcome.facts.get("peak_bytes", outcome.group_bytes)
        rows.append(Row(f"{what}: peak memory of the process", peak / 1e6, "MB"))
    return rows


def ratios(ours: Outcome, other: Outcome) -> list[float]:
    """Our speed as a multiple of the other's, in each round."""
    return [mine / theirs for mine, theirs in zip(ours.speeds, other.speeds, strict=True)]


def against_rows(where: str, device: Device, outcomes: Mapping[str, Outcome], shares: Sequence[float]) -> list[Row]:
    """Ours at each budget beside the baselines; those with a budget beside their own at the same one. Nothing of those
    that are not in `outcomes`."""
    rows = []
    for share, (baseline, aims) in product(shares, AIMS.items()):
        mine = outcomes.get(f"moert {share:.0%}")
        other = outcomes.get(baseline) or outcomes.get(f"{baseline} {share:.0%}")
        if mine is not None and other is not None:
            row = row_of_runs(f"{where}: moert {share:.0%} to {baseline}", ratios(mine, other), "× its speed")
            rows.append(row.at_least(aims[device.name]) if device.name in aims else row)
            if mine.prompt is not None and other.prompt is not None:
                ratio = mine.prompt.speed / other.prompt.speed
                rows.append(Row(f"{where}: moert {share:.0%} to {baseline}: prompt", ratio, "× its speed"))
    return rows


def bound_rows(where: str, outcome: Outcome, resident: Outcome, bytes_per_s: float) -> list[Row]:
    """How near a run came to the most that computing and the bytes that no policy can avoid allow, and first, to what
    computing and the bytes that it did read allow: what is missing there is the engine's, the rest is due to who was
    evicted, and to a bound that is not tight. `resident`: the same pack all in memory, in the same rounds."""
    read = [segment.bytes_read for segment in outcome.segments]
    unavoidable, tokens = outcome.unavoidable, sum(segment.tokens for segment in outcome.segments)

    def shares(nbytes: Sequence[int]) -> list[float]:
        return [
            bound_s(segment.tokens / speed, count, bytes_per_s) / segment.seconds
            for segment, speed, count in zip(outcome.segments, resident.speeds, nbytes, strict=True)
        ]

    unit = "of the possible speed"
    return [
        Row(f"{where}: read for a token", sum(read) / tokens / 1e6, "MB"),
        Row(f"{where}: unavoidable for a token", sum(unavoidable) / tokens / 1e6, "MB"),
        row_of_runs(f"{where}: share of the bound with what it read", shares(read), unit),
        row_of_runs(f"{where}: share of the bound", shares(unavoidable), unit).at_least(BOUND_AIM),
    ]


def memory_rows(where: str, outcomes: Mapping[str, Outcome], shares: Sequence[float]) -> list[Row]:
    """Ours beside all 16-bit experts in memory; last, the best speed among the budgets that need little enough."""
    rows, small_enough, free = [], [0.0], outcomes["IO-FREE"]
    for share in shares:
        mine = outcomes.get(f"moert {share:.0%}")
        if mine is None:
            continue
        whole = free.facts["peak_bytes"] / mine.facts["peak_bytes"]
        model = model_bytes(free) / model_bytes(mine)
        what = f"{where}: moert {share:.0%} to IO-FREE"
        speed = row_of_runs(f"{what}: speed", ratios(mine, free), "of its speed")
        rows += [
            Row(f"{what}: memory of the process", whole, "× less"),
            Row(f"{what}: bytes of the model", model, "× less"),
            speed,
        ]
        if whole >= MEMORY_AIM:
            small_enough.append(speed.value)
    best = Row(f"{where}: best speed with {MEMORY_AIM:g} × less memory", max(small_enough), "of IO-FREE's speed")
    return [*rows, best.at_least(SPEED_AIM)]


def model_bytes(outcome: Outcome) -> int:
    """The weights that are in memory at most: those that always stay, and the cache."""
    return outcome.facts["backbone_bytes"] + outcome.facts["cache_bytes"]


def llama_rows(where: str, outcomes: Mapping[str, Outcome]) -> list[Row]:
    """Ours, first in `outcomes`, beside llama.cpp; the rows of one alone if the other ended."""
    rows = speed_rows(where, outcomes)
    for name, outcome in outcomes.items():
        read, tokens = (sum(getattr(each, of) for each in outcome.segments) for of in ("bytes_read", "tokens"))
        rows.append(Row(f"{where}: {name}: read for a token", read / tokens / 1e6, "MB"))
        if "expert_bytes" in outcome.facts:
            share = 100 * min(1.0, outcome.facts["cache_bytes"] / outcome.facts["expert_bytes"])
            rows.append(Row(f"{where}: {name}: room for experts", share, "%"))
    if len(outcomes) == 2:
        (_, mine), (name, other) = outcomes.items()
        ratio = row_of_runs(f"{where}: moert to {name}", ratios(mine, other), "× its speed")
        rows.append(ratio.at_least(LLAMA_AIM))
        if mine.prompt is not None and other.prompt is not None:
            speed = mine.prompt.speed / other.prompt.speed
            rows.append(Row(f"{where}: moert to {name}: prompt", speed, "× its speed"))
    return rows


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


def raced_rows(
    where: str, outcomes: Mapping[str, Outcome], pairs: Iterable[tuple[str, str]], speeds: bool = True
) -> list[Row]:  # fmt: skip
    """Returns the speeds of a race, and for each of `pairs` that of one as a multiple of the other's, round by round;
    nothing of those that ended early."""
    rows = speed_rows(where, outcomes) if speeds else []
    for mine, other in pairs:
        if mine in outcomes and other in outcomes:
            multiples = ratios(outcomes[mine], outcomes[other])
            rows.append(row_of_runs(f"{where}: {mine} to {other}", multiples, "× its speed"))
    return rows
