"""Rows of parquet files and data sets, read by another process with bounded time and memory."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from moeconv.calibration.samples import MAX_ROW_BYTES, MAX_ROWS, MAX_TEXT_BYTES, Rows
from moeconv.errors import CalibrationError, missing_extra
from moert.machine import used_up_time

# Another process for work that can't be bounded in this one: it has limited time and memory, and writes lines.

_PROGRAM = "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); from {module} import main; main(*sys.argv[2:])"
_PART = 1 << 20
_ENDING_S = 10.0


@dataclass(frozen=True)
class Limits:
    """The limits of a process: seconds of the processor, seconds without a line, bytes of memory of its own, and bytes
    of a line. On a system without limits for processor or memory, `idle_s` and the program's own counts remain."""

    cpu_s: int
    idle_s: float
    data_bytes: int
    line_bytes: int


class Overlong(Exception):
    """A line of the process that is longer than its limit."""


class Process:
    """A process that runs `main(*arguments)` of a module, which calls `bound` first. For use in a with block, whose end
    kills it."""

    def __init__(
        self, module: str, arguments: Sequence[str], limits: Limits, shown: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """`shown`: whether its stderr goes to this process's; `environment`: its environment variables, None for those
        of this process."""
        self._limits, self._found = limits, bytearray()
        paths = [str(Path(__file__).parents[2]), *(os.path.realpath(path) for path in sys.path)]
        bounds = json.dumps({"cpu_s": limits.cpu_s, "data_bytes": limits.data_bytes})
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM.format(module=module), json.dumps(paths), bounds, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None if shown else subprocess.DEVNULL,
            start_new_session=True, bufsize=0,
            env={**(os.environ if environment is None else environment), "ARROW_DEFAULT_MEMORY_POOL": "system"},
        )  # fmt: skip
        assert self._process.stdout is not None
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(self._process.stdout, selectors.EVENT_READ)

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._waiting.close()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def send(self, line: bytes) -> None:
        """Sends a line to the process. If the process reads no more, nothing is raised here: `line` will show it."""
        assert self._process.stdin is not None
        left = memoryview(line + b"\n")
        with suppress(OSError):
            while left:
                left = left[self._process.stdin.write(left) or 0 :]

    def line(self) -> bytes | None:
        """Returns the next line of the process; None if it has ended. Raises TimeoutError or Overlong."""
        stream = self._process.stdout
        assert stream is not None
        looked, deadline = 0, time.monotonic() + self._limits.idle_s
        while (end := self._found.find(b"\n", looked)) < 0:
            looked = len(self._found)
            if looked > self._limits.line_bytes:
                raise Overlong
            if not self._waiting.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            part = os.read(stream.fileno(), _PART)
            if not part:
                return None
            self._found += part
        line = bytes(self._found[:end])
        del self._found[: end + 1]
        return line

    def ended(self) -> str:
        """Returns, in words, how the process ended, after `line` gave None."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)
        status = self._process.poll()
        if status is None:
            return "it closed its output and did not end"
        if used_up_time(status):
            return f"it took more than {self._limits.cpu_s} s of the processor"
        return f"it was ended by signal {-status}" if status < 0 else f"it ended with status {status}"


def bound(bounds: str) -> None:
    """Limits the calling process's processor time and memory to those of `bounds`, as far as the system can."""
    asked: Mapping[str, int] = json.loads(bounds)
    with suppress(ImportError):
        import resource

        cpu_s, data_bytes = asked["cpu_s"], asked["data_bytes"]
        for name, soft, wanted in (
            ("RLIMIT_CPU", cpu_s, cpu_s + 1), ("RLIMIT_DATA", data_bytes, data_bytes), ("RLIMIT_CORE", 0, 0),
        ):  # fmt: skip
            with suppress(AttributeError, ValueError, OSError):  # not every system knows all of them
                _, hard = resource.getrlimit(getattr(resource, name))
                most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
                resource.setrlimit(getattr(resource, name), (min(soft, most), most))


