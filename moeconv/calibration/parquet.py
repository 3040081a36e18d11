"""Rows of a parquet file, one at a time: what it says of its size first, and texts that repeat only once in memory."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from moeconv.calibration.rows import MAX_ROWS, MAX_TEXT_BYTES, Rows
from moeconv.errors import CalibrationError

_AT_ONCE = 256  # rows
_FOLDED_BYTES = 1 << 24  # of a column: writers begin no dictionary that is larger, and of plain texts all would be kept


def read_parquet(path: Path, wanted: Collection[str]) -> Rows:
    """Fields that are not `wanted` are there, and empty. Raises CalibrationError."""
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
    """With texts as places in lists of different ones, as far as the file has them so."""
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
    """Before anything is unpacked. What they say may be a lie: the rows are counted too."""
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
