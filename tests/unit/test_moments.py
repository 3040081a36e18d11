"""Moments of the experts' inputs: they add up to what the model really computes with."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import TINY, tiny_olmoe, tiny_switch

from moeconv.dense import weighed
from moeconv.quantizers.moments import SAMPLED, Moments, MomentsError, collect, moments_bytes, widest
from moeconv.quantizers.quantizer import Wants
from moeconv.source.archs.weights import linears_of
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.experts import ExpertCalls
from moert.pack.model_spec import ExpertKey


@pytest.mark.parametrize("make", [tiny_olmoe, tiny_switch])
def test_squares_are_the_diagonal_of_products_and_every_token_is_counted(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    checkpoint = Checkpoint.open(make(tmp_path / "model"))
    spec = checkpoint.spec
    model = checkpoint.model(torch.float32)
    calls = ExpertCalls(model, checkpoint.family, spec)
    ids = torch.randint(4, 30, (3, 11), generator=torch.Generator().manual_seed(0))
    more = {} if spec.encoder is None else {"decoder_input_ids": ids}
    squares, products = (
        collect(calls, lambda: model(input_ids=ids, **more), wants) for wants in ("squares", "products")
    )
    products.save(tmp_path / "moments.safetensors")
    loaded = Moments.load(tmp_path / "moments.safetensors")
    assert loaded.wants == "products"
    for stack, layer in spec.moe_layers():
        keys = [key for key in spec.expert_keys() if (key.stack, key.layer) == (stack, layer)]
        assert sum(loaded.rows(key) for key in keys) == ids.numel() * spec.moe.router.top_k
        for key in keys:
            for projection in spec.moe.ffn.projections:
                whole = loaded.inputs([key], projection).moment[0]
                assert np.allclose(
                    np.diagonal(whole), squares.inputs([key], projection).moment[0], rtol=1e-4, atol=1e-6
                )
                assert np.linalg.eigvalsh(whole.astype(np.float64)).min() > -1e-4


class Padded:
    """A model that runs three rows of 11, 4 and 9 tokens, padded."""

    def __init__(self, path: Path) -> None:
        checkpoint = Checkpoint.open(path)
        self.model = checkpoint.model(torch.float32)
        self.calls = ExpertCalls(self.model, checkpoint.family, checkpoint.spec)
        self.ids = torch.randint(4, 30, (3, 11), generator=torch.Generator().manual_seed(0))
        self.real = torch.arange(11) < torch.tensor([[11], [4], [9]])
        self.linears = linears_of(self.model, checkpoint.description, weighed(checkpoint.spec))

    def run(self) -> None:
        with self.calls.during(active=self.real):
            self.model(input_ids=self.ids)


def test_inputs_outside_the_experts_are_those_that_the_model_computes_with_padding_left_out(tmp_path: Path) -> None:
    padded = Padded(tiny_olmoe(tmp_path / "model"))
    model, ids = padded.model, padded.ids
    collect(padded.calls, padded.run, "products", padded.linears).save(tmp_path / "moments.safetensors")
    loaded = Moments.load(tmp_path / "moments.safetensors")
    with torch.inference_mode():
        x = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))[padded.real]
    for name in "qkv":
        found = loaded.beside(f"decoder.0.attn.{name}.weight")
        assert found is not None
        assert found.rows.tolist() == [24]
        assert np.allclose(found.moment[0], (x.T @ x / 24).numpy(), rtol=1e-4, atol=1e-6)
    assert loaded.beside("decoder.1.attn.o.weight") is not None
    assert loaded.beside("head.weight") is not None
    assert loaded.beside("embed.weight") is None
    assert loaded.digest != collect(padded.calls, padded.run, "products").digest
    model(input_ids=ids)
    assert not any(module._forward_pre_hooks for module in padded.linears.values())


def test_padding_is_left_out_of_shared_experts_too(tmp_path: Path) -> None:
    """Their layer gets all rows as one."""
    padded = Padded(TINY["qwen2_moe"][0](tmp_path / "model"))
    found = collect(padded.calls, padded.run, "products", padded.linears)
    shared = [name for name in padded.linears if ".shared." in name]
    assert shared
    for name in shared:
        seen = found.beside(name)
        assert seen is not None
        assert seen.rows.tolist() == [24]


def random_moments(n: int = 3, size: int = 64) -> Moments:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {"D00.rows": np.arange(n) + 5}
    for side in ("in", "mid"):
        arrays[f"D00.{side}-counted"] = (np.arange(n) + 6).astype(np.float32)
        arrays[f"D00.{side}"] = rng.standard_normal((n, size, size)).astype(np.float32)
    return Moments("products", arrays)


def test_a_file_is_the_same_moments_and_holds_nothing_in_memory(tmp_path: Path) -> None:
    moments, path = random_moments(8, 512), tmp_path / "m.safetensors"
    moments.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    tracemalloc.start()
    loaded = Moments.load(path)
    held = tracemalloc.get_traced_memory()[0]
    assert loaded.digest == moments.digest
    one = loaded.inputs([ExpertKey("decoder", 0, 2)], "down")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    an_expert = 4 * 512**2
    assert held < an_expert / 2
    assert most < 4 * an_expert, "more than one expert's slice was read at a time"
    assert np.array_equal(one.moment, moments.inputs([ExpertKey("decoder", 0, 2)], "down").moment)
    keys = [ExpertKey("decoder", 0, 6), ExpertKey("decoder", 0, 1)]
    assert loaded.inputs(keys, "up").rows.tolist() == [11, 6]
    assert np.array_equal(loaded.inputs(keys, "up").moment, moments.inputs(keys, "up").moment)


def test_digests_tell_figures_apart() -> None:
    one, other = random_moments(), random_moments()
    assert one.digest == other.digest
    other.tensors["D00.mid"][2:3][0, 5, 5] += 1
    assert one.digest != other.digest


@pytest.mark.parametrize("wants", ["squares", "products"])
def test_moments_take_as_much_memory_as_is_said(wants: Wants, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_olmoe(tmp_path))
    calls = ExpertCalls(checkpoint.model(torch.float32), checkpoint.family, checkpoint.spec)
    found = collect(calls, lambda: None, wants)
    taken = sum(tensor[:].nbytes for name, tensor in found.tensors.items() if name.endswith(("in", "mid")))
    spec = checkpoint.spec
    inputs = spec.tensors["decoder.1.attn.o.weight"].shape[1]
    assert moments_bytes(spec, wants, ["decoder.1.attn.o.weight"]) == moments_bytes(spec, wants) + 4 * inputs**2
    samples = 4 * len(spec.moe_layers()) * SAMPLED * widest(spec) * spec.expert_width
    assert moments_bytes(spec, wants) == taken + samples
    assert moments_bytes(checkpoint.spec, "nothing") == 0


def test_equal_moments_are_equal_bytes(tmp_path: Path) -> None:
    """The library's order of metadata is another one each time."""
    bodies = set()
    for _ in range(16):
        random_moments().save(tmp_path / "m.safetensors")
        bodies.add((tmp_path / "m.safetensors").read_bytes())
    assert len(bodies) == 1


def test_a_place_that_takes_no_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MomentsError, match="can't write") as caught:
        random_moments().save(tmp_path / "missing" / "m.safetensors")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "moments.safetensors").write_bytes(b"not this")
    with pytest.raises(MomentsError, match="can't be read"):
        Moments.load(tmp_path / "moments.safetensors")
