"""Rows of parquet files and data sets, read by a process with bounded time and memory.

What they take when they are read has nothing to do with what they take on disk: a page of a kilobyte may stand for a
gigabyte of text. So nothing but rows comes here, one at a time, and each is counted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from moeconv.calibration.datasets import HUB, is_dataset, read_dataset
from moeconv.calibration.parquet import read_parquet
from moeconv.calibration.process import Limits, Overlong, Process, bound, say
from moeconv.calibration.rows import MAX_ROW_BYTES, MAX_TEXT_BYTES, Rows
from moeconv.errors import CalibrationError, missing_extra

USUAL = Limits(cpu_s=900, idle_s=600.0, data_bytes=1 << 30, line_bytes=7 * MAX_ROW_BYTES)
FETCHING = replace(USUAL, cpu_s=7200, idle_s=7200.0, data_bytes=4 << 30)
"""Of a data set of the hub, which is fetched and unpacked first."""
_AT_ONCE_BYTES = 1 << 18
_BELIEVED_BYTES, _BELIEVED_TIMES = 1 << 26, 256
ADVICE = "give a smaller part of it, or the text as JSONL"


def rows_apart(named: str, wanted: Collection[str], limits: Limits | None = None) -> Rows:
    """The rows of a parquet file or data set, as far as their fields are `wanted`; others are there, and empty.

    Raises CalibrationError.
    """
    on_hub = is_dataset(named) and named.startswith(HUB)
    limits, place, left = limits or (FETCHING if on_hub else USUAL), named, _most_bytes(named)
    try:
        with Process(__name__, [named, *sorted(wanted)], limits, shown=on_hub) as reader:
            while (line := reader.line()) is not None:
                answer = json.loads(line)
                if isinstance(answer, list):
                    place, row = answer
                    if (left := left - len(line)) < 0:
                        raise CalibrationError(f"{place}: far more text than a file of its size has: {ADVICE}")
                    yield place, row
                elif "refused" in answer:
                    raise CalibrationError(answer["refused"])
                elif "memory" in answer:
                    raise CalibrationError(
                        f"{answer['memory']}: takes more than {limits.data_bytes >> 20} MiB of memory to read: {ADVICE}"
                    )
                else:
                    return
            how = reader.ended()
    except TimeoutError:
        how = f"nothing came of it in {limits.idle_s:g} s"
    except Overlong:
        how = f"a row of it has over {limits.line_bytes} bytes"
    except OSError as error:
        raise CalibrationError(f"{named}: no process can be started to read it ({error.strerror})") from None
    raise CalibrationError(f"{place}: can't be read on from here ({how}): {ADVICE}")


def _most_bytes(named: str) -> int:
    """Of text that a file is believed to have: texts of people are packed to a fifth, not to a thousandth."""
    path = Path(named)
    return max(_BELIEVED_BYTES, _BELIEVED_TIMES * path.stat().st_size) if path.is_file() else 8 * MAX_TEXT_BYTES


def main(bounds: str, named: str, *wanted: str) -> None:
    """What that process does: a line for each row, [place, fields], and then how it ended."""
    bound(bounds)
    out = os.fdopen(os.dup(1), "wb", _AT_ONCE_BYTES)
    os.dup2(2, 1)  # what libraries print is no row
    read: Callable[[], Rows] = (
        (lambda: read_dataset(named, wanted)) if is_dataset(named) else (lambda: read_parquet(Path(named), wanted))
    )
    place, ending = named, dict[str, str]()
    try:
        for place, row in read():
            say(out, [place, row])
    except CalibrationError as error:
        ending = {"refused": str(error)}
    except MemoryError:
        ending = {"memory": f"{place}, or what follows" if place != named else place}
    except Exception as error:  # the libraries that read these have a type for everything
        advice = missing_extra(error) if isinstance(error, ModuleNotFoundError) else None
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ending = {"refused": advice or f"{place}: can't be read on from here ({reason}): {ADVICE}"}
    say(out, ending)
    out.flush()
    sys.stderr.flush()
    os._exit(0)  # without what libraries do at their ends
