"""Inputs changed at random: lines of JSON as JSON, all else as bytes. Equal numbers give equal changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

NUMBERS = (
    0, -0.0, 1, -1, 2, 3, 7, 127, 128, 255, 256, 4095, 65535, 65536, 1 << 24, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 53,
    1 << 63, 1 << 64, 10**30, 5e-324, 1e-30, 0.5, 1e30, -1e30, 1e308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
TEXTS = (
    "", " ", "\0", "\x1b[31m", "\u202e", "\ud800", "..", "../outside", "/", "a\nb", "é", "x" * 300, "1", "-1", "1e999",
    "true", "F16", "U8", "▁", "a" * 40, "{{ 9 ** 9 }}", "0" * 64,
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [0], {"": 0}, [None] * 3)
BYTES = b'0123456789-.eE"{}[]:, \n\r\\\0\x01\x1b\x7f\x80\xff\xed\xa0\x80'
_FEW = 64  # places of a document that are looked at by themselves


def mutated(body: bytes, rng: Random, others: Sequence[bytes] = (), longest: int = 1 << 16) -> bytes:
    """One to four changes; parts of `others` may come in. At most `longest` bytes."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        lines = body.split(b"\n")
        at = rng.choice([place for place, line in enumerate(lines[:_FEW]) if line[:1] in (b"{", b"[")] or [-1])
        if at >= 0 and rng.random() < 0.7 and (tree := _tree(lines[at])) is not None:
            lines[at] = _text(_changed_tree(tree, rng, others), rng)
            body = b"\n".join(lines)
        else:
            body = _changed_bytes(body, rng, others)
    return body[:longest]


def _tree(line: bytes) -> Any:
    """The object or array that a line is; None where it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, (dict, list)) and found else None


def _text(tree: Any, rng: Random) -> bytes:
    try:
        text = json.dumps(tree, separators=(",", ":"), ensure_ascii=rng.random() < 0.5)
    except RecursionError:
        return b"[" * 2000
    return text.encode("utf-8", "surrogatepass")


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Each value as what holds it and its key there."""
    found, waiting = [], [tree]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                waiting.append(holder[key])
    return found


def _changed_tree(tree: Any, rng: Random, others: Sequence[bytes]) -> Any:
    places = _places(tree)
    holder, key = rng.choice(places)
    change = rng.randrange(8)
    if change == 0:
        del holder[key]
    elif change == 1 and isinstance(holder, list):
        holder[key:key] = [holder[key]] * rng.choice((1, 1, 2, 50))
    elif change == 2 and isinstance(holder, dict):
        name = rng.choice((*TEXTS, *(str(other) for _, other in places[:_FEW])))
        holder[name] = holder[key] if rng.random() < 0.5 else holder.pop(key)
    elif change == 3:
        there, other = rng.choice(places)
        holder[key] = _copy(there[other])
    elif change == 4 and others and (donor := _tree(rng.choice(others).split(b"\n", 1)[0])) is not None:
        there, other = rng.choice(_places(donor))
        holder[key] = there[other]
    elif change == 5 and isinstance(holder[key], (int, float)):
        holder[key] = rng.choice((holder[key] + 1, holder[key] - 1, holder[key] * 2, -holder[key], str(holder[key])))
    elif change == 6 and isinstance(holder[key], str):
        holder[key] = _changed_text(holder[key], rng)
    else:
        holder[key] = _copy(rng.choice((rng.choice(NUMBERS), rng.choice(TEXTS), rng.choice(OTHERS))))
    return tree


def _copy(value: Any) -> Any:
    """So that no value is in itself."""
    if isinstance(value, (dict, list)):
        try:
            return json.loads(json.dumps(value))
        except RecursionError:
            return None
    return value


def _changed_text(text: str, rng: Random) -> str:
    at, count = rng.randrange(len(text) + 1), rng.choice((0, 0, 1, 8))
    return text[:at] + rng.choice((*TEXTS, text, text[at : at + 4] * 9)) + text[at + count :]


def _changed_bytes(body: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
    result, at, count = bytearray(body), rng.randrange(len(body) + 1), rng.choice((1, 1, 2, 4, 8, 64, 1000))
    change = rng.randrange(9)
    if change == 0 and at < len(result):
        result[at] ^= 1 << rng.randrange(8)
    elif change == 1 and at < len(result):
        result[at] = rng.choice(BYTES)
    elif change == 2:
        del result[at : at + count]
    elif change == 3:
        result[at:at] = rng.randbytes(min(count, 64))
    elif change == 4:
        result[at:at] = result[at : at + count] * rng.choice((1, 1, 30))
    elif change == 5 and others:
        donor = rng.choice(others)
        start = rng.randrange(len(donor) + 1)
        result[at : at + count] = donor[start : start + count]
    elif change == 6:
        number = rng.choice((0, 1, 255, 256, 65535, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1))
        result[at : at + 8] = number.to_bytes(8, "little")[: rng.choice((1, 2, 4, 8))]
    elif change == 7:
        result[at:at] = rng.choice((b"[", b'{"a":', b'"', b"(", b"\xf0\x9f")) * rng.choice((1, 2, 500))
    else:
        result[at : at + count] = rng.choice(TEXTS).encode("utf-8", "surrogatepass")
    return bytes(result)
