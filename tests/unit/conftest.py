"""Tiny checkpoints, each written once for all tests, and a machine that is not measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import TINY, VOCAB

from moeconv.command import forecast
from tests.still_machine import MACHINE, TIMED

TinyModel = Callable[..., Path]

_MANY = {"eos_token_id": list(range(1, VOCAB, 6))}  # outputs end at different places
MORE = {"many end marks": _MANY, "many end marks, a first token": {**_MANY, "forced_bos_token_id": 8}}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """tiny_model(a family, name of a variant: the first) → a checkpoint that must not be changed."""
    made: dict[tuple[str, str], Path] = {}

    def model(family: str, variant: str = "") -> Path:
        variant = variant or next(iter(TINY[family][1]))
        if (family, variant) not in made:
            make, variants = TINY[family]
            overrides = MORE[variant] if variant in MORE else variants[variant]
            made[family, variant] = make(tmp_path_factory.mktemp(family), **overrides)
        return made[family, variant]

    return model


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is looked at without a measurement."""
    monkeypatch.setattr(forecast, "facts", lambda: MACHINE)
    monkeypatch.setattr(forecast, "timing", lambda: TIMED)
