"""Tensors of a checkpoint in the forms in which families store them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeconv.source.archs.source import ShapeDiffers, Source
from moeconv.source.archs.views import in_turn, rows, transposed

STORED = {
    "fused": torch.arange(48.0).reshape(2, 6, 4),
    "w": torch.randn(200, 300, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn),
    "w_scale_inv": torch.tensor([[1.0, 2.0, 0.5], [0.25, 4.0, 8.0]]),
    "m_blocks": torch.randint(0, 256, (3, 5, 2, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)),
    "m_scales": torch.randint(120, 134, (3, 5, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)),
}


def fetch(name: str, index: int | None) -> torch.Tensor:
    return STORED[name] if index is None else STORED[name][index]


def test_a_part_of_a_fused_tensor() -> None:
    whole = STORED["fused"]
    assert torch.equal(Source("fused").read(fetch, (2, 6, 4)), whole)
    assert torch.equal(Source("fused", 1).read(fetch, (6, 4)), whole[1])
    assert torch.equal(Source("fused", 1, rows(3), (6, 4)).read(fetch, (3, 4)), whole[1, 3:])
    turned = in_turn(transposed, rows(1, None, 2))
    assert torch.equal(Source("fused", 0, turned, (6, 4)).read(fetch, (2, 6)), whole[0].T[1::2])
    with pytest.raises(ShapeDiffers, match=r"fused has the shape \(6, 4\), config.json implies \(5, 4\)"):
        Source("fused", 1).read(fetch, (5, 4))


def test_blocks_of_fp8_have_a_scale_each() -> None:
    source = Source("w", form="fp8 blocks")
    assert source.names == ("w", "w_scale_inv")
    found = source.read(fetch, (200, 300))
    for row, column in ((0, 0), (127, 299), (128, 128), (199, 255), (199, 256)):
        scale = STORED["w_scale_inv"][row // 128, column // 128]
        assert found[row, column] == STORED["w"][row, column].float() * scale


@given(row=st.integers(0, 4), column=st.integers(0, 63), expert=st.integers(0, 2))
def test_four_bits_with_powers_of_two(row: int, column: int, expert: int) -> None:
    source = Source("m", expert, form="mxfp4")
    assert source.names == ("m_blocks", "m_scales")
    group, place = divmod(column, 32)
    byte = int(STORED["m_blocks"][expert, row, group, place // 2])
    code = byte >> 4 if place % 2 else byte & 15
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    expected = (-magnitude if code & 8 else magnitude) * 2.0 ** (int(STORED["m_scales"][expert, row, group]) - 127)
    assert source.read(fetch, (5, 64))[row, column] == expected


def test_what_is_there_is_asked_for() -> None:
    with pytest.raises(KeyError, match="other"):
        Source("other").read(fetch, (1,))
