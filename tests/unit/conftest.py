"""Tiny checkpoints, each written once for all tests of a run, and a machine that is not measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tiny import TINY, VOCAB

from moeconv.command import forecast
from tests.once import common, made_once
from tests.still_machine import MACHINE, TIMED

TinyModel = Callable[..., Path]

_MANY = {"eos_token_id": list(range(1, VOCAB, 6))}  # outputs end at different places
MORE = {"many end marks": _MANY, "many end marks, a first token": {**_MANY, "forced_bos_token_id": 8}}


@pytest.fixture(scope="session")
def tiny_model(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """tiny_model(a family, name of a variant: the first) → a checkpoint that must not be changed, also that of parity
    tests."""
    root = common(pytestconfig, tmp_path_factory) / "tiny"

    def model(family: str, variant: str = "") -> Path:
        make, variants = TINY[family]
        variant = variant or next(iter(variants))
        overrides = MORE[variant] if variant in MORE else variants[variant]
        return made_once(root / family / variant / "hf", partial(make, **overrides))

    return model


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is looked at without a measurement."""
    monkeypatch.setattr(forecast, "facts", lambda: MACHINE)
    monkeypatch.setattr(forecast, "timing", lambda: TIMED)
