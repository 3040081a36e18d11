"""Tiny checkpoints, each written once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import OLMOE_VARIANTS, SWITCH_VARIANTS, VOCAB, tiny_olmoe, tiny_switch

TinyModel = Callable[[str, str], Path]

MORE_SWITCH = {"many end marks": {"eos_token_id": list(range(1, VOCAB, 6))}}  # outputs end at different places


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """tiny_model("switch" or "olmoe", name of a variant) → a checkpoint that must not be changed."""
    made: dict[tuple[str, str], Path] = {}
    families = {"switch": (tiny_switch, {**SWITCH_VARIANTS, **MORE_SWITCH}), "olmoe": (tiny_olmoe, OLMOE_VARIANTS)}

    def model(family: str, variant: str) -> Path:
        if (family, variant) not in made:
            make, variants = families[family]
            made[family, variant] = make(tmp_path_factory.mktemp(family), **variants[variant])
        return made[family, variant]

    return model
