"""`make bench-promise`: is the promise kept? Whole conversions, repeated over random splits of the reference data.

The calibration and held-out samples of a model are pooled and divided anew by a seed: words of g2p, articles of wiki
(as rows, or as the paragraphs of a .txt file). A conversion with the default quantizer and
`--confidence 95%` then gets the two halves as files. Counted is how often the loss that it reports on its held-out
half, which it used for nothing else, meets the target. A conversion that is refused (TargetMissed) breaks no promise,
but gives no pack either: it is counted apart.

How to read it: a promise that is kept in exactly 95 of 100 cases passes "19 of 20" in three runs out of four, and the
splits are drawn from one pool, so they are not independent. TIMID of the target is asked of the median held-out loss,
where the loss of the widths can be that high at all. Few samples rank the experts, since a poor ranking costs bytes and
not the promise.

A simulation over numbers and sizes of documents (`promise_documents`) stands beside them.

Everything is kept in build/bench/promise/: a split that is finished is not repeated, an unfinished one resumes from its
journal. To start anew, delete that folder."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moeconv.artifacts import ConversionReport, Target
from moeconv.calibration.load import find_entry
from moeconv.conversion.conversion import Conversion
from moeconv.conversion.settings import EVERY_WIDTH, Settings
from moeconv.errors import TargetMissed
from moeconv.measure.metrics import F64, METRICS
from moeconv.progress import bar
from moeconv.promise.bound import Evidence, Terms, upper_bounds
from recipes.bench.program import as_program
from recipes.bench.result import FOLDER, Row, context, row_of_runs, table, write
from recipes.bench.sized import sized

# The promise in simulation: how often a bound holds, over numbers and sizes of documents. Only numpy.
# A case has documents to judge by and held-out ones, of some windows each; the damage to a window is that of its
# document (skewed, as harm is) and its own. Sizes are equal, or heavy-tailed: of 100 documents the largest three
# have a quarter of all windows. A confidence is stated where `Evidence` says that the documents are enough for it,
# as in a conversion; all other rows give no promise, and their coverage is shown without an aim.

DOCUMENTS = sized((10, 20, 30, 50, 100, 300), (10, 30))
RATIOS = (0.5, 1.0, 4.0)
WITHIN = {"low": 0.05, "high": 0.7}  # share of the damage's variance that is the document's
WINDOWS = 8  # of a document, on average
LOSS, DEVIATION = 0.03, 0.05
ALLOWED = 0.02  # that coverage may lie below the confidence
ROUNDS, PLANS, DRAWS = sized((10, 200, 1000), (1, 20, 50))

Rng = np.random.Generator


class Setting(NamedTuple):
    documents: int
    heavy: bool
    within: str
    ratio: float
    confidence: float = 0.95

    @property
    def name(self) -> str:
        sizes = "heavy-tailed" if self.heavy else "equal"
        return (
            f"{self.documents} documents of {sizes} sizes, {self.within} correlation, held out {self.ratio:g} times as "
            f"many, {self.confidence:.0%}"
        )


class Coverage(NamedTuple):
    """Cases, how many of them had a promise, and the share of bounds that held: of those, and of all."""

    cases: int
    given: int
    held_given: float
    held: float


def settings(confidence: float = 0.95) -> Iterator[Setting]:
    for documents, heavy, within, ratio in itertools.product(DOCUMENTS, (False, True), WITHIN, RATIOS):
        yield Setting(documents, heavy, within, ratio, confidence)


def coverage(setting: Setting, seed: int, rounds: int = ROUNDS, plans: int = PLANS, draws: int = DRAWS) -> Coverage:
    """`rounds` draws of sizes, each with `plans` independent cases."""
    rng, metric = np.random.default_rng(seed), METRICS["perplexity"]
    held: list[bool] = []
    given: list[bool] = []
    for at in range(rounds):
        judged = sizes(rng, setting.documents, setting.heavy)
        other = sizes(rng, max(1, round(setting.ratio * setting.documents)), setting.heavy)
        evidence = Evidence(*(np.repeat(np.arange(len(each)), each) for each in (judged, other)))
        reference, scores = windows(rng, judged, WITHIN[setting.within], plans)
        terms = Terms(setting.confidence, evidence.heldout_number, at, evidence.acceptance, draws)
        bounds = upper_bounds(metric, reference, scores, terms)
        before, after = (rows.sum(axis=0) for rows in windows(rng, other, WITHIN[setting.within], plans))
        losses = metric.loss(metric.value_of_sums(before), metric.value_of_sums(after))
        held += (losses <= bounds).tolist()
        given += [evidence.enough(setting.confidence)] * plans
    promised = [one for one, stated in zip(held, given, strict=True) if stated]
    return Coverage(len(held), len(promised), float(np.mean(promised)) if promised else 0.0, float(np.mean(held)))


def sizes(rng: Rng, documents: int, heavy: bool) -> np.ndarray:
    """Windows of each document."""
    if not heavy:
        return np.full(documents, WINDOWS)
    return np.maximum(1, np.minimum(rng.pareto(1.5, documents) + 1, 60) * WINDOWS / 2).round().astype(int)


def windows(rng: Rng, counts: np.ndarray, within: float, plans: int) -> tuple[F64, F64]:
    """→ reference, scores [windows, plans, 2]: nats and words of each window."""
    shape = (int(counts.sum()), plans)
    shared = np.repeat(rng.exponential(1.0, (len(counts), plans)) - 1.0, counts, axis=0)
    own = rng.standard_normal(shape)
    damage = LOSS + DEVIATION * (np.sqrt(within) * shared + np.sqrt(1 - within) * own)
    words = rng.integers(60, 129, shape).astype(float)
    nats = rng.normal(3.5, 0.4, shape)
    return np.stack([nats * words, words], axis=2), np.stack([(nats + damage) * words, words], axis=2)


def simulated_rows(confidences: tuple[float, ...] = (0.9, 0.95)) -> list[Row]:
    """One for each setting; those without a promise have no aim."""
    found = []
    for seed, setting in enumerate(one for confidence in confidences for one in settings(confidence)):
        held = coverage(setting, seed)
        if held.given:
            row = Row(setting.name, 100 * held.held_given, f"% of {held.given:,} promises", runs=held.given)
            found.append(row.at_least(100 * (setting.confidence - ALLOWED)))
        else:
            found.append(Row(f"{setting.name}: no promise given", 100 * held.held, "% of bounds", runs=held.cases))
    return found


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one for each of the processes


CONFIDENCE = 0.95
TIMID = 0.6  # of the target


@dataclass(frozen=True)
class Case:
    """What is converted on each split, and how much of its text is used; the numbers are those of Settings."""

    model: str
    metric: str
    target: float
    samples: int
    sweep_samples: int
    heldout_samples: int
    suffix: str = ".jsonl"

    @property
    def name(self) -> str:
        as_text = " as .txt" if self.suffix == ".txt" else ""
        return f"{self.model}{as_text} {self.metric} {100 * self.target:g}%"


CASES = (
    Case(
        "g2p",
        "perplexity",
        0.003,
        samples=sized(3000, 200),
        sweep_samples=sized(16, 4),
        heldout_samples=sized(4000, 200),
    ),
    Case("wiki", "perplexity", 0.05, samples=61, sweep_samples=2, heldout_samples=61),
    Case("wiki", "perplexity", 0.04, samples=61, sweep_samples=2, heldout_samples=61, suffix=".txt"),
)


@dataclass(frozen=True)
class Split:
    """What one conversion came to. `loss` is the held-out one, `bound` what it was to stay under, shares both; None
    where the conversion was `refused`. `confidence` is what the bound was printed with. `narrowest` is true when no
    expert could be any narrower."""

    seed: int
    loss: float | None
    bound: float | None
    nbytes: int | None
    narrowest: bool
    seconds: float
    refused: str | None
    commit: str
    confidence: float | None = CONFIDENCE


def halves(rows: Sequence[dict[str, Any]], seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows in two parts of about as many documents each, or inputs where rows have none; rows of one document, or of
    one input (a word that is spoken in two ways), stay together."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row.get("document") or row.get("input") or row["text"], []).append(row)
    names = sorted(groups)
    random.Random(seed).shuffle(names)
    half = len(names) // 2
    first, second = ([row for name in part for row in groups[name]] for part in (names[:half], names[half:]))
    return first, second


def pooled(model: str) -> list[dict[str, Any]]:
    """Calibration and held-out rows of the model's catalogue entry."""
    entry = find_entry(model)
    assert entry is not None, f"calib_data/ has no {model}"
    lines = [line for file in (entry.calibration, entry.heldout) for line in file.read_text("utf-8").split("\n")]
    return [json.loads(line) for line in lines if line.strip()]


