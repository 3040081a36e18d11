"""A tiny pack, and what `moert bench` measures of it, once for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moert.bench.measure import BenchRun, measure
from tests import tiny_packs
from tests.tiny_bench import SETTINGS


@pytest.fixture(scope="module", autouse=True)
def _short_look_at_the_drive() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moert.bench.measure._DISK_S", 0.02)
        yield


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_packs.write_pack(tmp_path_factory.mktemp("packs") / "tiny.pack", tiny_packs.DECODER)


@pytest.fixture(scope="module")
def measured(pack: Path) -> BenchRun:
    return measure(pack, SETTINGS, ["one small step", "hello"])
