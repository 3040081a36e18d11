"""hash.safetensors: what is written is read, and what contradicts itself is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from damaged import damaged
from hypothesis import given, settings
from hypothesis import strategies as st
from random_hash import random_stack

from moert.pack.errors import FormatTooNew, HeaderInvalid
from moert.pack.learnt import HashFunction, RoutedLoss


def pair() -> HashFunction:
    encoder = random_stack(8, 6, 2, 4, both_ways=True, encoded=False)
    decoder = random_stack(6, 6, 3, 4, both_ways=False, encoded=False)
    return HashFunction(4, {"encoder": encoder, "decoder": replace(decoder)}, RoutedLoss(1, 0.02, 0.01, 0.03))


def test_what_is_written_is_read() -> None:
    function = pair()
    body = function.to_bytes()
    found = HashFunction.from_bytes(body)
    assert found.to_bytes() == body
    assert found.routed == function.routed
    assert list(found.stacks) == ["encoder", "decoder"]
    assert np.array_equal(found.stacks["encoder"].lstm[1][1].recurrent, function.stacks["encoder"].lstm[1][1].recurrent)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head_bias": np.zeros((3, 5), np.float16)}, r"heads.bias should be of shape \(3, 4\)"),
        ({"compress": np.full((6, 6), np.nan, np.float16)}, "compress.weight should be finite"),
        ({"hits": np.full((3, 2), 1.5, np.float32)}, "two shares for each layer"),
        ({"hits": np.full((2, 2), 0.5, np.float32)}, "two shares for each layer"),
        ({"compress_bias": np.zeros(5, np.float16)}, "compress.bias should be"),
        ({"own": {"query": np.zeros((6, 6), np.float16)}}, "lacks the tensor decoder.own.key.weight"),
    ],
)
def test_what_contradicts_itself_is_refused(change: dict[str, Any], said: str) -> None:
    function = pair()
    stack = replace(function.stacks["decoder"], **change)
    body = HashFunction(4, {"decoder": stack}).to_bytes()
    with pytest.raises(HeaderInvalid, match=said):
        HashFunction.from_bytes(body)


def test_bytes_that_are_no_file_and_a_decoder_that_is_read_backward() -> None:
    stack = random_stack(8, 6, 2, 4, both_ways=True, encoded=False)
    with pytest.raises(HeaderInvalid, match="read backward"):
        HashFunction.from_bytes(HashFunction(4, {"decoder": stack}).to_bytes())
    with pytest.raises(HeaderInvalid, match=r"train the hash function of this pack again"):
        HashFunction.from_bytes(b"\0" * 64)


@given(st.data())
@settings(max_examples=300)
def test_damage_is_refused_or_harmless(data: st.DataObject) -> None:
    body = damaged(pair().to_bytes(), data)
    try:
        found = HashFunction.from_bytes(body)
    except (HeaderInvalid, FormatTooNew) as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert all(np.isfinite(part).all() for stack in found.stacks.values() for _, part in stack.tensors())
