"""What tests run in a process of its own to see its memory. Nothing large is imported here: it starts quickly."""

from __future__ import annotations

from pathlib import Path

import pytest

from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.errors import BudgetTooSmall


def refused_then_enough(path: Path, name: str, kernels: str) -> None:
    settings = GenerationSettings(max_new_tokens=6)
    with pytest.raises(BudgetTooSmall) as error:
        Engine.open(path, memory=1000, predict="none", kernels=kernels)
    assert f"memory={error.value.smallest_bytes}" in str(error.value)
    with Engine.open(path, memory=error.value.smallest_bytes, kernels=kernels, notify=lambda note: None) as engine:
        assert engine.generate("hello", settings).result.tokens
        with pytest.raises(BudgetTooSmall, match="this request needs") as later:
            engine.check("a" * 300, 10**7) if name == "switch" else engine.reserve(10**6, 1)
        assert later.value.smallest_bytes > error.value.smallest_bytes


def smallest_memory(path: Path, neurons: str) -> int:
    with Engine.open(path, neurons=neurons, notify=lambda note: None) as engine:
        return engine.smallest_memory(8, 8)
