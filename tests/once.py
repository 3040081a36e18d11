"""What many tests read and none may change: made once a run, for all processes that run tests beside each other."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def common(config: pytest.Config, factory: pytest.TempPathFactory) -> Path:
    """Returns a folder that is the same for all processes of a run, and goes with it."""
    own = factory.getbasetemp()
    return own.parent if hasattr(config, "workerinput") else own


def made_once(at: Path, make: Callable[[Path], Any]) -> Path:
    """Returns `at`, a folder that whoever asks first makes, elsewhere at first: where it is there, it is whole."""
    if not at.exists():
        at.parent.mkdir(parents=True, exist_ok=True)
        with (at.parent / f"{at.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not at.exists():
                with tempfile.TemporaryDirectory(dir=at.parent) as folder:
                    make(Path(folder) / at.name)
                    os.rename(Path(folder) / at.name, at)
    return at
