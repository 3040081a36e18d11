"""What is named beforehand, as rows: hits of the hash function by the length of an input (SiDA, Table 4), and recall by
how far ahead and how many experts are read (Mixtral-offloading's figure)."""

from __future__ import annotations

from collections.abc import Iterator

from moert.pack.model_spec import StackName
from recipes.bench.hash_packs import LENGTHS, Subject, inputs
from recipes.bench.hash_watch import AHEAD, READ, WHOLE, Hits, Recalls, opened, read
from recipes.bench.result import Row

HIT_AIMS = {"short": 97.0, "middle": 95.0, "long": 90.0}
AHEAD_AIM, WHOLE_AIM = 85.0, 60.0
AIMED = ("wiki", "decoder", "1", "both")
WHO = ("gate", "hash", "both", "tables")


def hit_rows(subject: Subject) -> Iterator[Row]:
    for length in LENGTHS:
        with opened(subject.pack) as engine:
            hits, texts = Hits(engine), inputs(subject, length)
            for ids in texts:
                read(engine, ids, subject.new_tokens)
            top_k = engine.spec.moe.router.top_k
        for stack, counts in sorted(hits.counts.items(), reverse=True):
            where = f"{subject.name}, {stack}, {length}"
            for name, count in (("first", top_k), ("more", 3 * top_k)):
                row = Row(f"{where}: among the {_first(count)}", 100 * hits.share(stack, name), "%", n=counts["all"])
                aimed = stack == "encoder" and name == "more"
                yield row.at_least(HIT_AIMS[length]) if aimed else row


def _first(count: int) -> str:
    return "first" if count == 1 else f"first {count}"


def recall_rows(subject: Subject) -> Iterator[Row]:
    with opened(subject.pack) as engine:
        recalls = Recalls(engine)
        for ids in inputs(subject):
            read(engine, ids, subject.new_tokens)
        stacks: list[StackName] = [name for name in engine.spec.stacks if engine.spec.moe_layers(name)]
    for stack in sorted(stacks, reverse=True):
        for when in (WHOLE, *map(str, AHEAD)):
            for who in WHO:
                for times in READ:
                    found = recalls.recall(stack, when, who, times)
                    if found is not None:
                        yield _aimed(subject.name, stack, when, who, times, found)


def _aimed(name: str, stack: StackName, when: str, who: str, times: int, found: float) -> Row:
    ahead = when if when == WHOLE else f"{when} ahead"
    row = Row(f"{name}, {stack}, {ahead}: {who}, {times} × as many", 100 * found, "%")
    if times == 1 and (name, stack, when, who) == AIMED:
        return row.at_least(AHEAD_AIM)
    return row.at_least(WHOLE_AIM) if times == 1 and when == WHOLE and stack == "decoder" else row
