"""Routing that prefers recent experts: converter and runtime send the same tokens to the same experts, whatever is read
at once, and a preference without effect changes nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packs import open_model, pack_of
from tiny import ROUTED, TINY, VOCAB

from moeconv.measure.trial import LoadedModel
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.experts import Call, Pass
from moeconv.source.routers import Preferring
from moert.kernels.backend import opaque
from moert.models.model import Model
from moert.pack.codec import F32
from moert.pack.manifest import Preference
from moert.pack.model_spec import LayerKey
from tests.kept_keys import WideKeys

TOKENS = 60
CASES = [(family, *next(iter(variants.items()))) for family, (_, variants) in ROUTED.items()]


def preference_of(model: Model, bonus: float = 0.3, spare: int = 1) -> Preference:
    moe = model.spec.moe
    layers = sum(at.stack == "decoder" for at in model.spec.moe_layers())
    recent = min(moe.router.top_k + spare, moe.n)
    return Preference(0.5, recent, int(moe.router.top_k > 1), tuple(bonus / (1 + at) for at in range(layers)))


def choices(model: Model, ids: list[int], target: list[int]) -> tuple[F32, dict[LayerKey, list[list[int]]]]:
    """Logits of the tokens that are written one after the other, and what these chose."""
    found: dict[LayerKey, list[list[int]]] = {at: [] for at in model.spec.moe_layers() if at.stack == "decoder"}
    for at in found:
        router = model.routers[at]

        def heard(x: F32, lengths: Any, recent: Any, router: Any = router, at: LayerKey = at) -> Any:
            routed = type(router).route(router, x, lengths, recent)
            found[at].extend(np.sort(routed.experts, axis=1).tolist())  # those that stand for none first
            return routed

        router.route = heard  # type: ignore[method-assign]
    (state, unread), *_ = model.begin([ids])
    rows = [model.read([state], [unread])[0]]
    rows += [model.step(state, token) for token in target]
    return np.stack(rows), found


@pytest.mark.parametrize(("family", "name", "overrides"), CASES, ids=[case[0] for case in CASES])
def test_converter_and_runtime_choose_the_same(
    family: str, name: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    source = TINY[family][0](tmp_path / "hf", **overrides)
    model, _ = open_model(pack_of(source, tmp_path / "model.pack"), opaque(WideKeys()))
    preference, chance = preference_of(model), random.Random(family)
    model.prefer(preference)
    loaded = LoadedModel(Checkpoint.open(source))
    preferring = Preferring(loaded.model, loaded.checkpoint.description)
    loaded.calls.now = Pass(rerouting=preferring)
    ids = [chance.randrange(2, VOCAB) for _ in range(9 if model.spec.encoder is not None else 1)]
    target = [chance.randrange(2, VOCAB) for _ in range(TOKENS)]
    logits, mine = choices(model, ids, target)
    theirs: dict[LayerKey, Any] = {}

    def watch(at: LayerKey, call: Call) -> None:
        theirs[at] = call.chosen.sort(dim=1).values.tolist()

    with torch.inference_mode(), loaded.calls.during(watch=watch), preferring.on(preference):
        if model.spec.encoder is None:
            expected = loaded.model(torch.tensor([[*ids, *target]])).logits[0]
        else:
            read = torch.tensor([[model.spec.tokens.start or 0, *target]])
            expected = loaded.model(torch.tensor([ids]), decoder_input_ids=read).logits[0]
    assert mine == {at: chosen for at, chosen in theirs.items() if at.stack == "decoder"}
    np.testing.assert_allclose(logits, expected.numpy(), atol=3e-4, rtol=1e-3)
    missed = sum(map(np.sum, preferring.missed.values()))
    assert 0 < missed < preferring.tokens * len(mine) * model.spec.moe.router.top_k