def run(case: Case, seed: int, folder: Path, rows: Sequence[dict[str, Any]]) -> Split:
    """One split, from its result if it was finished before with the same settings."""
    result, about = folder / "result.json", asdict(case) | {"confidence": CONFIDENCE}
    if result.is_file():
        found = json.loads(result.read_text("utf-8"))
        if found["case"] == about:
            return Split(**found["split"])
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / f"calibration{case.suffix}", folder / f"heldout{case.suffix}"
    for file, part in zip(files, halves(rows, seed), strict=True):
        file.write_text(as_text(part) if case.suffix == ".txt" else as_lines(part), "utf-8")
    split = convert(case, seed, folder, files)
    part_file = folder / "result.json.part"
    part_file.write_text(json.dumps({"case": about, "split": asdict(split)}, indent=1) + "\n", "utf-8")
    part_file.replace(result)
    for large in folder.glob("work/*/moments-*.safetensors"):
        large.unlink()
    return split


def as_lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """Articles one after the other, as WikiText has them: a paragraph or a heading a line, blank lines between."""
    return "".join(row["text"] for row in rows)


def convert(case: Case, seed: int, folder: Path, files: tuple[Path, Path]) -> Split:
    """Deletes the pack after its report is read."""
    pack, started = folder / "pack", time.perf_counter()
    shutil.rmtree(pack, ignore_errors=True)
    settings = Settings(
        f"recipes/models/{case.model}", pack.absolute(), folder / "work", Target("loss", case.target),
        confidence=CONFIDENCE, calib=str(files[0]), heldout=str(files[1]), metric=case.metric,
        seed=seed, samples=case.samples, sweep_samples=case.sweep_samples, heldout_samples=case.heldout_samples,
    )  # fmt: skip
    report, refused = None, None
    try:
        report = Conversion(settings, say, bar).run()[1]
    except TargetMissed as error:
        refused = str(error)
    seconds = round(time.perf_counter() - started, 1)
    shutil.rmtree(pack, ignore_errors=True)
    gc.collect()
    return split_of(case, seed, report, refused, seconds)


