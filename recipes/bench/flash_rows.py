"""What `make bench-flash` found, as rows with the aims of each. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from recipes.bench.race import Outcome
from recipes.bench.result import Row, row_of_runs
from recipes.bench.stream_rows import ratios
from recipes.bench.timed import Spent

if TYPE_CHECKING:
    from moert.pack.neurons import NeuronPredictor
    from recipes.bench.flash_bytes import Written
    from recipes.bench.flash_packs import Subject

SPARSE_AIM, ELSE_AIM = 0.10, 0.22
"""Of whole experts' bytes, where what fires is read: half of the activity and three points, where about 10% and 37%
fire."""
BESIDE_ACTIVITY = 0.05
"""What may be read beside all of the activity, where a predictor names what is read."""
LOSS_AIM = 1.0
STEPS_AIMS: Mapping[str, float] = {"ssd": 5.0, "board": 8.0}
TODAY_AIM, DECIDING_AIM = 1.5, 10.0
HALF = 0.5
OF = "of their bytes"
NAIVE, TODAY, NEURONS, NAMED = "naive", "whole experts", "neurons", "predicted neurons"


@dataclass(frozen=True)
class Asked:
    """`activity`: of the neurons of the experts that a token goes to, those that fire. Bytes that a token asks for: of
    whole experts, and of the columns of blocks with a neuron that fires."""

    activity: float
    experts_bytes: float
    columns_bytes: float


def asked_rows(subject: Subject, asked: Asked) -> list[Row]:
    """With gate and up in memory, and nothing else."""
    return [
        Row(f"{subject.name}: neurons that fire", 100 * asked.activity, "%"),
        Row(f"{subject.name}: whole experts ask for", asked.experts_bytes / 1e3, "kB a token"),
        Row(f"{subject.name}: columns ask for", asked.columns_bytes / 1e3, "kB a token"),
        _exactly(
            subject, Row(f"{subject.name}: columns, of whole experts", asked.columns_bytes / asked.experts_bytes, OF)
        ),
    ]  # fmt: skip


def _exactly(subject: Subject, row: Row) -> Row:
    """With the aim of what reads only what fires: with gate and up in memory."""
    return row.at_most(SPARSE_AIM if subject.sparse else ELSE_AIM)


def read_rows(
    subject: Subject, share: float, asked: Asked, experts: Written, neurons: Written, differ: int
) -> list[Row]:  # fmt: skip
    """`differ`: answers that are not those with everything in memory."""
    where = f"{subject.name}, {share:.0%}"
    ratio = Row(f"{where}: neurons, of whole experts", part(neurons, experts), OF)
    return [
        Row(f"{where}: whole experts read", experts.bytes_per_token / 1e3, "kB a token"),
        Row(f"{where}: neurons read", neurons.bytes_per_token / 1e3, "kB a token"),
        _exactly(subject, ratio) if neurons.holds_rows else ratio,
        Row(f"{where}: neurons, of what whole experts ask for", neurons.bytes_per_token / asked.experts_bytes, OF),
        Row(f"{where}: hits among blocks", 100 * neurons.block_hits / max(1, neurons.blocks), "%"),
        Row(f"{where}: answers that differ", differ, "of them").at_most(0),
    ]


def part(mine: Written, other: Written) -> float:
    """Bytes a token of one as a share of the other's; infinite where that reads nothing."""
    return mine.bytes_per_token / other.bytes_per_token if other.bytes_read else float("inf")


def in_order_rows(
    subject: Subject, alone: tuple[Written, Written], both: Mapping[float, tuple[Written, Written]]
) -> Iterator[Row]:
    """Neurons that lie by how often they fire, beside the same in the checkpoint's order: what a token asks for with
    everything in memory, and what is read for it in each room."""
    ordered, trained = alone
    beside = "of those in the checkpoint's order"
    yield Row(f"{subject.name}: columns asked for, {beside}", ordered.blocks / trained.blocks, OF)
    for share, (ordered, trained) in both.items():
        where = f"{subject.name}, {share:.0%}"
        yield Row(f"{where}: neurons read in the checkpoint's order", trained.bytes_per_token / 1e3, "kB a token")
        yield Row(f"{where}: neurons read, {beside}", part(ordered, trained), OF)


