"""What moert computes of the neurons that a predictor names is what the converter measured, with transformers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_of, tiny_olmoe
from tiny_packs import run_greedy

from moeconv.artifacts import uniform
from moeconv.conversion.additions import NeuronsAsked, train_neurons
from moeconv.conversion.settings import blocks_of
from moeconv.foresight.neurons import NamedNeurons
from moeconv.packing.emit import Label, emit
from moeconv.packing.packed import PackedModel
from moeconv.progress import unseen
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder
from moeconv.source.checkpoint import Checkpoint
from moert.engine.engine import Engine
from moert.pack.learnt import load_predictor
from moert.pack.reader import Pack

WORDS = ["ab", "cde", "fghi", "kl", "mno", "pqrs", "tu", "vwx", "yz", "aeiou"]
NEW = 5


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("family", ["olmoe", "opt"])
def test_logits_are_those_that_were_measured(family: str, bits: int, tmp_path: Path) -> None:
    source = tiny_olmoe(tmp_path / "hf", hidden_act="relu") if family == "olmoe" else tiny_of("opt")(tmp_path / "hf")
    checkpoint, rng = Checkpoint.open(source), random.Random(0)
    coder = ExpertCoder(checkpoint, QUANTIZERS["group"](None), None, neurons=blocks_of(checkpoint.spec, bundled=True))
    emit(coder, uniform(checkpoint.spec, bits), tmp_path / "m.pack", seed=0, label=Label("tests"))
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(" ".join(rng.choice(WORDS) for _ in range(30)) for _ in range(40)))
    asked = NeuronsAsked(calib=str(text), rank=6, missed=0.9, epochs=1, context=32)
    train_neurons(Pack.open(tmp_path / "m.pack"), asked, lambda line: None, unseen)
    pack = Pack.open(tmp_path / "m.pack")
    predictor, packed = load_predictor(pack), PackedModel.open(pack)
    assert predictor is not None
    with Engine.open(
        pack.root, neurons="predicted", cache="60%", kernels="reference", notify=lambda note: None
    ) as engine:
        ids = engine.encode("ab kl mno yz aeiou")
        tokens, logits = run_greedy(engine, ids, NEW)
    read = torch.tensor([[*ids, *tokens[:-1]]])
    with torch.inference_mode():
        exact = packed.model(input_ids=read).logits[0, len(ids) - 1 :].numpy()
        with packed.calls.during(naming=NamedNeurons(predictor, lambda key: pack.neurons(key).per_block)):
            named = packed.model(input_ids=read).logits[0, len(ids) - 1 :].numpy()
    assert np.allclose(logits, named, atol=5e-3)
    assert np.abs(named - exact).max() > 2e-2, "what is not named would be missed"
