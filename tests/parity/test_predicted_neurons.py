"""Only named neurons of an encoder-decoder, in every layout: the model that a conversion measures, in transformers, and
the one that moert runs. tests/parity/test_named_neurons.py has decoders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from random_predictor import add_predictor, random_predictor
from tiny import tiny_switch
from tiny_packs import run_greedy

from moeconv.artifacts import uniform
from moeconv.foresight.neurons import NamedNeurons
from moeconv.packing.emit import Label, emit
from moeconv.packing.packed import PackedModel
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder
from moeconv.source.checkpoint import Checkpoint
from moert.engine.engine import Engine
from moert.pack.codec import F32
from moert.pack.layout import Neurons
from moert.pack.learnt import NeuronPredictor
from moert.pack.reader import Pack

PROMPT = list(range(3, 40))


def packed_with(source: Path, out: Path, bundled: bool) -> tuple[Pack, NeuronPredictor]:
    checkpoint = Checkpoint.open(source)
    coder = ExpertCoder(checkpoint, QUANTIZERS["group"](None), None, neurons=Neurons(512, bundled))
    emit(coder, uniform(checkpoint.spec, 4), out, seed=0, label=Label("tests"))
    predictor = random_predictor(checkpoint.spec)
    return Pack.open(add_predictor(out, predictor)), predictor


def in_transformers(pack: Pack, predictor: NeuronPredictor, written: list[int]) -> F32:
    """Logits of each of these tokens, which followed the prompt."""
    packed = PackedModel.open(pack)
    with (
        torch.inference_mode(),
        packed.calls.during(naming=NamedNeurons(predictor, lambda key: pack.neurons(key).per_block)),
    ):
        begun = [packed.spec.tokens.start, *written[:-1]]
        found: F32 = packed.model(torch.tensor([PROMPT]), decoder_input_ids=torch.tensor([begun])).logits[0].numpy()
    return found


@pytest.mark.parametrize("bundled", [True, False], ids=["bundled", "apart"])
def test_both_programs_compute_the_same_neurons(bundled: bool, tmp_path: Path) -> None:
    pack, predictor = packed_with(tiny_switch(tmp_path / "hf"), tmp_path / "m.pack", bundled)
    logits = {}
    for neurons in ("predicted", "exact"):
        with Engine.open(
            pack.root, cache="60%", kernels="reference", neurons=neurons, notify=lambda note: None
        ) as engine:
            written, logits[neurons] = run_greedy(engine, PROMPT, 8)
            if neurons == "predicted":
                expected = in_transformers(pack, predictor, written)
    np.testing.assert_allclose(logits["predicted"], expected, rtol=0, atol=1e-2)  # keys and values have 16 bits
    assert np.abs(logits["exact"][0] - expected[0]).max() > 5e-2, "all neurons would say something else"
