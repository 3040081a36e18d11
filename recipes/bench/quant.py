"""`make bench-quant`: our quantizers beside hqq, llama.cpp's K- and i-quants and AutoRound, at equal effective bits.

All experts of a reference model are quantized alike. The loss is the rise of the perplexity, and the divergence, on
text that no quantizer saw. Writes build/bench/quant.json; for `smollm2`, a published model, quant_smollm2.json. A run
that was ended goes on where it was: each result is kept in build/quant until all are written.

No reference model has only rows that are whole blocks of 256 weights. For other rows llama.cpp would fall back to
formats of 4.5 bits and more; here rows are joined until they fill blocks, so that its formats keep their bits (scales
of 16 or 32 weights stay within a row, and the units of these scales span rows). In addition, g2p is measured with only
those matrices quantized whose rows fit.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from moeconv import quantizers as coders
from moeconv.quantizers import QUANTIZERS, Inputs
from moeconv.quantizers.trellis import TrellisQuantizer
from moert.pack import codec
from moert.pack.codec import CODES, F32, dequantize, dequantize_trellis
from recipes.bench import quantizers
from recipes.bench.ggml_products import I_QUANTS, K_QUANTS
from recipes.bench.program import as_program
from recipes.bench.quantizers import (
    DOCUMENTS,
    FITTING,
    PUBLISHED,
    SIZES,
    SPLITS,
    STEPS,
    TUNED,
    Apart,
    Coded,
    Failure,
    Ggml,
    Likelihoods,
    Quantized,
    Result,
    Subject,
    autoround,
    gguf,
    hqq,
    hqq_group_size,
    import_peers,
    without_autoround,
)
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.sized import sized

# Weights a second on one core: ours, hqq and llama.cpp's, on one large matrix and on many small ones.

SHAPES = sized({"1024 × 4096": (1, 1024, 4096), "64 experts of 256 × 128": (64, 256, 128)}, {"64 × 256": (1, 64, 256)})
RUNS = sized(3, 1)
SLOW_S = 10.0  # what takes longer is run once after the turn that is not counted
AIM = 50.0  # million weights a second, for `group` at 4 bits


def speed_rows() -> list[Row]:
    """The methods take turns; the first turn is not counted."""
    torch.set_num_threads(1)
    found = []
    for name, shape in SHAPES.items():
        methods = _methods(np.random.default_rng(0).standard_normal(shape, np.float32))
        times: dict[str, list[float]] = {method: [] for method in methods}
        for turn in range(RUNS + 1):
            for method, call in methods.items():
                if turn > 1 and times[method][0] > SLOW_S:
                    continue
                start = time.perf_counter()
                call()
                times[method].append(time.perf_counter() - start)
        for method, (_, *taken) in times.items():
            rates = [np.prod(shape) / seconds / 1e6 for seconds in taken]
            row = row_of_runs(f"speed, {method}, {name}", [float(rate) for rate in rates], "million weights/s")
            found.append(row.at_least(AIM) if method.startswith("group") else row)
    return found


def _methods(weights: F32) -> dict[str, Callable[[], object]]:
    """At 4 bits, with inputs known where that makes a difference."""
    n, _, in_features = weights.shape
    x = np.random.default_rng(1).standard_normal((2 * in_features, in_features), np.float32)
    counts = np.full(n, len(x))
    square = Inputs.of(counts, np.repeat(np.square(x).mean(0)[None], n, axis=0))
    product = Inputs.of(counts, np.repeat((x.T @ x / len(x))[None], n, axis=0))
    formats = {name: Ggml(name) for name in ("Q4_K", "IQ2_XS", "IQ3_S", "IQ4_XS")}
    return {
        "channel": lambda: QUANTIZERS["channel"](0).quantize(weights, 4, None),
        "group": lambda: QUANTIZERS["group"](64).quantize(weights, 4, square),
        "gptq": lambda: QUANTIZERS["gptq"](64).quantize(weights, 4, product),
        "hqq": lambda: hqq(weights, 4, 64, 1),
        "Q4_K, no data": lambda: formats["Q4_K"].encode(weights, None),
    } | {
        f"{name}, imatrix": lambda ggml=ggml: ggml.encode(weights, square.moment)  # type: ignore[misc]
        for name, ggml in formats.items()
    }


NAMES = sized(("wiki", "wikids", "marks", "g2p", f"g2p{FITTING}"), ("wiki",))
GPTQ = (("gptq", 0), ("gptq", 64), ("gptq", 128))[: sized(3, 1)]
OTHERS = (("channel", 0), ("group", 32), ("group", 64))[: sized(3, 2)]
SCALAR = (("gptq", 64),)
"""Of a published model, which is ten times as large, beside the trellis."""
LIMITS = sized({2: 2.625, 3: 3.4375, 4: 4.5}, {4: 4.5})  # width → the effective bits of the K-quant of that width
WIDTHS = sized((2, 3, 4, 8), (4, 8))
AUTOROUND_WIDTHS = (2,)
TRELLIS_WIDTHS = sized(tuple(CODES), (4,))
RESAMPLES = 1000
PROGRESS = Path("build/quant")
PROGRAM = (
    Path(__file__),
    Path(quantizers.__file__),
    Path(codec.__file__),
    *sorted(Path(coders.__file__).parent.glob("*.py")),
)
"""The files that a result depends on most."""
NOTES = {
    "what peers know": "hqq and 'no data': the weights alone; 'imatrix': the mean square of each input on the text "
    "that ours sees; ours (gptq): the products of all inputs there; AutoRound: the text itself, through whole layers",
    "rows": "no multiple of 256 but in 'fitting rows' (g2p's down matrices alone): rows are joined to fill blocks of "
    "llama.cpp's formats, where it would fall back to formats of more bits",
    "ours": "the best at the peer's bits or fewer, chosen on the calibration split; bits are filled by giving every "
    "so many-th expert one width up",
}


def ours(quantizer: str, group_size: int, bits: int, weights: F32, inputs: Inputs) -> Coded:
    """One of the project's quantizers; the matrices of all experts of a layer in one call."""
    made = QUANTIZERS[quantizer](group_size)
    if made.wants == "squares":
        inputs = Inputs(inputs.rows, squares(inputs), inputs.counted)
    matrices = made.quantize(weights, bits, None if made.wants == "nothing" else inputs)
    nbytes = [m.qweight.nbytes + m.scale.nbytes + m.minimum.nbytes for m in matrices]
    return Coded(np.stack([dequantize(matrix) for matrix in matrices]), sum(nbytes) / len(nbytes))


