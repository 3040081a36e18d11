"""Every family from a checkpoint to answers: conversions that verify against their source, and policies, budgets and
batches that change no answer."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import ENCODERS, Done, settings_for
from tiny import TINY, VOCAB
from tiny_families import FAMILIES
from tiny_packs import record_routes

from moeconv.packing.emit import Label, emit
from moeconv.packing.packed import PackedModel, verify
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder
from moeconv.routes import build
from moeconv.source.checkpoint import Checkpoint
from moeconv.writer import add_to_pack
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.experts.policy import EVICTION
from moert.kernels.backend import opaque
from moert.pack.paths import PATHS
from moert.pack.reader import Pack
from tests.kept_keys import WideKeys
from tests.pairs import each, thinned
from tests.parity.packs import open_model

ALWAYS = ("deepseek_v3", "gpt_oss", "gemma4", "nllb-moe")
WIDTHS = (2, 4, 8, 16)
NEW = 10
_ALL = (*FAMILIES, *ENCODERS[1:], "gptsan-japanese")
NAMES = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in _ALL]


@pytest.fixture(scope="module", params=NAMES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, TINY[request.param][0](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def pack(source: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With experts of all widths."""
    checkpoint, out = Checkpoint.open(source[1]), tmp_path_factory.mktemp("packs") / "model.pack"
    spec = checkpoint.spec
    widths = {key: (WIDTHS[index % 4],) * len(spec.moe.ffn.projections) for index, key in enumerate(spec.expert_keys())}
    manifest = emit(ExpertCoder(checkpoint, QUANTIZERS["group"](32), None), widths, out, seed=0, label=Label("tests"))
    add_to_pack(out, manifest, PATHS, build(spec.moe.n, record_routes(out, ("some words", "and others"))).to_bytes())
    return out


@thinned("source, wanted", NAMES, [{"loss": 0.05}, {"bits": (2,), "loss": 0.9}], facts=each, indirect=["source"])
def test_a_conversion_verifies_against_its_source(
    wanted: dict[str, object], source: tuple[str, Path], sources: dict[str, Path], tmp_path: Path
) -> None:
    family, path = source
    settings = settings_for({**sources, family: path}, family, tmp_path, quantizer="group", **wanted)
    report, pack = Done(settings).report, Pack.open(settings.out)
    assert verify(pack, Checkpoint.open(path)).worst is not None
    if "bits" in wanted:
        assert {bits for entry in pack.manifest.experts for bits in entry.bits.values()} == {2}
    else:
        assert report.calibration is not None
        assert report.calibration.loss <= 0.05
    packed, ids = PackedModel.open(pack), list(range(2, 40))
    fed = [pack.manifest.model.tokens.start or 0, *ids[:9]] if family in ENCODERS else None
    found = open_model(pack, opaque(WideKeys()))[0].forward_all(ids, fed)
    inputs = {} if fed is None else {"decoder_input_ids": torch.tensor([fed])}
    with torch.inference_mode():
        expected = packed.model(torch.tensor([ids]), **inputs).logits[0].numpy()
    apart = np.abs(found - expected).max() / np.abs(expected).max()
    assert apart < 1e-4


def test_no_policy_budget_or_batch_changes_an_answer(pack: Path) -> None:
    chance, settings = random.Random(3), GenerationSettings(max_new_tokens=NEW, ignore_eos=True)
    prompts = [[chance.randrange(2, VOCAB) for _ in range(length)] for length in (1, 7, 40, 150)]
    with Engine.open(pack) as engine:
        expected = [engine.generate(ids, settings).result.tokens for ids in prompts]
        together = engine.generate_many(prompts, settings)
        assert [answer.result.tokens for answer in together] == expected
        least = max(entry.file_bytes for entry in engine.pack.manifest.experts)
        least *= engine.pack.manifest.model.moe.router.top_k
    assert len({tuple(tokens) for tokens in expected}) > 1
    for number, eviction in enumerate(EVICTION):
        changes = {"cache": least * (1 + number % 3), "threads": 1 + number % 2, "eviction": eviction}
        with Engine.open(pack, predict=("transitions", "gate", "none")[number % 3], **changes) as engine:
            assert [engine.generate(ids, settings).result.tokens for ids in prompts] == expected, changes
