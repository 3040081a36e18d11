"""Coded matrices give the numbers that the libraries that wrote them read (golden/codings.py), or an error."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from moeconv.quantizers.source import codes_of_source
from moeconv.source.archs.coding import UnsupportedModel, scheme_of
from moeconv.source.decoded import DecodedTensors
from moeconv.source.decoders import unpacked
from moeconv.source.outline import CheckpointError
from moeconv.source.tensors import Digest, Tensors
from moert.pack.codec import dequantize

FILE = Path(__file__).parents[1] / "golden" / "codings.safetensors"
NAME = "layer.weight"
with safe_open(FILE, "pt") as opened:
    CONFIGS: dict[str, Any] = {name: json.loads(text) for name, text in opened.metadata().items()}
    STORED: dict[str, dict[str, torch.Tensor]] = {name: {} for name in CONFIGS}
    for key in opened.keys():  # noqa: SIM118
        case, _, ending = key.partition(":")
        STORED[case]["layer" + (ending if ending.startswith(".") else f".{ending}")] = opened.get_tensor(key)
EXPECTED = {name: stored.pop("layer.expected") for name, stored in STORED.items()}
ROUNDED = {"nvfp4": 2**-7, "bitsandbytes-int8": 2**-10}
"""Of libraries that compute in bfloat16, or in float16."""


class InMemory(Tensors):
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def fetch(self, name: str, index: int | None = None) -> torch.Tensor:
        return self._tensors[name] if index is None else self._tensors[name][index]

    def digest(self, into: Digest) -> None:
        for name, tensor in sorted(self._tensors.items()):
            into.update(name.encode() + bytes(tensor.flatten().view(torch.uint8).tolist()))


def decoded(name: str, **other: torch.Tensor | None) -> DecodedTensors:
    """Returns the case's tensors decoded, with others in the place of some."""
    scheme = scheme_of(CONFIGS[name])
    assert scheme is not None
    stored = {ending: tensor for ending, tensor in {**STORED[name], **other}.items() if tensor is not None}
    return DecodedTensors(InMemory({**stored, "norm.weight": torch.ones(3)}), scheme)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_matrix_is_what_its_library_reads(name: str) -> None:
    """Libraries multiply in another order, and some in 16 bits: a last bit may differ."""
    tensors = decoded(name)
    assert set(tensors.names) == {NAME, "norm.weight"}
    assert tensors.is_coded(NAME)
    assert set(tensors.parts(NAME)) == STORED[name].keys() - {"layer.weight.input_scale"}
    found = tensors.fetch(NAME)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, EXPECTED[name], rtol=ROUNDED.get(name, 3e-7), atol=0)
    assert torch.equal(tensors.fetch("norm.weight"), torch.ones(3))
    one, other = hashlib.sha256(), hashlib.sha256()
    tensors.digest(one)
    tensors.stored.digest(other)
    assert one.digest() == other.digest()


EVEN = {
    "packed": ("packed", {}, 32),
    "gptq": ("gptq", {"sym": True, "desc_act": False, "bits": 4}, 32),
    "gptq in another order": ("gptq", {"sym": True, "desc_act": True, "bits": 4}, None),
    "gptq with zero points": ("gptq", {"sym": False, "desc_act": False, "bits": 4}, None),
    "gptq with 8 bits": ("gptq", {"sym": True, "desc_act": False, "bits": 8}, None),
    "awq": ("awq", {"zero_point": False}, 32),
    "awq with zero points": ("awq", {}, None),
    "one scale a row": ("gptq", {"sym": True, "desc_act": False, "bits": 4, "group_size": -1}, None),
}


@pytest.mark.parametrize("case", EVEN)
def test_even_groups_of_four_bits_are_known_by_the_settings(case: str) -> None:
    name, changed, group = EVEN[case]
    scheme = scheme_of({**CONFIGS[name], **changed})
    assert scheme is not None
    assert scheme.group == group


def test_packed_codes_are_kept() -> None:
    scale = f"{NAME}_scale"
    found = decoded("packed", **{scale: STORED["packed"][scale].bfloat16()}).fetch(NAME).numpy()
    matrix = codes_of_source(found, 32)
    assert matrix is not None
    np.testing.assert_array_equal(dequantize(matrix), found)
    assert codes_of_source(decoded("packed-zeros").fetch(NAME).numpy(), 32) is None


