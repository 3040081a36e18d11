"""`make bench-rounding`: the loss of rounding, which the converter does not measure: a pack on the same held-out text.

Native kernels, with activations of 8 bits, beside the reference. And a KV cache of 16 bits and of 8 bits beside one of
float32, all on the reference. Writes build/bench/rounding.json.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.kernels.backend import opaque
from moert.kernels.reference import ReferenceBackend
from moert.pack.codec import F32
from moert.pack.reader import Pack
from recipes.bench.program import as_program, need
from recipes.bench.result import Row, context, table, write
from recipes.bench.sized import sized
from tests.kept_keys import NarrowKeys, WideKeys
from tests.parity.packs import open_model

F64 = npt.NDArray[np.float64]
WINDOW, WINDOWS, WORDS = 256, sized(96, 2), sized(600, 20)
PACKS = {"g2p": Path("build/demo/g2p.pack"), "wiki": Path("build/demo/wiki.pack")}


def main() -> int:
    need(PACKS.values(), "demo")
    rows = wiki_rows(PACKS["wiki"]) + g2p_rows(PACKS["g2p"])
    for name, path in PACKS.items():
        rows += key_rows(name, Pack.open(path))
    path = write("rounding", context({"windows": WINDOWS, "tokens": WINDOW, "words": WORDS}), rows)
    print(table(rows))
    print(f"written to {path}")
    return 0


def wiki_rows(pack: Path) -> list[Row]:
    """Perplexity of a token on held-out windows, and the divergence between both distributions."""
    exact, rounded = (Engine.open(pack, predict="none", kernels=kernels) for kernels in ("reference", "auto"))
    text = "".join(json.loads(line)["text"] for line in _lines("wiki")[:60])
    ids = exact.text.encoded(text, bounded=False).ids  # windows of it are what the model takes
    starts = range(0, min(len(ids) - WINDOW, WINDOWS * WINDOW), WINDOW)
    losses: list[tuple[float, float]] = []
    divergence: list[float] = []
    for engine in (exact, rounded):
        engine.reserve(WINDOW, 1)
    for start in starts:
        window = ids[start : start + WINDOW]
        one, two = (log_softmax(engine.model.forward_all(window)) for engine in (exact, rounded))
        losses.append((_nll(one, window[1:]), _nll(two, window[1:])))
        divergence.append(float((np.exp(one) * (one - two)).sum(-1).mean()))
    low, high = _interval(losses)
    rise = Row("wiki: relative rise with native kernels", 100 * (math.exp(_mean_difference(losses)) - 1), "%")
    return [
        Row("wiki: perplexity a token, reference", math.exp(statistics.mean(one for one, _ in losses)), ""),
        rise.within(100 * low, 100 * high, len(losses)),
        Row("wiki: divergence", statistics.mean(divergence), "nats a token", n=len(losses)),
    ]


def g2p_rows(pack: Path) -> list[Row]:
    """Words that come out exactly right, and those that come out differently."""
    settings = GenerationSettings(40)
    answers: list[list[str]] = []
    samples = [json.loads(line) for line in _lines("g2p")[:WORDS]]
    for kernels in ("reference", "auto"):
        with Engine.open(pack, predict="none", kernels=kernels) as engine:
            answers.append([engine.generate(sample["input"], settings).text for sample in samples])
    right = [sum(text == sample["target"] for text, sample in zip(texts, samples, strict=True)) for texts in answers]
    differ = sum(one != two for one, two in zip(*answers, strict=True))
    return [
        Row("g2p: words right, reference", 100 * right[0] / len(samples), "%", n=len(samples)),
        Row("g2p: words right, native", 100 * right[1] / len(samples), "%", n=len(samples)),
        Row("g2p: words that differ", 100 * differ / len(samples), "%", n=len(samples)),
    ]


def key_rows(name: str, pack: Pack) -> list[Row]:
    """How much the perplexity of a token rises by the rounding of keys and values."""
    texts, models = list(_texts(name, pack)), {"32": WideKeys(), "16": ReferenceBackend(), "8": NarrowKeys()}
    found = {}
    for bits, backend in models.items():
        model, _ = open_model(pack, opaque(backend))
        found[bits] = [_nll(log_softmax(model.forward_all(*inputs)), wanted) for *inputs, wanted in texts]
    rows = []
    for bits in ("16", "8"):
        losses = list(zip(found["32"], found[bits], strict=True))
        low, high = _interval(losses)
        rise = Row(
            f"{name}: relative rise with keys of {bits} bits", 100 * (math.exp(_mean_difference(losses)) - 1), "%"
        )
        rows.append(rise.within(100 * low, 100 * high, len(losses)))
    return rows


def _texts(name: str, pack: Pack) -> Iterator[tuple[list[int], ...]]:
    """What goes into the model, and the tokens that should come out of the first of its last places."""
    tokenizer = Tokenizer.from_buffer(pack.read_file("tokenizer.json"))
    lines = [json.loads(line) for line in _lines(name)]
    if name == "wiki":
        ids = tokenizer.encode("".join(line["text"] for line in lines[:60])).ids
        for start in range(0, min(len(ids) - WINDOW, WINDOWS * WINDOW), WINDOW):
            window = ids[start : start + WINDOW]
            yield window, window[1:]
        return
    begin = pack.manifest.model.tokens.start
    assert begin is not None
    for line in lines[:WORDS]:
        target = tokenizer.encode(line["target"]).ids
        yield tokenizer.encode(line["input"]).ids, [begin, *target[:-1]], target


def _lines(name: str) -> list[str]:
    return Path(f"build/data/{name}/heldout.jsonl").read_text(encoding="utf-8").splitlines()


def log_softmax(logits: F32) -> F64:
    """[tokens, vocab]"""
    below = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    logs: F64 = below - np.log(np.exp(below).sum(-1, keepdims=True))
    return logs


def _nll(logprobs: F64, target: list[int]) -> float:
    return -float(logprobs[np.arange(len(target)), target].mean())


def _mean_difference(losses: list[tuple[float, float]]) -> float:
    return statistics.mean(two - one for one, two in losses)


def _interval(losses: list[tuple[float, float]]) -> tuple[float, float]:
    """95% interval of the relative rise, by a paired bootstrap over windows."""
    chance = random.Random(0)
    rises = sorted(math.exp(_mean_difference(chance.choices(losses, k=len(losses)))) - 1 for _ in range(2000))
    return rises[50], rises[1949]


if __name__ == "__main__":
    as_program(main, __doc__)
