"""Of every family: examples are what its routers chose by, and a hash function can take the place of a softmax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import ROUTED, TINY, VOCAB

from moeconv.calibration import Sample
from moeconv.foresight.examples import collected
from moeconv.foresight.network import Following, Networks, Shape, refusal
from moeconv.measure.metrics import METRICS
from moeconv.measure.scoring import Extent, build_scorer, load_tokenizer
from moeconv.measure.trial import LoadedModel
from moeconv.progress import unseen
from moeconv.source.checkpoint import Checkpoint
from moert.pack.model_spec import LayerKey

CASES = [(family, *next(iter(variants.items()))) for family, (_, variants) in ROUTED.items()]


@pytest.mark.parametrize(("family", "name", "overrides"), CASES, ids=[case[0] for case in CASES])
def test_examples_and_routing(family: str, name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    loaded = LoadedModel(Checkpoint.open(str(TINY[family][0](tmp_path / "hf", **overrides))))
    spec, description = loaded.spec, loaded.checkpoint.description
    words = ["a few words", "zigzag", "the quick brown fox", "one small step"]
    texts = [Sample(word, word if spec.encoder is not None else "") for word in words * 3]
    tokenizer = load_tokenizer(tmp_path / "hf" / "tokenizer.json")
    scorer = build_scorer(loaded, tokenizer, texts, METRICS["perplexity"], Extent(None, 16, 5))
    examples = collected(tmp_path / "examples", "text", loaded, description, scorer, unseen("", 1).__enter__())
    top_k = spec.moe.router.top_k
    for stack in examples.stacks.values():
        part = stack.whole
        assert part.tokens.max() < max(VOCAB, spec.vocab_size)
        if spec.moe.router.score != "softmax" or not spec.moe.router.choice_bias:
            there = (part.chosen >= 0).all(-1)
            named, chosen = (np.sort(x.astype(np.int64), -1) for x in (part.experts[..., :top_k], part.chosen))
            assert (named == chosen).all(-1)[there].mean() > 0.98, name
    if refusal(spec.moe) is not None:
        return
    networks = Networks({stack: Shape.of(spec, stack, 8) for stack in examples.stacks})
    hits = {stack: np.zeros((len(spec.moe_layers(stack)), 2), np.float32) for stack in examples.stacks}
    function = networks.function(hits)
    with torch.no_grad():
        for parameter in networks.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    exact = scorer.score(as_reference=True)
    function = networks.function(hits)
    with Following(loaded, description, function).routing():
        routed = scorer.score()
        parts = list(scorer.routes())
    assert np.isfinite(routed.nats).all()
    assert not np.allclose(routed.nats, exact.nats)
    assert np.allclose(scorer.score().nats, exact.nats), "afterwards routers route"
    chosen: dict[LayerKey, Any] = {at: torch.cat([part.experts[at] for part in parts]) for at in spec.moe_layers()}
    assert all((one < spec.moe.n).all() and one.shape[1] == top_k for one in chosen.values())
