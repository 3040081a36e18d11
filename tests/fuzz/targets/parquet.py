"""Calibration text as parquet."""

from __future__ import annotations

import io

import pyarrow
import pyarrow.parquet

from moeconv.calibration.load import load_splits
from moeconv.errors import ConversionError
from tests.fuzz.target import Target
from tests.fuzz.targets.packs import folder


def read(body: bytes) -> None:
    path = folder() / "text.parquet"
    path.write_bytes(body)
    load_splits(str(path), None, seed=0)


def seeds() -> list[bytes]:
    pairs = [{"input": f"in {at}", "target": f"out {at}", "document": at // 2} for at in range(17)]
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), out)
    return [out.getvalue()]


TARGET = Target(read, (ConversionError,), seeds)