def say(out: IO[bytes], answer: Any) -> None:
    """Writes an answer as one line of JSON."""
    out.write(json.dumps(answer, default=_strange).encode() + b"\n")


def _strange(value: Any) -> list[str]:
    """Returns a stand-in for a value that JSON can't hold: a list, so that it is refused as text, which shows the value
    in messages."""
    return [f"{value!r:.60}"]


# Rows of a parquet file, one at a time: its declared size is checked first, and repeated texts are in memory once.

_AT_ONCE = 256  # rows
_FOLDED_BYTES = 1 << 24  # of a column: writers begin no dictionary that is larger, and of plain texts all would be kept


def read_parquet(path: Path, wanted: Collection[str]) -> Rows:
    """Yields the rows of a parquet file; fields that are not `wanted` are empty. Raises CalibrationError."""
    import pyarrow
    import pyarrow.parquet

    try:
        with _opened(pyarrow.parquet, path) as file:
            names = list(dict.fromkeys(file.schema_arrow.names))
            read = [name for name in names if name in wanted]
            _check_sizes(path, file.metadata, set(read))
            number = 0
            for batch in file.iter_batches(_AT_ONCE, columns=read, use_threads=False):
                columns = {name: batch.column(at) for at, name in enumerate(batch.schema.names)}
                for at in range(batch.num_rows):
                    number += 1
                    here = {name: column[at].as_py() for name, column in columns.items()}
                    yield f"{path}: row {number}", {name: here.get(name, "") for name in names}
    except MemoryError:
        raise
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CalibrationError(f"{path}: not a readable parquet file ({reason[:200]})") from None


def _opened(parquet: Any, path: Path) -> Any:
    """Returns an open parquet file whose texts are read as places in lists of different texts, except for columns that
    are too large for the lists."""
    import pyarrow

    with parquet.ParquetFile(path) as file:
        schema, metadata = file.schema_arrow, file.metadata
        columns = (
            metadata.row_group(at).column(place)
            for at in range(metadata.num_row_groups)
            for place in range(metadata.num_columns)
        )
        large = {column.path_in_schema for column in columns if column.total_uncompressed_size > _FOLDED_BYTES}
    texts = [field.name for field in schema if pyarrow.types.is_string(field.type) and field.name not in large]
    return parquet.ParquetFile(path, read_dictionary=texts)


def _check_sizes(path: Path, metadata: Any, read: Collection[str]) -> None:
    """Raises CalibrationError for a file of too many rows or bytes, before anything is unpacked. The metadata may lie,
    so that rows are counted as well when they are read."""
    if metadata.num_rows > MAX_ROWS:
        raise CalibrationError(f"{path}: has {metadata.num_rows} rows, at most {MAX_ROWS} are read: give a part of it")
    nbytes = 0
    for at in range(metadata.num_row_groups):
        group = metadata.row_group(at)
        columns = (group.column(place) for place in range(group.num_columns))
        nbytes += sum(each.total_uncompressed_size for each in columns if each.path_in_schema.split(".")[0] in read)
    if nbytes > MAX_TEXT_BYTES:
        raise CalibrationError(
            f"{path}: unpacks to {nbytes >> 20} MiB, at most {MAX_TEXT_BYTES >> 20} are read: give a part of it"
        )


# Rows of a data set of the `datasets` library: by its name on the hub, or from a folder made by `save_to_disk`.

HUB = "hf:"


def is_dataset(named: str) -> bool:
    return named.startswith(HUB) or _folder(named) is not None


