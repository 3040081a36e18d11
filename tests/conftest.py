"""Settings for all tests: no network, one thread, the same random examples in each run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from hypothesis import settings
from random_packs import write_pack

torch.set_num_threads(1)
_CACHE = tempfile.TemporaryDirectory(prefix="moert-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name  # drives are remembered there
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


@pytest.fixture
def pack_dir(tmp_path: Path) -> Path:
    """A small pack on disk: a decoder with gated experts of mixed widths."""
    out = tmp_path / "model.pack"
    write_pack(out)
    return out
