"""Tensors of a checkpoint in the forms in which families store them."""

from __future__ import annotations

import pytest
import torch

from moeconv.source.archs.config import ShapeDiffers
from moeconv.source.archs.description import Source, View, halves, in_turn, of_heads, rows, transposed

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
    turned = Source("fused", 0, in_turn(transposed, rows(1, None, 2)), (6, 4))
    assert torch.equal(turned.read(fetch, (2, 6)), whole[0].T[1::2])
    assert torch.equal(Source("fused", 0, factor=0.5).read(fetch, (6, 4)), whole[0] / 2)


@pytest.mark.parametrize("source", [Source("fused", 1), Source("fused", 1, rows(3), (4, 6))])
def test_another_shape_is_refused(source: Source) -> None:
    with pytest.raises(ShapeDiffers, match=r"fused has the shape \(6, 4\)"):
        source.read(fetch, (3, 4))


@pytest.mark.parametrize("view", [rows(2, 5), transposed, of_heads(3, 1), halves(3), halves(1, 2), rows(0, None, 2)])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_what_is_written_is_what_is_read(view: View, factor: float) -> None:
    """And the rest stays as it is."""
    tensor = torch.randn(12, 5)
    before, shape = tensor.clone(), (view(tensor).numel() // 5, 5)
    source = Source("t", None, view, (12, 5), factor)
    weight = torch.randn(shape)
    source.write(tensor, weight)
    assert torch.allclose(source.read(lambda _name, _index: tensor, shape), weight)
    changed = torch.zeros(12, 5)
    source.write(changed, torch.ones(shape))
    assert torch.equal(tensor[changed == 0], before[changed == 0])


def test_pairs_become_halves() -> None:
    features = torch.arange(2 * 6)[:, None]
    source = Source("t", None, halves(2), (12, 1))
    found = source.read(lambda _name, _index: features, (12, 1))[:, 0].tolist()
    assert found == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_what_is_there_is_asked_for() -> None:
    with pytest.raises(KeyError, match="other"):
        Source("other").read(fetch, (1,))


def test_zeros_follow_where_a_pack_has_more_room() -> None:
    stored = STORED["fused"][0].clone()  # [6, 4]: two heads of three rows
    source = Source("fused", 0, of_heads(2), (6, 4), factor=2.0, room=(1, 5))
    found = source.read(fetch, (10, 4)).reshape(2, 5, 4)
    assert torch.equal(found[:, :3].reshape(6, 4), 2 * stored)
    assert not found[:, 3:].any()
    written = torch.zeros(1, 6, 4)
    source.write(written, found.reshape(10, 4))
    assert torch.equal(written[0], stored)


def test_a_matrix_may_lie_either_way() -> None:
    whole = STORED["fused"][0]
    assert torch.equal(Source("fused", 0, either=True).read(fetch, (4, 6)), whole.T)
    assert torch.equal(Source("fused", 0, either=True).read(fetch, (6, 4)), whole)
    with pytest.raises(ShapeDiffers):
        Source("fused", 0, either=True).read(fetch, (3, 8))


def test_tensors_may_follow_one_another() -> None:
    first, second = STORED["fused"][0], STORED["fused"][1] + 100
    both = {"first": first, "second": second}
    source = Source("first", None, rows(3), (6, 4), behind=("second",))
    assert torch.equal(source.read(lambda name, _: both[name], (6, 4)), torch.cat([first[3:], second[3:]]))
    with pytest.raises(ShapeDiffers, match="second has the shape"):
        source.read(lambda name, _: both[name][: 6 if name == "first" else 5], (6, 4))
