"""What rounding activations to 8 bits costs: a pack on the same held-out text, with native and with reference kernels.

The converter measures with float32 activations, so this is what the runtime adds to the loss that it promised.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from pathlib import Path

import torch

from moert.engine import Engine
from moert.generation.settings import GenerationSettings
from tests.bench.result import Row, context, table, write

WINDOW, WINDOWS, WORDS = 256, 96, 600
PACKS = {"g2p": Path("build/demo/g2p.pack"), "wiki": Path("build/demo/wiki.pack")}


def main() -> int:
    missing = [str(path) for path in PACKS.values() if not path.is_dir()]
    if missing:
        print(f"{' and '.join(missing)} missing: make demo makes them", file=sys.stderr)
        return 2
    rows = wiki_rows(PACKS["wiki"]) + g2p_rows(PACKS["g2p"])
    path = write("rounding", context({"windows": WINDOWS, "tokens": WINDOW, "words": WORDS}), rows)
    print(table(rows))
    print(f"written to {path}")
    return 0


def wiki_rows(pack: Path) -> list[Row]:
    """Perplexity of a token on held-out windows, and the divergence between both distributions."""
    exact, rounded = (Engine.open(pack, predictor="none", kernels=kernels) for kernels in ("reference", "auto"))
    ids = exact.encode("".join(json.loads(line)["text"] for line in _lines("wiki")[:60]))
    starts = range(0, min(len(ids) - WINDOW, WINDOWS * WINDOW), WINDOW)
    losses: list[tuple[float, float]] = []
    divergence: list[float] = []
    for engine in (exact, rounded):
        engine.reserve(WINDOW, 1)
    for start in starts:
        window = ids[start : start + WINDOW]
        one, two = (engine.model.forward_all(window).log_softmax(-1) for engine in (exact, rounded))
        target = torch.tensor(window[1:])[:, None]
        losses.append((_nll(one, target), _nll(two, target)))
        divergence.append(float((one.exp() * (one - two)).sum(-1).mean()))
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
        with Engine.open(pack, predictor="none", kernels=kernels) as engine:
            answers.append([engine.generate(sample["input"], settings).text for sample in samples])
    right = [sum(text == sample["target"] for text, sample in zip(texts, samples, strict=True)) for texts in answers]
    differ = sum(one != two for one, two in zip(*answers, strict=True))
    return [
        Row("g2p: words right, reference", 100 * right[0] / len(samples), "%", n=len(samples)),
        Row("g2p: words right, native", 100 * right[1] / len(samples), "%", n=len(samples)),
        Row("g2p: words that differ", 100 * differ / len(samples), "%", n=len(samples)),
    ]


def _lines(name: str) -> list[str]:
    return Path(f"build/data/{name}/heldout.jsonl").read_text(encoding="utf-8").splitlines()


def _nll(logprobs: torch.Tensor, target: torch.Tensor) -> float:
    return -float(logprobs[:-1].gather(1, target).mean())


def _mean_difference(losses: list[tuple[float, float]]) -> float:
    return statistics.mean(two - one for one, two in losses)


def _interval(losses: list[tuple[float, float]]) -> tuple[float, float]:
    """95% interval of the relative rise, by a paired bootstrap over windows."""
    chance = random.Random(0)
    rises = sorted(math.exp(_mean_difference(chance.choices(losses, k=len(losses)))) - 1 for _ in range(2000))
    return rises[50], rises[1949]


if __name__ == "__main__":
    sys.exit(main())
