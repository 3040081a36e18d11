"""All targets by name."""

from __future__ import annotations

import importlib

from tests.fuzz.target import Target

TARGETS = {
    "manifest": 6000,
    "tokenizer": 4000,
    "chat": 20_000,
    "template": 1500,
    "paths": 20_000,
    "trace": 20_000,
    "hash": 6000,
    "predictor": 15_000,
    "neurons": 10_000,
    "experts": 10_000,
    "config": 4000,
    "weights": 8000,
    "gguf": 6000,
    "calibration": 4000,
    "parquet": 20,
    "messages": 3000,
    "toml": 8000,
}
"""Each a module of tests/fuzz/targets, imported alone, as some bring torch; and how many inputs it gets where there is
little time."""


def load(name: str) -> Target:
    found: Target = importlib.import_module(f"tests.fuzz.targets.{name}").TARGET
    return found
