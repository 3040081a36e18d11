"""Counts the conversions that were judged on the same text, since a promise holds for one of them and not for the best.

`looks.jsonl` at the root of the work directory has a line for each conversion that was judged there: its digest,
digests of the texts it was judged on, and a seal, which is a digest of the line and of the seal before it. A conversion
that has any of the texts in common with this one was a look at the same text, whatever its seed, quantizer or target.
The same command, resumed or repeated, is the same look. A line that a crash cut short is left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from moeconv.errors import ConversionError
from moeconv.measure.journal import identity
from moeconv.strict_json import NotJson, bounded, parse

try:
    import fcntl
except ImportError:  # not on this system: two runs at once are the user's care
    fcntl = None  # type: ignore[assignment]

LOOKS = "looks.jsonl"
_MOST_BYTES = 1 << 26


def look(root: Path, conversion: str, texts: Iterable[str]) -> int:
    """Notes this conversion, unless it was before, and returns how many conversions there are on any of these texts,
    itself among them.

    `conversion` and `texts` are digests. Raises ConversionError for a disk that refuses, and for a file that was
    changed.
    """
    path, wanted = root / LOOKS, set(texts)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as stream:
            if fcntl is not None:
                fcntl.flock(stream, fcntl.LOCK_EX)  # conversions with other settings may share the root
            whole, every = _read(path)
            found = {one["conversion"] for one in every if wanted & set(one["texts"])}
            if conversion not in found:
                seal = every[-1]["seal"] if every else ""
                _append(stream, whole, _sealed(seal, conversion, sorted(wanted)))
    except OSError as error:
        raise ConversionError(f"can't use {path}: {error.strerror or error}; free it or give another --work") from None
    return len(found | {conversion})


def _sealed(before: str, conversion: str, texts: list[str]) -> dict[str, Any]:
    """Returns a line's object. `before`: the seal of the line before; "" for the first."""
    return {"conversion": conversion, "texts": texts, "seal": identity(before, conversion, texts)}


def _read(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Returns the bytes of all whole lines, and these lines. Raises OSError, ConversionError."""
    try:
        body = bounded(path, _MOST_BYTES)
    except NotJson as error:
        raise ConversionError(f"can't use {path}: {error}; move it away or give another --work") from None
    whole = body[: body.rfind(b"\n") + 1]
    found: list[dict[str, Any]] = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            one = parse(line)
            sealed = one == _sealed(found[-1]["seal"] if found else "", one["conversion"], one["texts"])
            sealed = sealed and all(isinstance(name, str) for name in (one["conversion"], *one["texts"]))
        except (NotJson, TypeError, KeyError):
            sealed = False
        if not sealed:
            raise ConversionError(
                f"{path}:{number} was changed since it was made (or an older version wrote it): delete the file, and "
                "conversions that were judged on this text are counted anew, or give another --work"
            )
        found.append(one)
    return len(whole), found


def _append(stream: IO[bytes], whole: int, one: dict[str, Any]) -> None:
    """Writes a line behind the `whole` bytes of those before it, in one write."""
    stream.truncate(whole)
    stream.write(json.dumps(one).encode() + b"\n")
    stream.flush()
    os.fsync(stream.fileno())