def trellis(bits: float, weights: F32, inputs: Inputs) -> Coded:
    """The trellis codes of the matrices of all experts of a layer."""
    matrices = TrellisQuantizer().quantize(weights, bits, inputs)
    nbytes = [m.stream.nbytes + m.scale.nbytes for m in matrices]
    return Coded(np.stack([dequantize_trellis(matrix) for matrix in matrices]), sum(nbytes) / len(nbytes))


def squares(inputs: Inputs) -> F32:
    """The mean square of each input [n, in], of inputs with products."""
    return np.ascontiguousarray(np.diagonal(inputs.moment, axis1=1, axis2=2))


def peers(subject: Subject, apart: Apart) -> dict[str, Callable[[], Quantized]]:
    """By name, each peer at about 2.5, 3.3 and 4.5 bits a weight, and the i-quants between them."""
    found: dict[str, Callable[[], Quantized]] = {}

    def add(name: str, function: Callable[[F32, Inputs], Coded]) -> None:
        found[name] = lambda: subject.quantize("peer", name, function)

    coded = subject.name == PUBLISHED  # its file has 4 bits: these lose nothing where they fall upon the same codes
    for bits, limit in LIMITS.items():
        if coded and bits == 4:
            continue
        size = hqq_group_size(subject.sizes, bits, limit)
        for axis in (1, 0):
            add(f"hqq {bits} bits, axis {axis}", lambda w, _, a=axis, b=bits, s=size: apart.call(hqq, w, b, s, a))
    left_out = ("Q4_K", "IQ4_XS") if coded else ()
    for name in [each for each in sized([*K_QUANTS], ["Q4_K"]) if each not in left_out]:
        add(f"{name}, no data", lambda w, _, n=name: apart.call(gguf, w, n, None))
    for name in [each for each in sized([*K_QUANTS, *I_QUANTS], ["Q4_K"]) if each not in left_out]:
        add(f"{name}, imatrix", lambda w, i, n=name: apart.call(gguf, w, n, squares(i)))
    if subject.name in TUNED and without_autoround() is None:
        windows = np.concatenate([batch["input_ids"].numpy() for batch in subject.seen])

        def tuned(bits: int) -> Quantized:
            return subject.whole("peer", f"AutoRound {bits} bits", apart.call(autoround, subject.path, windows, bits))

        found |= {f"AutoRound {bits} bits": partial(tuned, bits) for bits in AUTOROUND_WIDTHS}
    return found


