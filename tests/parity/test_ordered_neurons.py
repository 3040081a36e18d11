"""Neurons in another order: the same model, in transformers and in moert, and its checkpoint is found in the pack."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from random_predictor import add_predictor, random_predictor
from tiny import tiny_of, tiny_olmoe, tiny_switch
from tiny_packs import run_greedy

from moeconv.artifacts import uniform
from moeconv.conversion.taught import placed
from moeconv.errors import VerifyFailed
from moeconv.foresight.neurons import NamedNeurons
from moeconv.order import NeuronOrder, load_order
from moeconv.packing.emit import Label, emit
from moeconv.packing.packed import PackedModel, verify
from moeconv.quantizers import QUANTIZERS
from moeconv.quantizers.coder import ExpertCoder
from moeconv.source.checkpoint import Checkpoint
from moeconv.writer import add_to_pack
from moert.command.description import describe, description_lines
from moert.engine.engine import Engine
from moert.pack.codec import F32
from moert.pack.layout import Neurons
from moert.pack.learnt import ORDER, NeuronPredictor
from moert.pack.reader import Pack
from tests.unit.test_emit import Killed, Rounding

FAMILIES = {
    "switch": tiny_switch, "gated": lambda path: tiny_olmoe(path, hidden_act="relu"), "dense": tiny_of("opt"),
}  # fmt: skip
LAYOUTS = {"columns": Neurons(512, bundled=False, together=True), "neuron": Neurons(512, bundled=True)}
PROMPT, NEW = list(range(3, 30)), 6


@pytest.fixture(scope="module", params=FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(FAMILIES[request.param](tmp_path_factory.mktemp(request.param) / "hf"))


def order_of(checkpoint: Checkpoint, seed: int = 0) -> NeuronOrder:
    rng, moe = np.random.default_rng(seed), checkpoint.spec.moe
    shape = moe.n, moe.ffn.d_ff
    return NeuronOrder(
        {at: rng.permuted(np.tile(np.arange(shape[1], dtype=np.uint32), (shape[0], 1)), axis=1)
         for at in checkpoint.spec.moe_layers()}
    )  # fmt: skip


def written(
    checkpoint: Checkpoint, out: Path, order: NeuronOrder | None, layout: str = "columns", bits: int = 8
) -> Pack:  # fmt: skip
    coder = ExpertCoder(checkpoint, QUANTIZERS["group"](None), None, neurons=LAYOUTS[layout])
    emit(coder, uniform(checkpoint.spec, bits), out, seed=0, label=Label("tests"), order=order)
    return Pack.open(out)


def in_moert(pack: Pack, tokens: list[int] | None = None, neurons: str = "exact") -> tuple[list[int], F32]:
    """What is written behind the prompt, and its logits; `tokens` are read in its place."""
    with Engine.open(
        pack.root, cache="60%", kernels="reference", neurons=neurons, notify=lambda note: None
    ) as engine:  # fmt: skip
        if tokens is None:
            return run_greedy(engine, PROMPT, NEW)
        engine.reserve(len(PROMPT), len(tokens))
        state, logits = engine.model.prefill(PROMPT)
        rows = [logits, *(engine.model.step(state, token) for token in tokens[:-1])]
        return tokens, np.stack(rows)


def in_transformers(pack: Pack, tokens: list[int], naming: NamedNeurons | None = None) -> F32:
    """Logits of each of these tokens, which followed the prompt."""
    packed = PackedModel.open(pack)
    with torch.inference_mode(), nullcontext() if naming is None else packed.calls.during(naming=naming):
        if packed.spec.encoder is None:
            read = torch.tensor([[*PROMPT, *tokens[:-1]]])
            found: F32 = packed.model(input_ids=read).logits[0, len(PROMPT) - 1 :].numpy()
        else:
            begun = torch.tensor([[packed.spec.tokens.start, *tokens[:-1]]])
            found = packed.model(torch.tensor([PROMPT]), decoder_input_ids=begun).logits[0].numpy()
    return found


@pytest.mark.parametrize("bits", [3, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_the_same_model(source: Checkpoint, tmp_path: Path, layout: str, bits: int) -> None:
    plain = written(source, tmp_path / "plain", None, layout, bits)
    ordered = written(source, tmp_path / "ordered", order_of(source), layout, bits)
    assert ordered.manifest.minor == plain.manifest.minor
    assert [entry.tensor_bytes for entry in ordered.manifest.experts] == [
        entry.tensor_bytes for entry in plain.manifest.experts
    ]
    assert all(ordered.entry(key).sha256 != plain.entry(key).sha256 for key in source.spec.expert_keys())
    tokens, logits = in_moert(plain)
    _, others = in_moert(ordered, tokens)
    np.testing.assert_allclose(others, logits, rtol=0, atol=2e-3)
    np.testing.assert_allclose(in_transformers(ordered, tokens), in_transformers(plain, tokens), rtol=0, atol=1e-4)
    found = verify(ordered, source).worst
    assert found is not None
    assert found == pytest.approx(verify(plain, source).worst, rel=1e-3)


def test_a_predictor_in_the_same_order_names_the_same(source: Checkpoint, tmp_path: Path) -> None:
    """What is measured of the unordered model in blocks of the order is what the ordered pack computes."""
    order, predictor = order_of(source), random_predictor(source.spec)
    mine: NeuronPredictor = placed(predictor, order)
    plain = written(source, tmp_path / "plain", None, "neuron")
    ordered = written(source, tmp_path / "ordered", order, "neuron")
    add_predictor(ordered.root, mine)

    def per_block(pack: Pack) -> NamedNeurons:
        return NamedNeurons(mine, lambda key: pack.neurons(key).per_block)

    opened = Pack.open(ordered.root)
    tokens, logits = in_moert(opened, neurons="predicted")
    measured = in_transformers(
        plain, tokens, NamedNeurons(predictor, lambda key: plain.neurons(key).per_block, order)
    )  # fmt: skip
    np.testing.assert_allclose(in_transformers(opened, tokens, per_block(opened)), measured, rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits, measured, rtol=0, atol=1e-2)  # keys and values have 16 bits
    assert np.abs(in_transformers(plain, tokens) - measured).max() > 5e-2, "all neurons would say something else"
    assert placed(predictor, None) is predictor


def test_its_checkpoint_is_found_in_it_by_the_order_alone(source: Checkpoint, tmp_path: Path) -> None:
    ordered = written(source, tmp_path / "p", order_of(source))
    found = load_order(ordered)
    assert found is not None
    assert found.to_bytes() == order_of(source).to_bytes()
    add_to_pack(ordered.root, ordered.manifest, ORDER, order_of(source, seed=1).to_bytes())
    verify(Pack.open(ordered.root), None)
    with pytest.raises(VerifyFailed, match="times what its width allows"):
        verify(Pack.open(ordered.root), source)


def test_a_killed_run_goes_on_with_the_same_order_alone(source: Checkpoint, tmp_path: Path) -> None:
    class Sideways(Rounding):
        def columns(self, weights, bits, inputs):  # type: ignore[no-untyped-def]
            return self.quantize(np.ascontiguousarray(weights.transpose(0, 2, 1)), bits, inputs)

    widths = uniform(source.spec, 4)
    count = len(source.spec.moe.ffn.projections) * len(widths)

    def write(quantizer: Sideways, out: Path, seed: int | None) -> None:
        coder = ExpertCoder(source, quantizer, None, neurons=LAYOUTS["columns"])
        order = None if seed is None else order_of(source, seed)
        emit(coder, widths, out, seed=0, label=Label("tests"), order=order)

    for seed in (0, 1, None):
        out, again = tmp_path / f"{seed}", Sideways()
        with pytest.raises(Killed):
            write(Sideways(most=count - 1), out, 0)
        write(again, out, seed)
        assert (again.calls < count) == (seed == 0)
        assert (out / ORDER).exists() == (seed is not None)
        write(Sideways(), tmp_path / f"whole {seed}", seed)
        for path in out.rglob("*.safetensors"):
            assert path.read_bytes() == (tmp_path / f"whole {seed}" / path.relative_to(out)).read_bytes()


def test_info_says_it(source: Checkpoint, tmp_path: Path) -> None:
    for name, order, said in (
        ("a", order_of(source), "in the order in which they fire"), ("b", None, "in the order of the source"),
    ):  # fmt: skip
        pack = written(source, tmp_path / name, order)
        assert describe(pack)["neurons"]["ordered"] == (order is not None)
        [line] = [line for line in description_lines(pack) if line.startswith("neurons")]
        assert line.endswith(said)