def test_inputs_in_groups_of_any_order() -> None:
    """As compressed-tensors wrote them up to version 0.13."""
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0)) // 32
    in_turn, apart = decoded("packed"), decoded("packed", **{f"{NAME}_g_idx": order.int()})
    scale = STORED["packed"][f"{NAME}_scale"]
    codes = in_turn.fetch(NAME) / scale.repeat_interleave(32, 1)
    torch.testing.assert_close(apart.fetch(NAME), codes * scale[:, order])
    assert torch.equal(decoded("packed", **{f"{NAME}_g_idx": -torch.ones(128)}).fetch(NAME), in_turn.fetch(NAME))


@given(st.data())
def test_codes_lie_one_after_the_other(data: st.DataObject) -> None:
    bits, count = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 70))
    codes = data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=count, max_size=count))
    whole = sum(code << bits * at for at, code in enumerate(codes))
    words = [whole >> 32 * at & 0xFFFFFFFF for at in range(-(-count * bits // 32))]
    signed = torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32)
    assert unpacked(signed, bits, count).tolist() == codes


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_damaged_tensors_are_refused(name: str) -> None:
    """Each tensor in turn has another shape, or is of numbers that do not fit: an error, or still a matrix."""
    for ending, tensor in STORED[name].items():
        flat = tensor.flatten()
        found = [
            answer(name, ending, other)
            for other in (flat[: len(flat) // 2], flat[:0], tensor[None], torch.zeros(3, 5), torch.zeros(7, 7, 7))
        ]
        assert not all(found) or ending.endswith("input_scale")


def test_scales_of_mxfp8_are_powers_of_two() -> None:
    """In bytes, one for each 32 inputs; the settings may name their maker alone."""
    chance = torch.Generator().manual_seed(0)
    codes = torch.randn(6, 64, generator=chance).to(torch.float8_e4m3fn)
    powers = torch.randint(110, 140, (6, 2), generator=chance, dtype=torch.uint8)
    scheme = scheme_of({"producer": {"name": "modelopt"}, "config_groups": {}, "quant_algo": "MXFP8"})
    assert scheme is not None
    found = DecodedTensors(InMemory({NAME: codes, f"{NAME}_scale": powers}), scheme).fetch(NAME)
    expected = torch.ldexp(codes.float().reshape(6, 2, 32), powers[:, :, None].int() - 127)
    assert torch.equal(found, expected.reshape(6, 64))


def answer(name: str, ending: str, other: torch.Tensor) -> bool:
    """Returns whether a matrix comes out, with another tensor in the place of one; checks that an error is one line."""
    try:
        return decoded(name, **{ending: other}).fetch(NAME).dim() == 2
    except CheckpointError as error:
        return bool(re.search("\n", str(error)))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("gptq", "should be an object"),
        ({"quant_method": "hqq"}, "known are gptq, awq"),
        ({"quant_method": ["gptq"]}, "known are gptq"),
        ({"bits": 4}, "known are gptq"),
        ({"quant_method": "gptq", "bits": 5}, "bits 5 is not 2 or 3 or 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "layout 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 8}, "bits 8 is not 4"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:exllamav2"}, "packing_format"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "two whole numbers"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
            "a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A8_AWQ"}}}, "quant_algo 'W4A8_AWQ'"),
        ({**CONFIGS["packed"], "config_groups": {}}, "none of its config_groups"),
        ({**CONFIGS["packed"], "config_groups": [1]}, "object of objects"),
        ({**CONFIGS["packed"], "config_groups": {"a": {"weights": {"num_bits": 5}}}}, "num_bits 5"),
        ({**CONFIGS["packed"], "format": "marlin-24"}, "format 'marlin-24'"),
        ({**CONFIGS["packed"], "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is set"),
        ({**CONFIGS["packed"], "transform_config": {"config_groups": {}}}, "transform_config is set"),
    ],
)  # fmt: skip
def test_other_codings_are_refused_by_name(config: Any, named: str) -> None:
    with pytest.raises(UnsupportedModel, match="weights are coded by") as caught:
        scheme_of(config)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_coding() -> None:
    assert scheme_of(None) is None
    assert scheme_of({}) is None
