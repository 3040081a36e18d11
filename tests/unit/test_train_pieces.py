"""The training code's own arithmetic against plain formulas, at small and uneven shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("transformers")

from recipes.train import attention, grouped, muon
from recipes.train.cross import ChunkedCross
from recipes.train.kneser_ney import KneserNey


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((found - expected).detach().norm() / expected.detach().norm())


def plain_experts(x, scores, index, up, down, gated):
    """Every expert on every token, then the chosen ones."""
    wide = torch.einsum("td,eud->teu", x, up)
    hidden = F.silu(wide.chunk(2, -1)[0]) * wide.chunk(2, -1)[1] if gated else F.relu(wide)
    out = torch.einsum("teh,edh->ted", hidden, down)
    return (out.gather(1, index[..., None].expand(-1, -1, x.shape[1])) * scores[..., None]).sum(1)


@pytest.mark.parametrize(("k", "gated"), [(1, False), (3, True)])
def test_grouped_experts_equal_all_experts_with_gradients(k: int, gated: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(37, 24, requires_grad=True)
    up = torch.randn(5, 32 if gated else 16, 24, requires_grad=True)
    down = torch.randn(5, 24, 16, requires_grad=True)
    scores = torch.rand(37, k, requires_grad=True)
    index = torch.rand(37, 4).topk(k, -1).indices  # the last expert gets no token
    inputs, weight = (x, scores, up, down), torch.randn(37, 24)
    found = grouped.GroupedExperts.apply(x, scores, index, up, down, gated)
    expected = plain_experts(x, scores, index, up, down, gated)
    assert relative(found, expected) < 0.02
    pairs = zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    )
    assert all(relative(one, other) < 0.02 for one, other in pairs)


def test_places_are_distinct_and_within_their_experts_slice() -> None:
    flat = torch.tensor([2, 0, 2, 2, 4, 0])
    places, bounds = grouped.layout(flat, 5)
    assert len(set(places.tolist())) == len(flat)
    assert all(bounds[e] <= p < bounds[e + 1] for e, p in zip(flat.tolist(), places.tolist(), strict=True))
    assert bounds[1] - bounds[0] == grouped.ROUND_ROWS
    assert bounds[2] == bounds[1]


def test_balance_loss_is_one_when_even_and_ignores_masked_tokens() -> None:
    even = torch.full((8, 4), 0.25)
    index = torch.arange(8).remainder(4)[:, None]
    assert float(grouped.balance_loss(even, index, None)[0]) == pytest.approx(1.0)
    mask = torch.arange(8) < 4
    index[4:] = 0
    assert grouped.balance_loss(even, index, mask)[1].tolist() == [0.25] * 4


def test_sliced_attention_equals_softmax_attention_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "PIECE", 100)  # several pieces
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, n, 8, requires_grad=True) for n in (5, 7, 7))
    bias = torch.randn(1, 2, 5, 7, requires_grad=True)
    mask = torch.zeros(3, 1, 1, 7)
    mask[1, ..., 4:] = torch.finfo(torch.float32).min
    found = attention.SlicedAttention.apply(q, k, v, bias, mask, 0.5)
    expected = (q @ k.mT * 0.5 + bias + mask).softmax(-1) @ v
    assert relative(found, expected) < 0.02
    weight = torch.randn_like(expected)
    pairs = zip(
        torch.autograd.grad((found * weight).sum(), (q, k, v, bias)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v, bias)),
        strict=True,
    )
    assert all(relative(one, other) < 0.03 for one, other in pairs)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_chunked_cross_has_the_gradient_of_cross_entropy(smoothing: float) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(19, 12, requires_grad=True), torch.randn(31, 12, requires_grad=True)
    labels = torch.randint(31, (19,))
    found = ChunkedCross.apply(hidden, weight, labels, smoothing)
    logits = hidden @ weight.T
    assert float(found.detach()) == pytest.approx(float(F.cross_entropy(logits, labels).detach()), rel=0.02)
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    for one, other in zip(
        torch.autograd.grad(found, (hidden, weight)),
        torch.autograd.grad(expected, (hidden, weight)),
        strict=True,
    ):
        assert relative(one, other) < 0.02


@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 20, 8)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(muon.orthogonalise(torch.randn(shape)))
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.4


def test_kneser_ney_sums_to_one_and_prefers_what_it_saw() -> None:
    stream = np.tile(np.arange(6), 40)
    model = KneserNey(stream, 3)
    base = np.full(3, 1 / 9)
    for context in ([1, 2], [8, 3], [3, 3]):
        chances = [model.probabilities(np.array([*context, symbol]), base)[-1] for symbol in range(9)]
        assert sum(chances) == pytest.approx(1.0)
    assert model.probabilities(np.array([1, 2, 3]), base)[-1] > 0.9
