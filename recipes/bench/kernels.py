"""`make bench-kernels`: the native kernels beside the bandwidth of memory, and beside torch's and onnxruntime's.

Everything that is compared runs in turns; a figure is the median of its rounds, a share or ratio the median of those of
each round. All weights together are far larger than any cache. Writes build/bench/kernels.json.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from moert.kernels import library
from moert.kernels.library import Library
from moert.pack.codec import U8
from recipes.bench import kernel_peers
from recipes.bench.bandwidth import buffer, reader
from recipes.bench.kernel_cases import Case, Kernels, Olmoe, Widths
from recipes.bench.kernel_weights import FLOATS, Material
from recipes.bench.result import Row, context, isa, row_of_runs, table, write
from recipes.bench.sized import sized

OLMOE = Olmoe()
INWARD, OUTWARD = (OLMOE.d_ff, OLMOE.d_model), (OLMOE.d_model, OLMOE.d_ff)
WIDTHS = (2, 3, 4, 8)
AIMS = {2: 60.0, 3: 60.0, 4: 75.0, 8: 75.0}  # % of the bandwidth, groups of GROUP, one token
WITH_TILES = 500.0  # GMAC/s of many tokens, where the processor has tiles
GROUP = 64
OTHER_GROUPS = {32: "groups of 32", 128: "groups of 128", 0: "one scale a row"}
MIXED = [Widths(2, 3, 4)] * 6 + [Widths(8, 8, 8)] * 2
TOKENS = sized((1, 8, 64, 512), (1, 8))
PASS_MACS = sized(4 << 30, 64 << 20)  # of many tokens
REST_S = 0.01  # the threads of others look for work a while before they sleep

Times = Mapping[str, Sequence[float]]
"""Name of a case → seconds of its passes, one a round."""


def reading(name: str, threads: int, data: U8 | None = None) -> Case:
    """Plain reading of `data`, by default of a buffer as large."""
    whole = buffer() if data is None else data
    return Case(name, reader(whole, threads), 1, whole.nbytes)


def timed(cases: Sequence[Case], rounds: int) -> Times:
    """Each case once a round, every second round in reverse; a first round warms up and does not count."""
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(rounds + 1):
        for case in cases if number % 2 else reversed(cases):
            time.sleep(REST_S)
            started = time.perf_counter()
            case.run()
            if number:
                times[case.name].append(time.perf_counter() - started)
    return times


def rate_row(case: Case, times: Times) -> Row:
    """Bytes a second."""
    return row_of_runs(case.name, [case.nbytes / seconds / 1e9 for seconds in times[case.name]], "GB/s")


def share_rows(case: Case, times: Times, read: Case, aim: float | None) -> list[Row]:
    """Bytes a second, and what part that is of plain reading in the same round."""
    pairs = zip(times[case.name], times[read.name], strict=True)
    shares = [100 * (case.nbytes / mine) / (read.nbytes / plain) for mine, plain in pairs]
    share = row_of_runs(f"{case.name}: share", shares, "% of bandwidth")
    return [rate_row(case, times), share if aim is None else share.at_least(aim)]


def speed_rows(name: str, cases: Sequence[Case], times: Times) -> list[Row]:
    """Multiplications a second of ours, which is the first, and its peers, and the ratios."""
    speeds = {case.name: [case.macs / seconds / 1e9 for seconds in times[case.name]] for case in cases}
    ours, *others = (case.name for case in cases)
    rows = [row_of_runs(f"{name}: {each}", speeds[each], "GMAC/s") for each in speeds]
    for each in others:
        ratios = [mine / other for mine, other in zip(speeds[ours], speeds[each], strict=True)]
        rows.append(row_of_runs(f"{name}: ratio to {each}", ratios, "× the peer's"))
    return rows


def bandwidth_rows(kernels: Kernels, material: Material, threads: int, rounds: int) -> Iterator[Row]:
    """One token: products of single matrices, and mixtures of experts. First the memory itself, which should be in
    large pages as well."""
    read, shapes = reading("read bandwidth", threads), (INWARD, OUTWARD)
    cases: dict[Case, float | None] = {reading("read bandwidth, memory of weights", threads, material.data): 90}
    cases |= {
        kernels.linear(f"linear, {bits} bits, groups of {GROUP}", shapes, bits, GROUP): AIMS[bits] for bits in WIDTHS
    }
    cases |= {kernels.linear(f"linear, {bits} bits", shapes, bits, 0): None for bits in FLOATS}
    for group, name in OTHER_GROUPS.items():
        cases |= {kernels.linear(f"linear, {bits} bits, {name}", shapes, bits, group): None for bits in WIDTHS}
    for bits in WIDTHS:
        cases[kernels.mixture(f"mixture, {bits} bits", OLMOE, [Widths(bits, bits, bits)], GROUP)] = AIMS[bits]
    cases[kernels.mixture("mixture, 6 experts of 2, 3 and 4 bits, 2 of 8", OLMOE, MIXED, GROUP)] = None
    times = timed([read, *cases], rounds)
    yield rate_row(read, times)
    for case, aim in cases.items():
        yield from share_rows(case, times, read, aim)


def step_rows(kernels: Kernels, rounds: int) -> Iterator[Row]:
    """The other steps of a token, each with other weights at every call."""
    cases = []
    for bits in (4, 8, 16):
        cases += [
            kernels.attend(f"attention, {bits} bits, {OLMOE.context} tokens", OLMOE, bits, GROUP),
            kernels.route(f"router, {bits} bits", OLMOE, bits, GROUP),
            kernels.head(f"head, {bits} bits", OLMOE, bits, GROUP),
        ]
    times = timed(cases, rounds)
    for case in sorted(cases, key=lambda case: case.name):
        yield row_of_runs(case.name, [1e6 * seconds / case.calls for seconds in times[case.name]], "µs")


def product_rows(kernels: Kernels, threads: int, rounds: int) -> Iterator[Row]:
    """One token and many, beside all peers that have the width."""
    for bits in (*WIDTHS, *FLOATS):
        for tokens in TOKENS:
            most = None if tokens == 1 else max(2, PASS_MACS // (tokens * INWARD[0] * INWARD[1]))
            ours = kernels.linear("moert", [INWARD], bits, GROUP, tokens, most)
            cases = [ours, *kernel_peers.peers(bits, INWARD, tokens, most, threads)]
            name = f"{bits} bits, {tokens} {'token' if tokens == 1 else 'tokens'}"
            mine, *others = speed_rows(name, cases, timed(cases, rounds))
            aimed = isa() == "amx" and bits in WIDTHS and tokens == TOKENS[-1]
            yield from (mine.at_least(WITH_TILES) if aimed else mine, *others)


def instruction_set_rows(found: Library, material: Material, rounds: int) -> Iterator[Row]:
    """One token and one thread on each that runs here; fewer weights, for the slow ones."""
    one = reading("", 1)
    for name in (each.name for each in found.instruction_sets if each.runs):
        read = replace(one, name=f"{name}, one thread: read bandwidth")
        with Kernels(found, material, 1, name) as kernels:
            cases = [
                kernels.linear(f"{name}, one thread, {bits} bits", [INWARD], bits, GROUP, most=256 // bits)
                for bits in WIDTHS
            ]
            times = timed([read, *cases], rounds)
            yield rate_row(read, times)
            for case in cases:
                yield from share_rows(case, times, read, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, not how fast")
    arguments = parser.parse_args()
    started, rounds = time.perf_counter(), sized(2 if arguments.quick else 15, 1)
    found = library.load()
    if found is None:
        raise SystemExit(library.missing_note())
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    material = Material()
    with Kernels(found, material, arguments.threads) as kernels:
        rows = list(bandwidth_rows(kernels, material, arguments.threads, rounds))
        rows += step_rows(kernels, rounds)
        rows += product_rows(kernels, arguments.threads, rounds)
    rows += instruction_set_rows(found, material, max(sized(2, 1), rounds // 3))
    settings = {"threads": arguments.threads, "rounds": rounds, "seconds": round(time.perf_counter() - started)}
    path = write("kernels", context(settings, ["onnxruntime"]), rows)
    print(table(rows))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
