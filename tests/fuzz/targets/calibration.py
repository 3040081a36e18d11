"""Calibration text as JSONL, CSV and plain text, read and divided; parquet is a target of its own."""

from __future__ import annotations

import json

from moeconv.calibration.load import load_splits
from moeconv.errors import ConversionError
from tests.fuzz.target import Target
from tests.fuzz.targets.packs import folder

_KINDS = (b"jsonl", b"csv", b"txt")


def read(body: bytes) -> None:
    """The first line says which kind of file the rest is."""
    kind, _, rest = body.partition(b"\n")
    kind = kind if kind in _KINDS else _KINDS[len(body) % len(_KINDS)]
    path = folder() / f"text.{kind.decode()}"
    path.write_bytes(rest)
    load_splits(str(path), None, seed=0)


def seeds() -> list[bytes]:
    running = [{"text": f"= Title {at} =\nwords {at}\n"} for at in range(6)]
    pairs = [{"input": f"in {at}", "target": f"out {at}", "document": at // 2} for at in range(17)]
    choices = [{"input": f"is {at}", "choices": ["no", "yes"], "label": at % 2} for at in range(17)]
    chats = [{"messages": [{"role": "user", "content": "x"}]}]
    lines = [
        "\n".join(json.dumps(row, separators=(",", ":")) for row in rows) for rows in (running, pairs, choices, chats)
    ]
    table = "input,target\n" + "".join(f'"in {at}",out {at}\n' for at in range(17))
    labelled = "input,choices,label\n" + "".join(f'in {at},"[""no"", ""yes""]",{at % 2}\n' for at in range(17))
    prose = "# One\n\nwords and words\n\n\n# Two\n\nmore words\n"
    return [
        *(b"jsonl\n" + text.encode() for text in lines),
        *(b"csv\n" + text.encode() for text in (table, labelled)),
        b"txt\n" + prose.encode(),
    ]


TARGET = Target(read, (ConversionError,), seeds, longest=8192)