def split_of(case: Case, seed: int, report: ConversionReport | None, refused: str | None, seconds: float) -> Split:
    commit = context({})["commit"]
    if report is None:
        return Split(seed, None, None, None, False, seconds, refused, commit)
    assert report.heldout is not None
    narrowest = set(report.bits_histogram) == {min(EVERY_WIDTH)}
    nbytes = report.expert_bytes["pack"]
    return Split(
        seed, report.heldout.loss, report.upper_bound, nbytes, narrowest, seconds, None, commit, report.confidence
    )


def summary(case: Case, splits: Sequence[Split]) -> list[Row]:
    """Aims are set for all packs of a case together."""
    packs = [split for split in splits if split.refused is None]
    losses = [split.loss for split in packs if split.loss is not None]
    bounds = [split.bound for split in packs if split.bound is not None]
    kept = sum(loss <= bound for loss, bound in zip(losses, bounds, strict=True))
    needed = math.floor(CONFIDENCE * len(packs))  # 19 of 20
    within = Row(f"{case.name}: held-out loss stayed under its bound", kept, f"of {len(packs)} packs")
    rows = [
        Row(f"{case.name}: packs", len(packs), f"of {len(splits)} splits"),
        within.at_least(max(1, needed)),
    ]
    if not packs:
        return rows
    narrowest = sum(split.narrowest for split in packs)
    loss = row_of_runs(f"{case.name}: median held-out loss", [100 * value for value in losses], "%")
    sizes = [split.nbytes / 1e6 for split in packs if split.nbytes is not None]
    return [
        *rows,
        Row(f"{case.name}: all experts at the narrowest width", narrowest, f"of {len(packs)} packs"),
        loss if 2 * narrowest > len(packs) else loss.at_least(100 * TIMID * case.target),
        row_of_runs(f"{case.name}: median bound at {CONFIDENCE:.0%}", [100 * value for value in bounds], "%"),
        row_of_runs(f"{case.name}: median size of all experts", sizes, "MB"),
        row_of_runs(f"{case.name}: median time of a split", [split.seconds for split in splits], "s"),
    ]


