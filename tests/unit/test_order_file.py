"""order.safetensors: what is written is read, what is no order is refused, and experts in an order compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damaged import damaged
from hypothesis import given, settings
from hypothesis import strategies as st
from random_packs import FIRING, NEURON_SPECS, QUANTIZATION, flat, random_biases, random_expert, write_pack

from moeconv.order import NeuronOrder, load_order
from moeconv.writer import add_to_pack
from moert.pack.codec import QuantizedMatrix
from moert.pack.errors import FormatTooNew, HashMismatch, HeaderInvalid, PackError
from moert.pack.layout import U32, Neurons
from moert.pack.learnt import ORDER
from moert.pack.model_spec import LayerKey, ModelSpec
from moert.pack.reader import Pack
from moert.pack.tensors import to_bytes

FIRST, SECOND = LayerKey("encoder", 1), LayerKey("decoder", 0)
BLOCKS = replace(QUANTIZATION, neurons=Neurons(512, bundled=False, together=True))


def shuffled(experts: int, d_ff: int, seed: int = 0) -> U32:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(d_ff) for _ in range(experts)]).astype(np.uint32)


def random_order(spec: ModelSpec, seed: int = 0) -> NeuronOrder:
    moe = spec.moe
    return NeuronOrder({at: shuffled(moe.n, moe.ffn.d_ff, seed + n) for n, at in enumerate(spec.moe_layers())})


def pair(**changes: Any) -> dict[str, Any]:
    """Tensors of two layers; `changes` of the second."""
    return {str(FIRST): shuffled(3, 8), str(SECOND): shuffled(3, 8, 1), **changes}


def body(tensors: Mapping[str, Any], version: int = 1) -> bytes:
    return to_bytes(tensors, {"format": "model.pack order", "version": version})


def test_what_is_written_is_read() -> None:
    order = NeuronOrder({FIRST: shuffled(3, 8), SECOND: shuffled(3, 8, 1)})
    assert order.to_bytes() == body(pair())
    found = NeuronOrder.from_bytes(order.to_bytes())
    assert list(found.layers) == [FIRST, SECOND]
    assert found.to_bytes() == order.to_bytes()
    assert found.digest == order.digest
    assert found.of(SECOND.expert(2)).tolist() == order.layers[SECOND][2].tolist()


def changed(row: int, place: int, value: int) -> U32:
    rows = shuffled(3, 8, 1)
    rows[row, place] = value
    return rows


WRONG: dict[str, tuple[Any, str]] = {
    "a neuron twice": (changed(1, 2, int(shuffled(3, 8, 1)[1, 3])), "D00 should name each neuron of an expert once"),
    "a neuron that is not there": (changed(2, 0, 8), "D00 should name each neuron of an expert once"),
    "a number far beyond": (changed(0, 7, (1 << 32) - 1), "D00 should name each neuron of an expert once"),
    "of another row": (np.roll(shuffled(3, 8, 1), 1, axis=1) + np.uint32(1), "D00 should name each neuron"),
    "other numbers": (shuffled(3, 8, 1).astype(np.int32), "D00 should be uint32 with 2"),
    "one row": (shuffled(1, 8)[0], "D00 should be uint32 with 2, found U32 with 1 dimensions"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_order_is_refused(name: str) -> None:
    rows, said = WRONG[name]
    with pytest.raises(HeaderInvalid, match=said):
        NeuronOrder.from_bytes(body(pair(D00=rows)))


def test_what_does_not_belong_there() -> None:
    for name in ("other", "D0", "X00", "D00.order", "D007"):
        with pytest.raises(HeaderInvalid, match="does not belong there"):
            NeuronOrder.from_bytes(body(pair(**{name: shuffled(3, 8), "D07": shuffled(3, 8)})))
    with pytest.raises(HeaderInvalid, match="has no layer"):
        NeuronOrder.from_bytes(body({}))
    with pytest.raises(FormatTooNew, match="version 2"):
        NeuronOrder.from_bytes(body(pair(), version=2))
    with pytest.raises(HeaderInvalid, match="convert the model again"):
        NeuronOrder.from_bytes(b"\0" * 64)


@given(st.data())
@settings(max_examples=300)
def test_damage_is_refused_or_harmless(data: st.DataObject) -> None:
    try:
        found = NeuronOrder.from_bytes(damaged(body(pair()), data))
    except (HeaderInvalid, FormatTooNew) as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        for rows in found.layers.values():
            assert (np.sort(rows, axis=1) == np.arange(rows.shape[1])).all()


@given(st.integers(0, 400))
def test_a_file_that_is_cut_is_refused(length: int) -> None:
    whole = body(pair())
    with pytest.raises(HeaderInvalid):
        NeuronOrder.from_bytes(whole[: min(length, len(whole) - 1)])


def test_the_order_of_a_pack(tmp_path: Path) -> None:
    path, order = tmp_path / "p", random_order(FIRING)
    write_pack(path, FIRING, BLOCKS)
    assert load_order(Pack.open(path)) is None

    def told(made: bytes) -> NeuronOrder | None:
        add_to_pack(path, Pack.open(path).manifest, ORDER, made)
        return load_order(Pack.open(path))

    found = told(order.to_bytes())
    assert found is not None
    assert found.to_bytes() == order.to_bytes()
    d_ff = FIRING.moe.ffn.d_ff
    for layers, said in (
        ({at: rows for at, rows in order.layers.items() if at.layer}, r"D00 has \(experts, d_ff\) None"),
        ({**order.layers, LayerKey("decoder", 1): shuffled(FIRING.moe.n, d_ff)}, "D01 has .* in the model None"),
        ({at: shuffled(FIRING.moe.n + 1, d_ff) for at in order.layers}, r"D00 has \(experts, d_ff\) \(5, 75\)"),
        ({at: shuffled(FIRING.moe.n, d_ff - 1) for at in order.layers}, r"D00 has \(experts, d_ff\) \(4, 74\)"),
    ):  # fmt: skip
        with pytest.raises(HeaderInvalid, match=said):
            told(NeuronOrder(layers).to_bytes())
    cut = order.to_bytes()[:-4]
    with pytest.raises(HeaderInvalid, match=f"{ORDER}: is not a safetensors file"):
        told(cut)
    assert told(order.to_bytes()) is not None
    broken = bytearray((path / ORDER).read_bytes())
    broken[-1] ^= 1
    (path / ORDER).write_bytes(broken)
    with pytest.raises(HashMismatch, match=ORDER):
        load_order(Pack.open(path))
    (path / ORDER).unlink()
    with pytest.raises(PackError, match=ORDER):
        Pack.open(path)


def test_experts_that_do_not_lie_by_neurons_have_none(tmp_path: Path) -> None:
    write_pack(tmp_path / "p", FIRING)
    add_to_pack(tmp_path / "p", Pack.open(tmp_path / "p").manifest, ORDER, random_order(FIRING).to_bytes())
    with pytest.raises(HeaderInvalid, match="experts do not lie by neurons"):
        load_order(Pack.open(tmp_path / "p"))


@pytest.mark.parametrize("family", NEURON_SPECS)
def test_each_neuron_takes_all_that_is_its_own_along(family: str) -> None:
    spec = NEURON_SPECS[family]
    order = random_order(spec)
    for key in spec.expert_keys():
        matrices, biases = random_expert(spec, key, 4, neurons=True), random_biases(spec, key)
        moved, moved_biases = order.placed(key, matrices, biases)
        back = NeuronOrder({at: np.argsort(rows, axis=1).astype(np.uint32) for at, rows in order.layers.items()})
        again, again_biases = back.placed(key, moved, moved_biases)
        assert {name: flat(part) for name, part in again.items()} == {n: flat(part) for n, part in matrices.items()}
        assert all(np.array_equal(again_biases[name], bias) for name, bias in biases.items())
        assert list(moved) == list(matrices)
        for place, neuron in enumerate(order.of(key).tolist()):
            for name, matrix in matrices.items():
                one = moved[name]
                if isinstance(matrix, QuantizedMatrix):
                    assert isinstance(one, QuantizedMatrix)
                    for part in ("qweight", "scale", "minimum"):
                        assert np.array_equal(getattr(one, part)[place], getattr(matrix, part)[neuron])
                else:
                    assert np.array_equal(one[place], matrix[neuron])
            assert all(moved_biases[n][place] == bias[neuron] for n, bias in biases.items() if n != "down")
        assert not biases or np.array_equal(moved_biases["down"], biases["down"])
