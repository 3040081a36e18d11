"""Values beyond float16's range in the KV cache: a checkpoint whose v is 2**16 times as large and whose o is as much
smaller is the same model, and its pack answers as transformers does."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from packs import greedy, open_model, pack_of
from safetensors.torch import load_file, save_file
from tiny import TINY, VOCAB, transformers_model

from moert.kernels import REFERENCE, library, open_backend
from moert.kernels.backend import Backend
from moert.kernels.pages import KvBits

FAMILIES = ("qwen3_moe", "mixtral", "olmoe")
POWER = 2.0**16


def scaled(source: Path) -> Path:
    """The same checkpoint with other numbers: values of 2**16 times their size, which o takes back."""
    place = source / "model.safetensors"
    tensors, changed = load_file(place), 0
    for name, tensor in tensors.items():
        by = POWER if re.search(r"\bv_proj\.", name) else 1 / POWER if re.search(r"\bo_proj\.", name) else 1.0
        changed += by != 1
        tensors[name] = (tensor.double() * by).to(tensor.dtype)
    assert changed
    save_file(tensors, place, {"format": "pt"})
    return source


def backends() -> list[Backend]:
    return [open_backend(REFERENCE), *([open_backend()] if library.load() is not None else [])]


@pytest.mark.parametrize("kv", [16, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_of_large_values_answers_as_transformers_does(family: str, kv: KvBits, tmp_path: Path) -> None:
    source = scaled(TINY[family][0](tmp_path / "hf"))
    pack, model = pack_of(source, tmp_path / "large.pack"), transformers_model(source)
    plain = pack_of(TINY[family][0](tmp_path / "plain"), tmp_path / "plain.pack")
    ids = np.random.default_rng(3).integers(2, VOCAB, 30).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    for backend in backends():
        (large, _), (same, _) = (open_model(each, backend, kv) for each in (pack, plain))
        found = large.forward_all(ids)
        assert np.array_equal(found, same.forward_all(ids)), "powers of two change no other bit"
        if kv == 16:
            assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()
        assert greedy(large, ids, 12) == greedy(same, ids, 12)
