"""`make bench-drafts`: tokens a second with `--tune draft=auto` beside none, with all experts in memory and with a
quarter of them. Writes build/bench/drafts.json.

Three kinds of text: a quotation of the prompt in which one token of 20 is another one, the likeliest text, and text
drawn at temperature 1. The small model does not quote by itself, so the tokens of a quotation are given in the place of
its own choice; the arithmetic is the same. Both ways write the same tokens, or the bench fails. Engines keep what they
learn of the price; the first pair of runs of each kind is left out.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from unittest.mock import patch

from moert.bench.measure import TEXTS
from moert.engine.engine import Engine
from moert.engine.generation import Generation, GenerationSettings
from moert.engine.session import Answer
from moert.pack.codec import F32
from recipes.bench.program import as_program, need
from recipes.bench.result import Row, context, row_of_runs, table, write
from recipes.bench.sized import sized

PACK = Path("build/demo/wiki.pack")
NEW_TOKENS, RUNS = sized((120, 16), (24, 1))
CHANGED = 20
"""One of so many tokens of a quotation is another one than in the prompt."""
THREADS = 2
ROOMS = {"all experts in memory": None, "a quarter of them": "25%"}
WAYS = ("none", "auto")
QUOTED, LIKELIEST, DRAWN = "a quotation", "the likeliest text", "drawn text"
LEAST = {QUOTED: 1.5, DRAWN: 0.99}
"""Kinds of text → least speed beside that without drafts, with all experts in memory."""


def main() -> int:
    pack = Path(sys.argv[1]) if sys.argv[1:] else PACK
    need([pack / "manifest.json"], "demo")
    rows = [row for room in ROOMS for kind in (QUOTED, LIKELIEST, DRAWN) for row in rows_of(pack, room, kind)]
    write("drafts", context({"pack": pack.name, "new tokens": NEW_TOKENS, "runs": RUNS, "threads": THREADS}), rows)
    print(table(rows))
    return 0


def rows_of(pack: Path, room: str, kind: str) -> list[Row]:
    """Returns the speed both ways, by turns, and the ratio. Raises ValueError where they write different answers."""
    engines = [Engine.open(pack, predict="none", cache=ROOMS[room], threads=THREADS, draft=way) for way in WAYS]
    pairs = list[list[float]]()
    for number in range(1 + RUNS):
        order = slice(None, None, 1 if number % 2 else -1)
        none, auto = [answered(engine, kind, number) for engine in engines[order]][order]
        if none.tokens != auto.tokens:
            raise ValueError(f"with drafts, {kind} is another one")
        pairs.append([speed(none), speed(auto)])
    for engine in engines:
        engine.close()
    name, ways = f"{room}, {kind}", list(zip(*pairs[1:], strict=True))
    ratio = row_of_runs(f"{name}: drafts beside none", [auto / none for none, auto in pairs[1:]], "×")
    if ROOMS[room] is None and kind in LEAST:
        ratio = ratio.at_least(LEAST[kind])
    return [*(row_of_runs(f"{name}: {way}", found, "tokens/s") for way, found in zip(WAYS, ways, strict=True)), ratio]


def answered(engine: Engine, kind: str, number: int) -> Answer:
    settings = GenerationSettings(
        max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=float(kind == DRAWN), seed=number
    )  # fmt: skip
    if kind != QUOTED:
        return engine.generate(TEXTS[number % len(TEXTS)], settings)
    drawn = random.Random(number)
    ids = engine.encode(" ".join(drawn.sample(TEXTS, len(TEXTS))))
    quoted = [drawn.choice(ids) if drawn.random() < 1 / CHANGED else token for token in ids]

    def choose(generation: Generation, logits: F32) -> int:
        return quoted[generation.written % len(quoted)]

    with patch.object(Generation, "_choose", choose):
        return engine.generate(ids, settings)


def speed(answer: Answer) -> float:
    """Returns tokens a second behind the first token."""
    return (len(answer.tokens) - 1) / (answer.total_s - answer.time_to_first_token_s)


if __name__ == "__main__":
    as_program(main, __doc__, "[PACK]")
