"""`make bench-kernels`: the native kernels beside the bandwidth of memory, and beside torch's and onnxruntime's.

Everything that is compared runs in turns; a figure is the median of its rounds, a share or ratio the median of those of
each round. All weights together are far larger than any cache. Writes build/bench/kernels.json."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from moert.kernels import library
from moert.kernels.library import Library
from moert.pack.codec import CODES, U8
from recipes.bench.ggml_products import ggml
from recipes.bench.kernel_cases import (
    FLOATS,
    TRELLIS,
    Case,
    Kernels,
    Material,
    Olmoe,
    Shape,
    Widths,
    buffer,
    reader,
    vector,
)
from recipes.bench.program import as_program
from recipes.bench.result import Row, context, isa, row_of_runs, table, write
from recipes.bench.sized import sized

# The same products by torch and onnxruntime, for `make bench-kernels`: each with many matrices of one shape.

SITE = Path("build/peers/kernels")
GROUPS = (32, 64)
SOME = sized(320 << 20, 16 << 20)  # bytes: far more than any cache holds


class PeerMissing(Exception):
    """A peer that can't run here; the message says why."""


def count_of(nbytes: float, most: int | None) -> int:
    """How many matrices of `nbytes` are enough."""
    enough = max(2, int(SOME // nbytes))
    return enough if most is None else min(enough, most)


def torch_float(dtype: torch.dtype, shape: Shape, tokens: int, most: int | None) -> Case:
    """F.linear."""
    rows, cols = shape
    count = count_of(rows * cols * dtype.itemsize, most)
    weights = torch.from_numpy(vector(rows, cols)).to(dtype).repeat(count, 1, 1)
    x = torch.from_numpy(vector(tokens, cols)).to(dtype)
    name = f"torch {str(dtype).removeprefix('torch.')}"
    return Case(
        name, lambda: [F.linear(x, weight) for weight in weights], count, weights.nbytes, tokens * weights.numel()
    )


def torch_int8(shape: Shape, tokens: int, most: int | None) -> Case:
    """One scale a row, activations in bfloat16. Raises PeerMissing."""
    multiply = _operator("_weight_int8pack_mm")
    rows, cols = shape
    count = count_of(rows * cols, most)
    weights = torch.randint(-128, 128, (rows, cols), dtype=torch.int8).repeat(count, 1, 1)
    scales, x = torch.full((rows,), 0.01, dtype=torch.bfloat16), torch.from_numpy(vector(tokens, cols)).bfloat16()
    return Case(
        "torch int8",
        lambda: [multiply(x, weight, scales) for weight in weights],
        count,
        weights.nbytes,
        tokens * weights.numel(),
    )


def torch_int4(group: int, shape: Shape, tokens: int, most: int | None) -> Case:
    """Groups with scale and zero point, activations in bfloat16. Raises PeerMissing."""
    multiply, convert = _operator("_weight_int4pack_mm_for_cpu"), _operator("_convert_weight_to_int4pack_for_cpu")
    rows, cols = shape
    count = count_of(rows * cols * (0.5 + 4 / group), most)
    packed = convert(torch.randint(0, 16, (rows, cols), dtype=torch.int32), 1).repeat(count, 1, 1)
    scales = torch.full((count, cols // group, rows, 2), 0.01, dtype=torch.bfloat16)
    x = torch.from_numpy(vector(tokens, cols)).bfloat16()
    return Case(
        f"torch int4, groups of {group}",
        lambda: [multiply(x, codes, group, scale) for codes, scale in zip(packed, scales, strict=True)],
        count,
        packed.nbytes + scales.nbytes,
        tokens * count * rows * cols,
    )


def onnxruntime(bits: int, group: int, shape: Shape, tokens: int, most: int | None, threads: int) -> Case:
    """One graph of many MatMulNBits with 8-bit activations, groups without zero point. Raises PeerMissing."""
    ort, onnx = _onnxruntime()
    rows, cols = shape
    nbytes = rows * cols * (bits / 8 + 4 / group)
    count = count_of(nbytes, most)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.add_session_config_entry("session.force_spinning_stop", "1")  # or it takes a core from who runs next
    try:
        session = ort.InferenceSession(
            _graph(onnx, bits, group, shape, count), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # the package has many kinds of its own
        raise PeerMissing(
            f"onnxruntime at {bits} bits, groups of {group}: {str(error).splitlines()[0][:200]}"
        ) from error
    x = {"x": vector(tokens, cols)}
    name = f"onnxruntime {bits} bits, groups of {group}"
    return Case(name, lambda: session.run(None, x), count, int(nbytes * count), tokens * count * rows * cols)


def peers(bits: int, shape: Shape, tokens: int, most: int | None, threads: int) -> Iterator[Case]:
    """All that there are for a width; a line for each that is missing."""
    makers: dict[int, list[Any]] = {
        4: [lambda group=group: torch_int4(group, shape, tokens, most) for group in GROUPS],
        8: [lambda: torch_int8(shape, tokens, most)],
        16: [lambda: torch_float(torch.bfloat16, shape, tokens, most)],
        32: [lambda: torch_float(torch.float32, shape, tokens, most)],
    }
    of_onnx = [lambda group=group: onnxruntime(bits, group, shape, tokens, most, threads) for group in GROUPS]
    for make in makers.get(bits, []) + (of_onnx if bits in (2, 4, 8) else []):
        try:
            yield make()
        except PeerMissing as missing:
            print(f"left out: {missing}", file=sys.stderr, flush=True)


def _operator(name: str) -> Any:
    if not hasattr(torch.ops.aten, name):
        raise PeerMissing(f"torch {torch.__version__} has no {name}")
    return getattr(torch.ops.aten, name)


def _onnxruntime() -> tuple[Any, Any]:
    """The packages of SITE, after all others. Raises PeerMissing."""
    if str(SITE) not in sys.path:
        sys.path.append(str(SITE))
    try:
        import onnx
        import onnxruntime as ort
    except ImportError as error:
        raise PeerMissing(f"onnxruntime: {error} (`make bench-kernels` installs it)") from error
    return ort, onnx


def _graph(onnx: Any, bits: int, group: int, shape: Shape, count: int) -> bytes:
    """x [tokens, cols] → y0, y1, ... [tokens, rows]. No two matrices are equal: onnxruntime would keep one of them."""
    (rows, cols), helper, floats = shape, onnx.helper, onnx.TensorProto.FLOAT
    random, packed = np.random.default_rng(0), (rows, cols // group, group * bits // 8)
    scales = np.full(rows * cols // group, 0.01, np.float32)
    nodes, tensors, outputs = [], [], []
    for i in range(count):
        codes = random.integers(0, 256, packed, np.uint8)
        tensors += [onnx.numpy_helper.from_array(codes, f"w{i}"), onnx.numpy_helper.from_array(scales, f"s{i}")]
        outputs.append(helper.make_tensor_value_info(f"y{i}", floats, ["tokens", rows]))
        nodes.append(
            helper.make_node(
                "MatMulNBits", ["x", f"w{i}", f"s{i}"], [f"y{i}"], domain="com.microsoft", K=cols, N=rows, bits=bits,
                block_size=group, accuracy_level=4,
            )
        )  # fmt: skip
    x = helper.make_tensor_value_info("x", floats, ["tokens", cols])
    graph = helper.make_graph(nodes, "products", [x], outputs, tensors)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model


OLMOE = Olmoe()
INWARD, OUTWARD = (OLMOE.d_ff, OLMOE.d_model), (OLMOE.d_model, OLMOE.d_ff)
WIDTHS = (2, 3, 4, 8)
AIMS = {2: 60.0, 3: 60.0, 4: 75.0, 8: 75.0}  # % of the bandwidth, groups of GROUP, one token
WITH_TILES = 500.0  # GMAC/s of many tokens, where the processor has tiles
BESIDE = {1.5: "IQ1_S", 2: "IQ2_XS", 2.5: "IQ2_S", 3: "IQ3_XXS", 4: "IQ4_XS"}
"""Trellis codes → llama.cpp's format of about as many bits."""
TRELLIS_AIM, LLAMA_AIM, LLAMA_AIMED = 24.0, 1.3, "2 bits, 1 token: ratio to llama.cpp"  # GMAC/s; × the peer's
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
            cases = [ours, *peers(bits, INWARD, tokens, most, threads)]
            mine, *others = speed_rows(f"{bits} bits, {in_tokens(tokens)}", cases, timed(cases, rounds))
            aimed = isa() == "amx" and bits in WIDTHS and tokens == TOKENS[-1]
            yield from (mine.at_least(WITH_TILES) if aimed else mine, *others)


def trellis_rows(kernels: Kernels, threads: int, rounds: int) -> Iterator[Row]:
    """Trellis codes, beside the plain codes of their width and llama.cpp's formats."""
    for bits, tokens in product(CODES, TOKENS):
        most = None if tokens == 1 else max(2, PASS_MACS // (tokens * INWARD[0] * INWARD[1]))
        cases = [kernels.linear("moert", [INWARD], bits, TRELLIS, tokens, most)]
        if bits in WIDTHS:
            cases.append(kernels.linear("plain codes", [INWARD], bits, GROUP, tokens, most))
        if bits in BESIDE:
            try:
                cases.append(ggml(BESIDE[bits], INWARD, tokens, cases[0].calls, threads))
            except FileNotFoundError as missing:
                print(f"left out: {missing}", file=sys.stderr, flush=True)
        mine, *others = speed_rows(f"trellis, {bits:g} bits, {in_tokens(tokens)}", cases, timed(cases, rounds))
        others = [row.at_least(LLAMA_AIM) if LLAMA_AIMED in row.name else row for row in others]
        yield from (mine.at_least(TRELLIS_AIM) if (bits, tokens) == (2, 1) else mine, *others)


def in_tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


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
        rows += trellis_rows(kernels, arguments.threads, rounds)
    rows += instruction_set_rows(found, material, max(sized(2, 1), rounds // 3))
    settings = {"threads": arguments.threads, "rounds": rounds, "seconds": round(time.perf_counter() - started)}
    path = write("kernels", context(settings, ["onnxruntime"]), rows)
    print(table(rows))
    print(f"written to {path}")


if __name__ == "__main__":
    as_program(main)
