"""`make bench-outlook`: the error of the tokens a second that `moeconv plan` expects.

Measurements of docs/results/stream.json and less.json, beside the speeds expected of packs with that shape, share of
room and speed of the drive. The estimate uses only two figures of a run: the speed of the drive, and the speed of the
machine on that day, taken from the run with all experts in memory, which stretches all times to compute. Writes
build/bench/outlook.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from moeconv.plan.forecast import Drive, Processor, Work, prospect, references, stated, token_s
from moeconv.plan.outlook import mixture
from moeconv.plan.problem import Storage
from moert.pack.manifest import Dense
from recipes.bench.outlook_machine import BITS_PER_WEIGHT, RESULTS, work_of
from recipes.bench.program import as_program
from recipes.bench.result import Result, Row, context, read, table, write
from recipes.bench.shaped import DENSE, GROUP, OLMOE

AIM = 0.25
DEVICES = {"board": 100e6, "ssd": 500e6, "nvme": None}
SHAPED_BITS = 2.8
"""Of a weight of the model of OLMoE's shape: the widths of wiki's experts, and scales for groups of 64."""
LIKE = {"olmoe-shaped": "wiki"}
"""It is routed as wiki is; all others are themselves the nearest."""


@dataclass(frozen=True)
class Case:
    """One measured run: of a model with so much room, on a drive; tokens a second, there and with all in memory, and
    how often experts were in memory."""

    name: str
    model: str
    share: float
    drive: Drive
    measured: float
    whole: float
    hits: float


def cases(stream: Result, less: Result) -> Iterator[Case]:
    """Of both files, what streamed under `auto`; of less.json only where it says how fast the drive was."""
    for model in ("wiki", "olmoe-shaped"):
        for device, limit in DEVICES.items():
            rows, where = stream.by_name, f"{model}, {device}"
            disk = 1e6 * rows[f"{where}: disk without a limit"].value
            speed = min(disk, limit or disk)
            whole = rows[f"{where}: moert, all in memory: decode"].value
            for share in (0.25, 0.5, 0.75):
                run = f"{where}: moert {share:.0%}"
                measured, hits = rows[f"{run}: decode"].value, rows[f"{run}: hits in memory"].value / 100
                yield Case(f"stream, {where}, {share:.0%}", model, share, Drive(speed, speed), measured, whole, hits)
    for model in ("wiki", "wikids", "olmoe-shaped"):
        where = f"{model}, ssd"
        whole = less.by_name[f"{where}: moert, all in memory: decode"].value
        for share in (0.25, 0.5):
            run = f"{where}: exact {share:.0%}"
            measured, hits = less.by_name[f"{run}: decode"].value, less.by_name[f"{run}: hits"].value / 100
            yield Case(f"less, {where}, {share:.0%}", model, share, Drive(500e6, 500e6), measured, whole, hits)


def work(model: str) -> Work:
    """What a token takes of a pack as the benches have it."""
    if model in BITS_PER_WEIGHT:
        return work_of(model, BITS_PER_WEIGHT[model], stated().host)
    storage = Storage(GROUP)
    mixed = mixture(OLMOE, storage, (2, 3, 4), SHAPED_BITS)
    assert mixed is not None
    dense = Dense("nearest", GROUP, {role: bits for role, bits in DENSE.items() if bits < 16})
    return prospect(OLMOE, storage, mixed, dense, (), stated().host).work


def stretched(processor: Processor, work: Work, token: float) -> Processor:
    """As fast as takes `token` seconds with all experts in memory: all that is computed stretched alike."""
    by = token / token_s(work, processor, Drive(1e12, 1e12), 1.0)
    kernels = {bits: speed / by for bits, speed in processor.kernel_bytes_per_s.items()}
    return replace(processor, kernel_bytes_per_s=kernels, layer_s=by * processor.layer_s, miss_s=by * processor.miss_s)


def expected(case: Case, hit_rate: float) -> float:
    """Tokens a second, as `moeconv plan` reckons them where experts are in memory so often."""
    needed = work(case.model)
    processor = stretched(stated().processor, needed, 1 / case.whole)
    return 1 / token_s(needed, processor, case.drive, hit_rate)


def known_rate(case: Case) -> float:
    """What `moeconv plan` takes for it."""
    name = LIKE.get(case.model, case.model)
    return next(each for each in references() if each.name == name).hit_rate(case.share)


def whole_rows(less: Result) -> list[Row]:
    """With all experts in memory, on the machine that is stated. wiki and wikids say there what a layer costs."""
    found = []
    for model in ("wiki", "wikids", "olmoe-shaped"):
        name = f"less, {model}, all in memory"
        measured = less.by_name[f"{model}, ssd: moert, all in memory: decode"].value
        said = 1 / token_s(work(model), stated().processor, Drive(1e12, 1e12), 1.0)
        found += [
            Row(f"{name}: measured", measured, "tokens/s"),
            Row(f"{name}: expected", said, "tokens/s"),
            Row(f"{name}: off by, all in memory", 100 * (said / measured - 1), "%"),
        ]
    return found


def rows() -> list[Row]:
    """Of each run, and the medians of how far off, with hit rates as known before and as measured then."""
    found, errors = list[Row](), {"known": list[float](), "measured": list[float]()}
    stream, less = read(RESULTS / "stream.json"), read(RESULTS / "less.json")
    for case in cases(stream, less):
        said = {"known": expected(case, known_rate(case)), "measured": expected(case, case.hits)}
        off = {which: speed / case.measured - 1 for which, speed in said.items()}
        for which, each in off.items():
            errors[which].append(abs(each))
        aimed = replace(
            Row(f"{case.name}: off by", 100 * off["known"], "%"),
            aim=f"within ± {100 * AIM:g}", met=abs(off["known"]) <= AIM,
        )  # fmt: skip
        found += [
            Row(f"{case.name}: measured", case.measured, "tokens/s"),
            Row(f"{case.name}: expected", said["known"], "tokens/s"),
            aimed,
            Row(f"{case.name}: off by, with the hits of that run", 100 * off["measured"], "%"),
        ]
    return [
        *found,
        *whole_rows(less),
        Row("all: off by, median", 100 * median(errors["known"]), "%").at_most(100 * AIM),
        Row("all: off by, median, with the hits of those runs", 100 * median(errors["measured"]), "%"),
        Row("all: within the aim", sum(each <= AIM for each in errors["known"]), f"of {len(errors['known'])} runs"),
    ]


def main() -> None:
    found = rows()
    print(table(found))
    print(f"written to {write('outlook', context({'aim': AIM}), found)}")


if __name__ == "__main__":
    as_program(main, __doc__)
