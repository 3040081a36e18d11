"""Tiny checkpoints, and packs of them, each written once for all tests of a run."""

from __future__ import annotations

import pytest
from packs import Tiny

from tests.once import common


@pytest.fixture(scope="session")
def tiny(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(common(pytestconfig, tmp_path_factory) / "tiny")