def candidates(subject: Subject, limit: float) -> Iterator[Callable[[], Quantized]]:
    """Each of our quantizers with as many effective bits as `limit` allows: a width for all experts, and with gptq and
    trellis, where room is left, the next width for some. Where even the least are too many, these."""
    scalar = (*GPTQ, *OTHERS) if limit in LIMITS.values() else GPTQ
    for name, group_size in (*(SCALAR if subject.name == PUBLISHED else scalar), ("trellis", 0)):
        at = partial(_coded, subject, name, group_size)
        widths: Sequence[float] = TRELLIS_WIDTHS if name == "trellis" else WIDTHS
        fitting = [bits for bits in widths if at(bits).bits <= limit + 1e-9]
        if not fitting:
            if group_size == 0:
                yield partial(at, widths[0])
            continue
        low = at(fitting[-1])
        yield partial(at, fitting[-1])
        if name in ("gptq", "trellis") and len(fitting) < len(widths) and limit - low.bits > 0.02:
            high = at(widths[len(fitting)])
            share = (limit - low.bits) / (high.bits - low.bits)
            mixed = f"{low.name}, {share:.1%} of experts at {widths[len(fitting)]}"
            yield partial(subject.mix, mixed, low, high, limit)


def _coded(subject: Subject, quantizer: str, group_size: int, bits: float) -> Quantized:
    if quantizer == "trellis":
        return subject.quantize("ours", f"trellis {bits} bits", partial(trellis, bits))
    groups = f"groups of {group_size}" if group_size else "channels"
    name = f"{quantizer} {bits} bits, {groups}"
    return subject.quantize("ours", name, partial(ours, quantizer, group_size, int(bits)))


def path_of(subject: str, folder: Path = PROGRESS) -> Path:
    """Returns the path of a subject's Progress."""
    return folder / f"{subject}.jsonl"