def details(case: Case, split: Split) -> list[Row]:
    if split.loss is None or split.bound is None or split.nbytes is None:
        return [Row(f"{case.name}, split {split.seed}: refused", 1, "")]
    name = f"{case.name}, split {split.seed}"
    return [
        Row(f"{name}: held-out loss", 100 * split.loss, "%"),
        Row(f"{name}: bound", 100 * split.bound, "%"),
        Row(f"{name}: all experts", split.nbytes / 1e6, "MB"),
    ]


def say(message: str) -> None:
    print(f"  {message}", file=sys.stderr, flush=True)


def progress(case: Case, done: Sequence[Split], splits: int) -> str:
    """A line on what the last split gave, and on the time that the case still takes."""
    last = done[-1]
    if last.loss is None or last.bound is None or last.nbytes is None:
        came = f"refused: {last.refused}"
    else:
        came = f"held-out loss {last.loss:.2%}, bound {last.bound:.2%}, {last.nbytes / 1e6:.2f} MB"
    left = statistics.mean(split.seconds for split in done) * (splits - len(done)) / 60
    return f"{case.name}, split {len(done)} of {splits}: {came}; about {left:.0f} min left"


def task(case: Case, seed: int) -> Split:
    """One split, in a process of its own."""
    folder = FOLDER / "promise" / case.name.replace(" ", "-").replace("%", "").replace(".", "") / f"{seed:02d}"
    return run(case, seed, folder, pooled(case.model))


def main() -> None:
    parser = argparse.ArgumentParser(description="Conversions over random splits of the reference data.")
    parser.add_argument("--splits", type=int, default=sized(20, 1))
    parser.add_argument("--jobs", type=int, default=2, help="Processes, of one thread each.")
    models = list(dict.fromkeys(case.model for case in CASES))
    parser.add_argument("--models", nargs="+", choices=models, default=sized(models, ["g2p"]))
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.model in arguments.models]
    done: dict[str, list[Split]] = {case.name: [] for case in cases}
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        tasks = [(case, pool.submit(task, case, seed)) for seed in range(arguments.splits) for case in cases]
        for case, future in tasks:
            done[case.name].append(future.result())
            print(progress(case, done[case.name], arguments.splits), file=sys.stderr, flush=True)
    overview = [row for case in cases for row in summary(case, done[case.name])]
    rows = [row for case in cases for split in done[case.name] for row in details(case, split)]
    commits = {split.commit for splits in done.values() for split in splits}
    settings = {"splits": arguments.splits, "confidence": CONFIDENCE, "cases": [asdict(case) for case in cases],
                "commits of the splits": sorted(commits)}  # fmt: skip
    simulated = simulated_rows()
    path = write("promise", context(settings), [*overview, *simulated, *rows])
    print(table([*overview, *simulated]))
    print(f"written to {path}")


if __name__ == "__main__":
    as_program(main)