def predictor_rows(subject: Subject, predictor: NeuronPredictor, pack_bytes: int) -> Iterator[Row]:
    """What it names on held-out text, the mean over all layers, and what the model loses by it. `pack_bytes`: of the
    pack that it lies in."""
    where = f"{subject.name}: predictor"
    yield Row(f"{where}: size", 100 * len(predictor.to_bytes()) / pack_bytes, "% of the pack")
    shares = zip(*(layer.kept for layer in predictor.layers.values()), strict=True)
    for what, layers in zip(("firing neurons that it names", "neurons that it names", "blocks"), shares, strict=True):
        yield Row(f"{where}: {what}", 100 * sum(layers) / len(layers), "%")
    if (loss := predictor.loss) is not None:
        row = Row(f"{subject.name}: loss by the predictor", 100 * loss.loss, "%")
        yield row.within(100 * loss.low, 100 * loss.high).at_most(LOSS_AIM)


def predicted_rows(subject: Subject, share: float, asked: Asked, experts: Written, named: Written) -> Iterator[Row]:
    where = f"{subject.name}, {share:.0%}"
    yield Row(f"{where}: predicted read", named.bytes_per_token / 1e3, "kB a token")
    yield Row(f"{where}: predicted, of whole experts", part(named, experts), OF)
    of_asked = named.bytes_per_token / asked.experts_bytes
    row = Row(f"{where}: predicted, of what whole experts ask for", of_asked, OF)
    aim = SPARSE_AIM if subject.sparse else asked.activity + BESIDE_ACTIVITY
    yield row.at_most(aim) if share == HALF else row


# Races ----------------------------------------------------------------------------------------------------------------


def raced_rows(where: str, outcomes: Mapping[str, Outcome], limit_bytes: int) -> Iterator[Row]:
    """Of each entry: tokens a second, what it read for a token, where its time went, and what its process held."""
    for name, outcome in outcomes.items():
        what, tokens = f"{where}: {name}", sum(segment.tokens for segment in outcome.segments)
        yield row_of_runs(f"{what}: decode", outcome.speeds, "tokens/s")
        read = sum(segment.bytes_read for segment in outcome.segments)
        yield Row(f"{what}: read for a token", read / tokens / 1e3, "kB")
        if outcome.spent is not None:
            yield from spent_rows(what, outcome.spent)
        peak = outcome.facts["peak_bytes"] / 1e6
        yield Row(f"{what}: peak memory of the process", peak, "MB").at_most(limit_bytes / 1e6)


def spent_rows(what: str, spent: Spent) -> list[Row]:
    """Reading, managing memory, computing: the parts of a token's time. What whole experts decide has no aim here."""
    deciding = Row(f"{what}: deciding", 100 * spent.deciding / spent.whole, "% of a token")
    return [
        Row(f"{what}: reading", 100 * spent.waiting / spent.whole, "% of a token"),
        deciding if is_whole(what) else deciding.at_most(DECIDING_AIM),
        Row(f"{what}: computing", 100 * spent.kernels / spent.whole, "% of a token"),
    ]


def is_whole(what: str) -> bool:
    """Whether an entry reads whole experts."""
    return any(f": {name}" in what for name in (NAIVE, TODAY))


def steps_rows(where: str, device: str, outcomes: Mapping[str, Outcome], last: str | None) -> Iterator[Row]:
    """Each step beside loading all that a token needs; the aim, if there is one, is that of the `last`."""
    naive = outcomes.get(NAIVE)
    for name, outcome in outcomes.items():
        if naive is not None and outcome is not naive:
            row = row_of_runs(f"{where}: {name} to naive", ratios(outcome, naive), "× its speed")
            yield row.at_least(STEPS_AIMS[device]) if name == last and device in STEPS_AIMS else row


def of_naive_rows(where: str, outcomes: Mapping[str, Outcome], sparse: bool) -> Iterator[Row]:
    """Bytes for a token beside all that it needs; the aim is that of what is predicted, where few neurons fire."""

    def read(outcome: Outcome) -> float:
        return sum(each.bytes_read for each in outcome.segments) / sum(each.tokens for each in outcome.segments)

    naive = outcomes.get(NAIVE)
    for name, outcome in outcomes.items():
        if naive is not None and outcome is not naive:
            row = Row(f"{where}: {name}: read, of naive", read(outcome) / read(naive), OF)
            yield row.at_most(SPARSE_AIM) if sparse and name == NAMED else row


def today_rows(where: str, outcomes: Mapping[str, Outcome], names: Sequence[str], aim: float | None) -> Iterator[Row]:
    """Neurons beside whole experts; `names` are what all are followed by."""
    for name, what in product(names, (NEURONS, NAMED)):
        mine, other = outcomes.get(f"{what}{name}"), outcomes.get(f"{TODAY}{name}")
        if mine is not None and other is not None:
            row = row_of_runs(f"{where}: {what}{name} to {TODAY}", ratios(mine, other), "× their speed")
            yield row if aim is None else row.at_least(aim)
