"""What `make bench-less` found, as rows with the aims of each. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moeconv.artifacts import ConversionReport, ReadPoint, Residence
from moert.bench.measure import bound_s
from recipes.bench.contenders import RESIDENT
from recipes.bench.less_packs import Level
from recipes.bench.race import Outcome
from recipes.bench.result import Row, row_of_runs
from recipes.bench.stream_rows import ratios

READ_AIMS = {0.005: 0.6, 0.01: 0.45}
SPEED_AIMS = {0.005: 1.6, 0.01: 2.0}
ALONE_AIM = 0.6
BOUND_AIM, BOUND_SHARE = 1.0, 0.5


def asked_rows(name: str, levels: Sequence[Level]) -> list[Row]:
    """What is not among the experts used last, on held-out text, and what that costs."""
    rows = []
    for level in levels:
        where = f"{name}: {100 * level.beyond:g}% beyond, {level.share:.0%} in memory"
        rows += [
            Row(f"{where}: held-out loss beyond the widths'", 100 * level.loss, "%"),
            Row(f"{where}: exact routing asks for", level.exact_read / 1e3, "kB a token"),
            Row(f"{where}: asks for", level.read / 1e3, "kB a token"),
            Row(f"{where}: asks for, of exact", level.read / level.exact_read, "of exact routing's"),
        ]
    return rows


def against_alone(name: str, report: ConversionReport) -> list[Row]:
    """--loss with --resident beside --loss alone: both keep the same promise."""
    rows = []
    for one in report.residences:
        where = f"{name}: --resident {one.share:.0%}"
        alone = least(one.alone, report.target.value)
        together = least(one.together, report.target.value)
        bound = report.target.value if one.upper_bound is None else one.upper_bound
        rows += [
            Row(f"{where}: reads", one.bytes / 1e3, "kB a token"),
            Row(f"{where}: the same widths routed exactly", one.exact_bytes / 1e3, "kB a token"),
            Row(f"{where}: held-out loss", 100 * one.heldout.loss, "%").within(
                100 * one.heldout.low, 100 * one.heldout.high, one.heldout.samples
            ),
            Row(f"{where}: promised", 100 * bound, "%"),
            Row(f"{where}: to widths alone", together / alone, "of the bytes").at_most(ALONE_AIM),
            *bonus_rows(where, one),
        ]
    return rows


def least(points: Sequence[ReadPoint], target: float) -> float:
    """Bytes a token of what reads least and keeps the target."""
    return min(one.bytes for one in points if (one.loss if one.upper is None else one.upper) <= target)


def bonus_rows(where: str, one: Residence) -> list[Row]:
    return [Row(f"{where}: layers with a bonus", sum(bonus > 0 for bonus in one.bonus) / len(one.bonus), "of all")]


def speed_rows(where: str, outcomes: Mapping[str, Outcome], bytes_per_s: float, limited: bool) -> list[Row]:
    """Speed, bytes and hits of each entry; levels and --resident beside exact routing with the same room, with aims
    where the drive is `limited`; and beside what no policy could have passed with exact routing."""
    rows = []
    for name, outcome in outcomes.items():
        tokens, read = (sum(getattr(each, what) for each in outcome.segments) for what in ("tokens", "bytes_read"))
        requests, hits = (sum(getattr(each, what) for each in outcome.segments) for what in ("requests", "hits"))
        rows += [
            row_of_runs(f"{where}: {name}: decode", outcome.speeds, "tokens/s"),
            Row(f"{where}: {name}: read for a token", read / tokens / 1e3, "kB"),
            Row(f"{where}: {name}: hits", 100 * hits / requests, "%"),
        ]
    for name, outcome in outcomes.items():
        what, _, share = name.rpartition(" ")
        exact = outcomes.get(f"exact {share}")
        if exact is None or outcome is exact:
            continue
        beyond = next((each for each in READ_AIMS if what == f"{100 * each:g}%"), None)
        read = Row(f"{where}: {name} to exact: bytes", bytes_a_token(outcome) / bytes_a_token(exact), "of its bytes")
        speed = row_of_runs(f"{where}: {name} to exact", ratios(outcome, exact), "× its speed")
        if beyond is not None and limited:
            read, speed = read.at_most(READ_AIMS[beyond]), speed.at_least(SPEED_AIMS[beyond])
        rows += [read, speed]
        if share == f"{BOUND_SHARE:.0%}" and RESIDENT.name in outcomes:
            shares = of_bound(outcome, exact, outcomes[RESIDENT.name], bytes_per_s)
            row = row_of_runs(f"{where}: {name} to the bound of exact routing", shares, "of the possible speed")
            rows.append(row.at_least(BOUND_AIM) if beyond is not None else row)
    return rows


def bytes_a_token(outcome: Outcome) -> float:
    return sum(each.bytes_read for each in outcome.segments) / sum(each.tokens for each in outcome.segments)


def of_bound(outcome: Outcome, exact: Outcome, resident: Outcome, bytes_per_s: float) -> list[float]:
    """In each round: speed as a share of what computing and the bytes that no policy can avoid allow exact routing."""
    found = []
    for mine, theirs, nbytes, whole in zip(
        outcome.speeds, exact.segments, exact.unavoidable, resident.speeds, strict=True
    ):
        possible = theirs.tokens / bound_s(theirs.tokens / whole, nbytes, bytes_per_s)
        found.append(mine / possible)
    return found
