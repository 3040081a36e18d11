"""Tiny models beside what transformers 4.57.6 gave for them, which is kept: version 5 has no GPTSAN-japanese any more,
and runs the wrong experts of NLLB-MoE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packs import greedy, open_model, pack_of
from tiny import TINY, transformers_model

from moeconv.source.checkpoint import Checkpoint
from moert.engine.engine import Engine
from moert.kernels.backend import opaque
from tests.golden.transformers_4_57 import CASES, KEPT, NEW, digest, kept_of, prompts_of, target_of
from tests.kept_keys import WideKeys

OUTPUTS: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8"))
CLOSE = 1e-4


@pytest.fixture(params=CASES, ids=[f"{family}: {name}" for family, name in CASES])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, dict[str, Any]]:
    """A checkpoint, the name of its variant, and what was kept of it."""
    family, name = request.param
    make, variants = TINY[family]
    return make(tmp_path / "hf", **variants[name]), name, OUTPUTS[f"{family}: {name}"]


def test_the_weights_are_those_that_the_old_version_ran(case: tuple[Path, str, dict[str, Any]]) -> None:
    path, _, kept = case
    assert digest(path) == kept["weights"]


def test_the_pack_gives_what_the_old_version_gave(case: tuple[Path, str, dict[str, Any]], tmp_path: Path) -> None:
    path, name, kept = case
    model, _ = open_model(pack_of(path, tmp_path / "model.pack"), opaque(WideKeys()))
    for ids, expected in _answers(name, model.spec.vocab_size, kept):
        target = None if model.spec.encoder is None else target_of(ids, model.spec.tokens.start or 0)
        found = kept_of(model.forward_all(ids, target))
        np.testing.assert_allclose(found, expected["logits"], atol=CLOSE, rtol=CLOSE)
        assert greedy(model, ids, NEW) == expected["tokens"]


def test_the_module_that_is_measured_gives_what_the_old_version_gave(case: tuple[Path, str, dict[str, Any]]) -> None:
    path, name, kept = case
    checkpoint = Checkpoint.open(path)
    decoding = checkpoint.spec.encoder is None
    model: Any = transformers_model(path) if decoding else checkpoint.model(torch.float32)
    for ids, expected in _answers(name, checkpoint.spec.vocab_size, kept):
        given: dict[str, Any] = {}
        if not decoding:
            given = {"decoder_input_ids": torch.tensor([target_of(ids, checkpoint.spec.tokens.start or 0)])}
        with torch.inference_mode():
            found = kept_of(model(torch.tensor([ids]), **given).logits[0])
        np.testing.assert_allclose(found, expected["logits"], atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("name", ["a prefix", "all of it"])
def test_prompts_that_see_themselves_whole_are_answered_alike_alone_and_in_batches(name: str, tmp_path: Path) -> None:
    """On the native kernels, where a few of the answers differ by rounding from those in float32."""
    family, kept = "gptsan-japanese", OUTPUTS[f"gptsan-japanese: {name}"]
    path = TINY[family][0](tmp_path / "hf", **TINY[family][1][name])
    pack_of(path, tmp_path / "model.pack")
    asked = [ids for ids, _ in _answers(name, 96, kept)]
    with Engine.open(tmp_path / "model.pack") as engine:
        alone = [engine.generate(ids, max_new_tokens=NEW).result.tokens for ids in asked]
        together = [answer.result.tokens for answer in engine.generate_many(asked, max_new_tokens=NEW)]
    assert together == alone
    same = [tokens == expected["tokens"] for tokens, (_, expected) in zip(alone, _answers(name, 96, kept), strict=True)]
    assert sum(same) > len(same) // 2


def _answers(name: str, vocab: int, kept: dict[str, Any]) -> list[tuple[list[int], dict[str, Any]]]:
    return list(zip(prompts_of(name, vocab), kept["answers"], strict=True))
