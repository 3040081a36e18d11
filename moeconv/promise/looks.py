"""Counts the conversions that were judged on the same text, since a promise holds for one of them and not for the best.

`looks.jsonl` at the root of the work directory has a line for each conversion that was judged there: what it was, and
digests of the texts it was judged on. A conversion that has any of them in common with this one was a look at the same
text, whatever its seed, quantizer or target. The same command, resumed or repeated, is the same look. A line that a
crash cut short is left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moeconv.errors import ConversionError
from moeconv.strict_json import NotJson, bounded, parse

LOOKS = "looks.jsonl"
_MOST_BYTES = 1 << 26


def look(root: Path, conversion: str, texts: Iterable[str]) -> int:
    """Notes this conversion, unless it was before; how many there are on any of these texts, itself among them.

    `conversion` and `texts` are digests. Raises ConversionError for what the disk refuses.
    """
    path, wanted = root / LOOKS, set(texts)
    try:
        found = [one for one in _read(path) if wanted & set(one["texts"])]
        others = {one["conversion"] for one in found} - {conversion}
        if len(others) == len({one["conversion"] for one in found}):
            _append(path, {"conversion": conversion, "texts": sorted(wanted)})
    except OSError as error:
        raise ConversionError(f"can't use {path}: {error.strerror or error}; free it or give another --work") from None
    return len(others) + 1


def _read(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in _body(path).decode("utf-8", "replace").splitlines():
        try:
            one = parse(line)
        except NotJson:
            continue
        if not isinstance(one, dict):
            continue
        names = [one.get("conversion"), *texts] if isinstance(texts := one.get("texts"), list) else [None]
        if all(isinstance(name, str) for name in names):
            found.append(one)
    return found


def _body(path: Path) -> bytes:
    try:
        return bounded(path, _MOST_BYTES)
    except FileNotFoundError:
        return b""
    except NotJson as error:
        raise ConversionError(f"can't use {path}: {error}; move it away or give another --work") from None


def _append(path: Path, one: dict[str, Any]) -> None:
    """In one write, after a line's end of its own where a crash left none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:
        torn = stream.tell() > 0 and not path.read_bytes().endswith(b"\n")
        stream.write(b"\n" * torn + json.dumps(one).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
