"""How far positions turn, beside transformers' own functions, which compute in float32 all the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moeconv.source.archs.config import KINDS, frequencies, turns

LONGEST = 131072
factors = st.floats(1.0, 64.0)
thetas = st.sampled_from([500.0, 10000, 10000.0, 5e5, 1e6, 8e6])
lengths = st.sampled_from([32, 4096, 8192])
maybe = st.one_of(st.none(), st.floats(0.5, 2.0))
kinds = {
    "linear": {"factor": factors},
    "llama3": {
        "factor": factors, "low_freq_factor": st.floats(0.5, 2.0), "high_freq_factor": st.floats(3.0, 9.0),
        "original_max_position_embeddings": lengths,
    },
    "yarn": {
        "factor": st.one_of(st.none(), factors), "original_max_position_embeddings": lengths,
        "attention_factor": maybe, "mscale": maybe, "mscale_all_dim": maybe, "truncate": st.booleans(),
        "beta_fast": st.sampled_from([None, 32, 16]), "beta_slow": st.sampled_from([None, 1, 2]),
    },
    "longrope": {
        "factor": st.one_of(st.none(), factors), "original_max_position_embeddings": lengths,
        "attention_factor": maybe, "long_factor": st.just([2.0] * 128),
    },
}  # fmt: skip


@st.composite
def ropes(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    kind, dims = draw(st.sampled_from(sorted(kinds))), draw(st.sampled_from([8, 64, 96, 128]))
    said = {name: draw(values) for name, values in kinds[kind].items()}
    if kind == "longrope":
        said["short_factor"] = draw(st.lists(st.floats(1.0, 9.0), min_size=dims // 2, max_size=dims // 2))
    return {**said, "rope_type": kind, "rope_theta": draw(thetas)}, dims


@given(ropes())
def test_every_kind_is_that_of_transformers(rope: tuple[dict[str, Any], int]) -> None:
    said, dims = rope
    config = SimpleNamespace(
        rope_parameters=said, head_dim=dims, hidden_size=4 * dims, num_attention_heads=4,
        max_position_embeddings=LONGEST, standardize_rope_params=lambda: None,
    )  # fmt: skip
    theirs, factor = ROPE_INIT_FUNCTIONS[said["rope_type"]](config, torch.device("cpu"))
    found, own = frequencies(said, dims, LONGEST)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, theirs, rtol=3e-6, atol=0)  # some float32 steps, in another order
    assert own == pytest.approx(factor, rel=1e-12)


def test_every_kind_is_tried() -> None:
    assert set(kinds) == set(KINDS)


def test_plain_turns_are_rounded_once() -> None:
    exact = 10000.0 ** -(np.arange(0, 128, 2) / 128)
    np.testing.assert_array_max_ulp(turns(10000, 128), exact.astype(np.float32), maxulp=1)
    assert len(turns(10000, 32, 64)) == 16
    np.testing.assert_array_equal(turns(10000, 32, 64), turns(10000, 64)[:16])