def read_dataset(named: str, wanted: Collection[str]) -> Rows:
    """Yields the rows of `hf:OWNER/NAME`, `hf:OWNER/NAME/CONFIG` or a folder, each with `@SPLIT` behind it if the data
    set has several splits. A single column of class labels gives the names of its classes as `choices`, if rows have
    none. Fields that are not `wanted` are empty.

    Raises CalibrationError.
    """
    data = _split_of(named, _loaded(named))
    classes = [kind.names for kind in data.features.values() if type(kind).__name__ == "ClassLabel"]
    extra = {"choices": classes[0]} if len(classes) == 1 else {}
    names = list(data.column_names)
    if len(data) > MAX_ROWS:
        raise CalibrationError(f"{named}: has {len(data)} rows, at most {MAX_ROWS} are read: give a part of it")
    read = [name for name in names if name in wanted]
    rows = data.select_columns(read) if read else ({} for _ in range(len(data)))
    for number, row in enumerate(rows, 1):
        yield f"{named}: row {number}", {**extra, **{name: row.get(name, "") for name in names}}


def _folder(named: str) -> Path | None:
    """Returns the folder of a data set, whose name may have a split behind it; None if it is no folder."""
    for path in (Path(named), Path(named.rpartition("@")[0] or named)):
        if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            return path
    return None


def _loaded(named: str) -> Any:
    parts = named.removeprefix(HUB).partition("@")[0].split("/")
    if _folder(named) is None and not all(parts):
        raise CalibrationError(
            f"{named}: expected hf:OWNER/NAME or hf:OWNER/NAME/CONFIG, with @SPLIT if it has several"
        )
    import datasets

    try:
        folder = _folder(named)
        if folder is not None:
            return datasets.load_from_disk(str(folder))
        return datasets.load_dataset("/".join(parts[:2]), *parts[2:3])
    except Exception as error:  # no network, an unknown name, a damaged file: the library has a type for each
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CalibrationError(f"{named}: the data set can't be loaded ({reason[:200]})") from None


def _split_of(named: str, loaded: Any) -> Any:
    if not isinstance(loaded, dict):
        return loaded
    split = named.rpartition("@")[2] if "@" in named else ""
    if len(loaded) == 1 and not split:
        return next(iter(loaded.values()))
    if split not in loaded:
        known = ", ".join(loaded)
        raise CalibrationError(f"{named}: there are the splits {known}: name one as {named.partition('@')[0]}@SPLIT")
    return loaded[split]


# Rows of parquet files and data sets, read by a process with bounded time and memory.
# Their size in memory has nothing to do with their size on disk: a page of a kilobyte may stand for a gigabyte of text.
# So only rows come to this process, one at a time, and each is counted.

USUAL = Limits(cpu_s=900, idle_s=600.0, data_bytes=1 << 30, line_bytes=7 * MAX_ROW_BYTES)
FETCHING = replace(USUAL, cpu_s=7200, idle_s=7200.0, data_bytes=4 << 30)
"""The limits for a data set of the hub, which is fetched and unpacked first."""
_AT_ONCE_BYTES = 1 << 18
_BELIEVED_BYTES, _BELIEVED_TIMES = 1 << 26, 256
ADVICE = "give a smaller part of it, or the text as JSONL"


def rows_apart(named: str, wanted: Collection[str], limits: Limits | None = None) -> Rows:
    """Yields the rows of a parquet file or data set, read by another process; fields that are not `wanted` are empty.

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
    """Returns the most bytes of text that a file may unpack to: people's texts are packed to a fifth of their size, not
    to a thousandth."""
    path = Path(named)
    return max(_BELIEVED_BYTES, _BELIEVED_TIMES * path.stat().st_size) if path.is_file() else 8 * MAX_TEXT_BYTES


def main(bounds: str, named: str, *wanted: str) -> None:
    """Runs the reading process: writes a line for each row, [place, fields], and then a line on how it ended."""
    bound(bounds)
    out = os.fdopen(os.dup(1), "wb", _AT_ONCE_BYTES)
    os.dup2(2, 1)  # prints of libraries are no rows
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
    os._exit(0)  # without the libraries' code at exit
