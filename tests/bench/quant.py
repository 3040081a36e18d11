"""`make bench-quant`: our quantisers beside hqq and llama.cpp's K-quants, at equal bits a weight with scales counted.

All experts of a reference model are quantised alike; what is lost is the rise of the perplexity on text that no
quantiser saw. Writes build/bench/quant.json.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np
import numpy.typing as npt
import torch

from moeconv.quantizers import QUANTIZERS, Inputs
from moert.pack.codec import F32, dequantize
from tests.bench import quant_speed
from tests.bench.likelihood import Likelihoods
from tests.bench.peers import K_QUANTS, Coded, Ggml, hqq, hqq_group_size, import_peers
from tests.bench.result import Row, context, table, write
from tests.bench.subject import SIZES, SPLITS, Quantized, Result, Subject

OURS = (("channel", 0), ("group", 32), ("group", 64), ("gptq", 0), ("gptq", 64), ("gptq", 128))
LIMITS = {2: 2.625, 3: 3.4375, 4: 4.5}  # width → the effective bits of the K-quant of that width
WIDTHS = (2, 3, 4, 8)
RESAMPLES = 1000


def ours(quantizer: str, group_size: int, bits: int, weights: F32, inputs: Inputs) -> Coded:
    """One of the project's quantisers; the matrices of all experts of a layer in one call."""
    made = QUANTIZERS[quantizer](group_size)
    if made.wants == "squares":
        inputs = Inputs(inputs.rows, squares(inputs))
    matrices = made.quantize(weights, bits, None if made.wants == "nothing" else inputs)
    nbytes = [m.qweight.nbytes + m.scale.nbytes + m.minimum.nbytes for m in matrices]
    return Coded(np.stack([dequantize(matrix) for matrix in matrices]), sum(nbytes) / len(nbytes))


def squares(inputs: Inputs) -> F32:
    """The mean square of each input [n, in], of inputs with products."""
    return np.ascontiguousarray(np.diagonal(inputs.moment, axis1=1, axis2=2))


def peers(subject: Subject) -> Iterator[Quantized]:
    """Each peer at about 2.5, 3.3 and 4.5 bits a weight."""
    for bits, limit in LIMITS.items():
        size = hqq_group_size(subject.sizes, bits, limit)
        for axis in (1, 0):
            name = f"hqq {bits} bits, groups of {size}, axis {axis}"
            yield subject.quantize("hqq", name, lambda w, _, a=axis, b=bits, s=size: hqq(w, b, s, a))
    ggml = Ggml()
    for name in K_QUANTS:
        yield subject.quantize("GGUF", name, lambda w, _, n=name: ggml.code(w, n, None))
        with_inputs = f"{name} with imatrix"
        yield subject.quantize("GGUF", with_inputs, lambda w, i, n=name: ggml.code(w, n, squares(i)))


def candidates(subject: Subject, limit: float) -> Iterator[Quantized]:
    """Each of our quantisers with as many effective bits as `limit` allows: a width for all experts, and with gptq,
    where room is left, the next width for some."""
    for quantizer, group_size in OURS:
        at = partial(_coded, subject, quantizer, group_size)
        fitting = [bits for bits in WIDTHS if at(bits).bits <= limit + 1e-9]
        if not fitting:
            continue
        low = at(fitting[-1])
        yield low
        if quantizer == "gptq" and limit - low.bits > 0.02:
            high = at(WIDTHS[len(fitting)])
            share = (limit - low.bits) / (high.bits - low.bits)
            yield subject.mix(f"{low.name}, {share:.0%} of experts at {WIDTHS[len(fitting)]}", low, high, limit)


def _coded(subject: Subject, quantizer: str, group_size: int, bits: int) -> Quantized:
    groups = f"groups of {group_size}" if group_size else "channels"
    name = f"{quantizer} {bits} bits, {groups}"
    return subject.quantize("ours", name, partial(ours, quantizer, group_size, bits))


