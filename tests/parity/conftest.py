"""Tiny checkpoints, and packs of them, each written once for all tests of a process."""

from __future__ import annotations

import pytest
from packs import Tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))