class Progress:
    """The results of one subject, in a file of lines of JSON that another run with the same program goes on from."""

    def __init__(self, subject: str, model_sha256: str, folder: Path = PROGRESS) -> None:
        self.path = path_of(subject, folder)
        digest = sha256(repr((subject, model_sha256, SIZES, LIMITS)).encode())
        for each in PROGRAM:
            digest.update(each.read_bytes())
        self._program = digest.hexdigest()

    def results(self) -> dict[str, Result]:
        """Returns the results by name; takes half a line off the file, and all of another program's."""
        *lines, _ = self.path.read_text(encoding="utf-8").split("\n") if self.path.exists() else [""]  # whole ones
        if lines[:1] != [self._program]:
            lines = [self._program]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        found = {}
        for line in lines[1:]:
            fields = json.loads(line)
            judged = {
                split: Likelihoods(*(np.array(each) for each in sums)) for split, sums in fields.pop("judged").items()
            }
            found[fields["name"]] = Result(**fields, judged=judged)
        return found

    def add(self, result: Result) -> None:
        fields = vars(result) | {
            "judged": {split: [each.tolist() for each in vars(sums).values()] for split, sums in result.judged.items()}
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")


class Comparison:
    """All settings on one subject."""

    def __init__(self, name: str) -> None:
        self.subject = Subject(name)
        self.progress = Progress(name, self.subject.sha256)
        self.results = self.progress.results()
        self.failures: list[str] = []
        self.started, self.before = time.perf_counter(), len(self.results)

    def run(self) -> None:
        with Apart() as apart:
            chosen = peers(self.subject, apart)
            expected = len(chosen) + 55
            for name, quantized in chosen.items():
                if name in self.results:
                    continue
                try:
                    self._measure(quantized(), expected)
                except Failure as failure:
                    self.failures.append(f"{self.subject.name}, {name}: {failure}")
                    print(self.failures[-1], file=sys.stderr, flush=True)
        limits = sorted({round(result.bits, 6) for result in self.results.values() if result.method != "ours"})
        for number, limit in enumerate(limits):
            for quantize in candidates(self.subject, limit):
                self._measure(quantize(), len(self.results) + 1 + 5 * (len(limits) - number - 1))

    def _measure(self, quantized: Quantized, expected: int) -> None:
        if quantized.name in self.results:
            return
        result = self.results[quantized.name] = self.subject.measure(quantized)
        self.progress.add(result)
        measured = len(self.results) - self.before
        left = (time.perf_counter() - self.started) / measured * (expected - len(self.results))
        whole = {split: judged.nll for split, judged in self.subject.unquantized.items()}
        print(f"{summary(result, whole)}, about {left / 60:.0f} min left", file=sys.stderr, flush=True)


def compare(name: str, threads: int) -> tuple[dict[str, float], list[Result], list[str]]:
    """Nats a token of one unquantized model, what all settings make of it, and which peers failed."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    import_peers()
    comparison = Comparison(name)
    comparison.run()
    whole = {split: judged.nll for split, judged in comparison.subject.unquantized.items()}
    return whole, list(comparison.results.values()), comparison.failures


def rows_of(name: str, whole: dict[str, float], results: Sequence[Result]) -> list[Row]:
    """Effective bits, weight error and losses of every setting."""
    rows = [Row(f"{name}, unquantized: perplexity, {split}", float(np.exp(whole[split])), "") for split in SPLITS]
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


def duels(results: Sequence[Result]) -> tuple[list[Row], dict[str, str]]:
    """Each peer against the best of ours that needs no more bits, which is chosen on the calibration split alone; and
    which that is.

    Both by the divergence from the unquantized model and by the perplexity; the former is by far the quieter. Where
    none of ours needs so few bits, against the narrowest of ours, without an aim.
    """
    rows, chosen = [], {}
    narrowest = min(result.bits for result in results if result.method == "ours")
    for peer in [result for result in results if result.method != "ours"]:
        limit = max(peer.bits, narrowest)
        allowed = [r for r in results if r.method == "ours" and r.bits <= limit + 1e-6]
        best = min(allowed, key=lambda result: result.judged["calibration"].kl)
        about = f"{peer.model} against {peer.name}"
        chosen[about] = best.name
        rows.append(Row(f"{about}: bits of the peer", peer.bits, "bits a weight"))
        rows.append(Row(f"{about}: bits of ours", best.bits, "bits a weight").at_most(peer.bits + 1e-6))
        for split in SPLITS:
            duel = _duel(f"{about}, {split}", best.judged[split], peer.judged[split])
            limits = (1, 0) if best.bits <= peer.bits + 1e-6 else (None, None)
            rows += [row if aim is None else row.at_most(aim) for row, aim in zip(duel, limits, strict=True)]
    return rows, chosen


def _duel(about: str, mine: Likelihoods, theirs: Likelihoods) -> tuple[Row, Row]:
    n = len(mine.tokens)
    ratios = _resampled(mine, mine.kls) / _resampled(theirs, theirs.kls)
    rises = 100 * np.expm1(_resampled(mine, mine.nats - theirs.nats))
    rise = 100 * float(np.expm1(mine.nll - theirs.nll))
    return (
        Row(f"{about}: divergence", mine.kl / theirs.kl, "of the peer's").within(*_interval(ratios), n),
        Row(f"{about}: perplexity", rise, "% above the peer's").within(*_interval(rises), n),
    )


def _resampled(judged: Likelihoods, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Means a token over RESAMPLES draws of documents, which are the same draws in each call."""
    count = len(judged.tokens)
    chosen = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    means: npt.NDArray[np.float64] = sums[chosen].sum(1) / judged.tokens[chosen].sum(1)
    return means


def _interval(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """95% of them."""
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


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


def gather(names: Sequence[str]) -> tuple[list[Row], list[Row], dict[str, str], list[str]]:
    """Figures, comparisons, which of ours was compared, what failed; two subjects at a time, each in a process."""
    cores = len(os.sched_getaffinity(0))

    def alone(name: str) -> tuple[dict[str, float], list[Result], list[str]]:
        with Apart() as apart:
            try:
                return apart.call(compare, name, max(1, cores // len(names)))
            except Failure as failure:
                return {}, [], [f"{name}: {failure}"]

    with ThreadPoolExecutor(min(len(names), cores)) as pool:
        found = dict(zip(names, pool.map(alone, names), strict=True))
    rows: list[Row] = []
    aims: list[Row] = []
    chosen: dict[str, str] = {}
    for name, (whole, results, _) in found.items():
        if not results:
            continue
        print(overview(name, whole, results), end="\n\n")
        rows += rows_of(name, whole, results)
        duelled, best = duels(results)
        aims, chosen = aims + duelled, chosen | best
    return rows, aims, chosen, [failure for *_, failures in found.values() for failure in failures]


def main() -> None:
    started = time.perf_counter()
    names = sys.argv[1:] or NAMES
    published = list(names) == [PUBLISHED]
    import_peers()
    rows, aims, chosen, failures = gather(names)
    try:
        aims += [] if published else speed_rows()
    except Exception as error:  # the figures before it took long
        failures.append(f"speed: {error}")
    left_out = without_autoround()
    settings = {"samples": SIZES, "resampled": DOCUMENTS, "resamples": RESAMPLES, **NOTES, "chosen of ours": chosen,
                "AutoRound's steps": STEPS, **({"left out": left_out} if left_out else {}),
                "failed": failures, "seconds": round(time.perf_counter() - started)}  # fmt: skip
    packages = ["hqq", "gguf", *([] if left_out else ["auto-round"])]
    path = write(f"quant_{PUBLISHED}" if published else "quant", context(settings, packages), [*rows, *aims])
    for name in names:
        path_of(name).unlink(missing_ok=True)
    print(table(aims))
    if left_out:
        print(f"left out: {left_out}", file=sys.stderr)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    print(f"written to {path}")


if __name__ == "__main__":
    as_program(main, __doc__, "[MODEL...]")
