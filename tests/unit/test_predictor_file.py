"""predictor.safetensors: what is written is read, and what contradicts itself is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damaged import damaged
from hypothesis import given, settings
from hypothesis import strategies as st
from random_predictor import add_predictor, random_layer, random_predictor
from tiny_packs import SPECS, write_pack

from moert.pack.errors import FormatTooNew, HashMismatch, HeaderInvalid
from moert.pack.learnt import PREDICTOR, Kept, NeuronPredictor, PredictedLoss, load_predictor
from moert.pack.model_spec import LayerKey
from moert.pack.reader import Pack
from moert.pack.tensors import to_bytes

FIRST, SECOND = LayerKey("encoder", 1), LayerKey("decoder", 0)


def pair(**changes: Any) -> NeuronPredictor:
    """Of two layers; `changes` of the second."""
    layers = {FIRST: random_layer(6, 3, 8), SECOND: replace(random_layer(6, 3, 8, seed=1), **changes)}
    return NeuronPredictor(layers, 0.05, 4, PredictedLoss(0.02, 0.01, 0.03))


def test_what_is_written_is_read() -> None:
    predictor = pair()
    body = predictor.to_bytes()
    found = NeuronPredictor.from_bytes(body)
    assert found.to_bytes() == body
    assert (list(found.layers), found.rank) == ([FIRST, SECOND], 3)
    assert (found.missed, found.per_block, found.loss) == (0.05, 4, predictor.loss)
    for at, layer in predictor.layers.items():
        assert found.layers[at].kept == layer.kept
        for (name, made), (_, read) in zip(layer.tensors(), found.layers[at].tensors(), strict=True):
            assert np.array_equal(made, read), name
    assert NeuronPredictor.from_bytes(replace(predictor, loss=None).to_bytes()).loss is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bias": np.zeros((3, 7), np.float32)}, r"D00.bias should be of shape \(3, 8\), found \(3, 7\)"),
        ({"bias": np.zeros((3, 8), np.float16)}, "D00.bias should be float32"),
        ({"compress": np.full((3, 6), np.nan, np.float16)}, "D00.compress should be finite"),
        ({"compress": np.zeros((2, 6), np.float16)}, r"D00.compress should be of shape \(3, 6\)"),
        ({"compress": np.zeros((3, 0), np.float16)}, "D00.compress should be"),
        ({"heads": np.zeros((3, 8, 2), np.float16)}, r"D00.heads should be of shape \(3, 8, 3\)"),
        ({"threshold": np.zeros(2, np.float32)}, "D00.threshold should be"),
        ({"threshold": np.full(3, -np.inf, np.float32)}, "D00.threshold should be finite"),
        ({"kept": Kept(0.5, 1.5, 0.5)}, "D00.kept should be three shares"),
    ],
)
def test_what_contradicts_itself_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(HeaderInvalid, match=said):
        NeuronPredictor.from_bytes(pair(**change).to_bytes())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"missed": 1.5}, "missed should be a share"),
        ({"missed": float("nan")}, "missed should be finite"),
        ({"loss": PredictedLoss(0.1, float("inf"), 0.2)}, "loss should be finite"),
        ({"per_block": 0}, "per_block should be a number from 1"),
    ],
)
def test_what_belongs_to_no_layer_is_checked_too(change: dict[str, Any], said: str) -> None:
    with pytest.raises(HeaderInvalid, match=said):
        NeuronPredictor.from_bytes(replace(pair(), **change).to_bytes())


def with_tensors(*names: str, version: int = 1) -> bytes:
    """A predictor that has other tensors beside its own."""
    tensors: dict[str, Any] = {f"{FIRST}.{part}": array for part, array in pair().layers[FIRST].tensors()}
    tensors |= {name: np.zeros((3, 6), np.float16) for name in names} | {"missed": np.zeros(1)}
    return to_bytes(tensors, {"version": version, "rank": 3, "per_block": 1})


def test_what_does_not_belong_there() -> None:
    assert list(NeuronPredictor.from_bytes(with_tensors()).layers) == [FIRST]
    for name in ("other", "E001.compress", "E01.heads.weight", "X01.compress", "E1.compress"):
        with pytest.raises(HeaderInvalid, match="does not belong there"):
            NeuronPredictor.from_bytes(with_tensors(name))
    with pytest.raises(HeaderInvalid, match=r"lacks the tensor D07\.heads"):
        NeuronPredictor.from_bytes(with_tensors("D07.compress"))
    with pytest.raises(HeaderInvalid, match="has no layer"):
        NeuronPredictor.from_bytes(to_bytes({"missed": np.zeros(1)}, {"version": 1, "rank": 3, "per_block": 1}))
    with pytest.raises(FormatTooNew, match="version 2"):
        NeuronPredictor.from_bytes(with_tensors(version=2))
    with pytest.raises(HeaderInvalid, match=r"train the predictor of this pack's neurons again"):
        NeuronPredictor.from_bytes(b"\0" * 64)


@given(st.data())
@settings(max_examples=300)
def test_damage_is_refused_or_harmless(data: st.DataObject) -> None:
    body = damaged(pair().to_bytes(), data)
    try:
        found = NeuronPredictor.from_bytes(body)
    except (HeaderInvalid, FormatTooNew) as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert all(np.isfinite(part).all() for layer in found.layers.values() for _, part in layer.tensors())


def test_the_predictor_of_a_pack(tmp_path: Path) -> None:
    spec = next(iter(SPECS.values()))
    path = write_pack(tmp_path / "some.pack", spec, paths=False)
    assert load_predictor(Pack.open(path)) is None
    made = random_predictor(spec)
    found = load_predictor(Pack.open(add_predictor(path, made)))
    assert found is not None
    assert found.to_bytes() == made.to_bytes()

    add_predictor(path, pair())
    with pytest.raises(HeaderInvalid, match=f"{PREDICTOR}: D00 has"):
        load_predictor(Pack.open(path))

    body = bytearray((path / PREDICTOR).read_bytes())
    body[-1] ^= 1
    (path / PREDICTOR).write_bytes(body)
    with pytest.raises(HashMismatch, match=PREDICTOR):
        load_predictor(Pack.open(path))