def compare(name: str) -> tuple[dict[str, float], list[Result]]:
    """Perplexities of one unquantised model, and what all settings make of it."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    import_peers()
    subject = Subject(name)
    results: dict[str, Result] = {}
    whole = {split: judged.nll for split, judged in subject.unquantised.items()}

    def add(settings: Callable[[], Iterator[Quantized]]) -> None:
        for setting in settings():
            if setting.name not in results:
                results[setting.name] = subject.measure(setting)
                print(summary(results[setting.name], whole), file=sys.stderr, flush=True)

    add(lambda: peers(subject))
    for limit in sorted({round(result.bits, 6) for result in results.values()}):
        add(lambda limit=limit: candidates(subject, limit))
    return whole, list(results.values())


def rows_of(name: str, whole: dict[str, float], results: Sequence[Result]) -> list[Row]:
    """Effective bits, weight error and losses of every setting."""
    rows = [Row(f"{name}, unquantised: perplexity, {split}", float(np.exp(whole[split])), "") for split in SPLITS]
    for result in results:
        about = f"{name}, {result.name}"
        rows.append(Row(f"{about}: effective bits", result.bits, "bits a weight"))
        rows.append(Row(f"{about}: weight error", 100 * result.error, "%"))
        for split in SPLITS:
            rows.append(Row(f"{about}: loss, {split}", loss(result, whole, split), "% of perplexity"))
            rows.append(Row(f"{about}: divergence, {split}", result.judged[split].kl, "nats a token"))
    return rows


def loss(result: Result, whole: dict[str, float], split: str) -> float:
    """Rise of the perplexity in per cent."""
    return 100 * float(np.expm1(result.judged[split].nll - whole[split]))


def duels(results: Sequence[Result]) -> list[Row]:
    """Each peer against the best of ours that needs no more bits, which is chosen on the calibration split alone.

    Both by the divergence from the unquantised model and by the perplexity; the former is by far the quieter.
    """
    rows = []
    for peer in [result for result in results if result.method != "ours"]:
        allowed = [r for r in results if r.method == "ours" and r.bits <= peer.bits + 1e-6]
        best = min(allowed, key=lambda result: result.judged["calibration"].kl)
        for split in SPLITS:
            about = f"{peer.model}, {best.name} ({best.bits:.2f}) against {peer.name} ({peer.bits:.2f}), {split}"
            mine, theirs = best.judged[split], peer.judged[split]
            ratios = _resampled(mine, mine.kls) / _resampled(theirs, theirs.kls)
            rows.append(
                Row(f"{about}: divergence", mine.kl / theirs.kl, "of the peer's", _quartiles(ratios)).at_most(1)
            )
            rises = 100 * np.expm1(_resampled(mine, mine.nats - theirs.nats))
            rise = 100 * float(np.expm1(mine.nll - theirs.nll))
            rows.append(Row(f"{about}: perplexity", rise, "% above the peer's", _quartiles(rises)).at_most(0))
    return rows


def _resampled(judged: Likelihoods, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Means a token over RESAMPLES draws of samples, which are the same draws in each call."""
    count = len(judged.tokens)
    chosen = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    means: npt.NDArray[np.float64] = sums[chosen].sum(1) / judged.tokens[chosen].sum(1)
    return means


def _quartiles(values: npt.NDArray[np.float64]) -> float:
    """The distance between the quartiles."""
    low, high = np.quantile(values, (0.25, 0.75))
    return float(high - low)


def overview(name: str, whole: dict[str, float], results: Sequence[Result]) -> str:
    """A line for each setting, in order of effective bits."""
    perplexities = ", ".join(f"{np.exp(whole[split]):.3f} ({split})" for split in SPLITS)
    lines = [
        f"{name}: perplexity {perplexities}",
        f"{'':58} {'bits':5} {'error %':7} {'loss %, and held-out':17} {'KL, and held-out':17}",
    ]
    for result in sorted(results, key=lambda r: (round(r.bits, 2), r.judged["calibration"].kl)):
        lines.append(summary(result, whole))
    return "\n".join(lines)


def summary(result: Result, whole: dict[str, float]) -> str:
    """A line of the overview."""
    losses = " ".join(f"{loss(result, whole, split):8.2f}" for split in SPLITS)
    divergences = " ".join(f"{result.judged[split].kl:8.4f}" for split in SPLITS)
    name = f"{result.model}, {result.name}"
    return f"{name:58} {result.bits:.3f} {100 * result.error:7.2f} {losses} {divergences}"


def main() -> None:
    started = time.perf_counter()
    names = sys.argv[1:] or ["wiki", "docline", "g2p"]
    import_peers()
    workers = min(len(names), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        found = dict(zip(names, pool.map(compare, names), strict=True))
    rows, aims = [], []
    for name, (whole, results) in found.items():
        print(overview(name, whole, results), end="\n\n")
        rows += rows_of(name, whole, results)
        aims += duels(results)
    aims += quant_speed.rows()
    settings = {"samples": SIZES, "resamples": RESAMPLES, "seconds": round(time.perf_counter() - started)}
    path = write("quant", context(settings, ["hqq", "gguf"]), [*rows, *aims])
    print(table(aims))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
