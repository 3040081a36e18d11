"""Moments of the experts' inputs: they add up to what the model really computes with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_olmoe, tiny_switch

from moeconv.checkpoint import Checkpoint
from moeconv.moments import Moments, MomentsError, collect
from moeconv.scorers.experts import ExpertCalls


@pytest.mark.parametrize("make", [tiny_olmoe, tiny_switch])
def test_squares_are_the_diagonal_of_products_and_every_token_is_counted(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    checkpoint = Checkpoint.open(make(tmp_path / "model"))
    spec = checkpoint.spec
    model = checkpoint.arch.load(checkpoint.path, torch.float32)
    calls = ExpertCalls(model, checkpoint.arch, spec)
    ids = torch.randint(4, 30, (3, 11), generator=torch.Generator().manual_seed(0))
    more = {} if spec.encoder is None else {"decoder_input_ids": ids}
    squares, products = (
        collect(calls, lambda: model(input_ids=ids, **more), wants) for wants in ("squares", "products")
    )
    (tmp_path / "moments.safetensors").write_bytes(products.to_bytes())
    loaded = Moments.load(tmp_path / "moments.safetensors")
    assert loaded.wants == "products"
    for stack, layer in spec.moe_layers():
        keys = [key for key in spec.expert_keys() if (key.stack, key.layer) == (stack, layer)]
        assert sum(loaded.rows(key) for key in keys) == ids.numel() * spec.moe.top_k
        for key in keys:
            for projection in spec.moe.projections:
                whole = loaded.inputs(key, projection).moment[0]
                assert np.allclose(np.diagonal(whole), squares.inputs(key, projection).moment[0], rtol=1e-4, atol=1e-6)
                assert np.linalg.eigvalsh(whole.astype(np.float64)).min() > -1e-4


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "moments.safetensors").write_bytes(b"not this")
    with pytest.raises(MomentsError, match="can't be read"):
        Moments.load(tmp_path / "moments.safetensors")
