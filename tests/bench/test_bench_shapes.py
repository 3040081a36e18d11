"""Checkpoints of published shapes: the tensors that were published, the same numbers each time, routed as a trained
model's tokens are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moeconv.source.checkpoint import Checkpoint
from recipes.bench import shape_numbers, shapes
from recipes.bench.shape_numbers import MODELS, config_of, of_model, stored
from recipes.bench.virtual import VirtualTensors
from tests.published import PARAMETERS

SMALL: dict[str, dict[str, Any]] = {
    "olmoe": {"hidden_size": 512, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4},
    "mixtral": {"hidden_size": 512, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {"hidden_size": 512, "moe_intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt-oss": {"hidden_size": 512, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2},
    "deepseek-v3": {
        "hidden_size": 512, "intermediate_size": 384, "moe_intermediate_size": 192, "num_attention_heads": 4,
        "num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 128, "n_routed_experts": 64,
    },
    "opt": {"hidden_size": 512, "word_embed_proj_dim": 512, "ffn_dim": 2048, "num_attention_heads": 8},
}  # fmt: skip
LAYERS = 4
CODED, UNROUTED = {"gpt-oss", "deepseek-v3"}, {"opt"}


@pytest.fixture(autouse=True)
def _small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_numbers, "POOL", 2**22 - 3)


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Type, shape and bits."""
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def small(model: str) -> dict[str, Any]:
    """As published, but narrow and with few layers and words."""
    return config_of(model, LAYERS) | SMALL[model] | {"vocab_size": 2048}


def opened(model: str, folder: Path, seed: int = 1) -> Checkpoint:
    config = small(model) | {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint.of(folder, VirtualTensors(config, LAYERS, seed))


@pytest.mark.parametrize("model", MODELS)
def test_numbers_are_as_many_as_their_makers_say(model: str) -> None:
    """Of coded tensors the scales are not counted, and a byte has two numbers of four bits."""
    each = [of for of in stored(config_of(model)).values() if of.form not in ("fp8 scales", "fp4 scales")]
    numbers = sum(int(np.prod(of.shape)) * (2 if of.form == "fp4" else 1) for of in each)
    assert numbers == pytest.approx(PARAMETERS[MODELS[model]][0] * 1e9, rel=0.01)


def test_names_and_shapes_are_those_of_the_hub() -> None:
    """Read in what lies there."""
    olmoe, gpt, deepseek = (stored(config_of(model)) for model in ("olmoe", "gpt-oss", "deepseek-v3"))
    assert olmoe["model.layers.15.mlp.experts.63.down_proj.weight"].shape == (2048, 1024)
    assert sum(of.nbytes for of in olmoe.values()) == 13_838_323_712
    blocks = gpt["model.layers.23.mlp.experts.gate_up_proj_blocks"]
    assert (blocks.shape, blocks.dtype) == ((32, 5760, 90, 16), torch.uint8)
    assert gpt["model.layers.0.mlp.experts.down_proj_scales"].shape == (32, 2880, 90)
    assert gpt["model.layers.0.mlp.experts.down_proj_bias"].shape == (32, 2880)
    latent = deepseek["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    assert (latent.shape, latent.dtype) == ((576, 7168), torch.float8_e4m3fn)
    scales = deepseek["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"]
    assert (scales.shape, scales.dtype) == ((5, 56), torch.float32)
    assert deepseek["model.layers.3.mlp.gate.weight"].dtype == torch.bfloat16
    assert deepseek["model.layers.3.mlp.gate.e_score_correction_bias"].dtype == torch.float32


@pytest.mark.parametrize("model", MODELS)
def test_the_converter_finds_all_it_needs(tmp_path: Path, model: str) -> None:
    checkpoint = opened(model, tmp_path)
    key = checkpoint.spec.expert_keys()[-1]
    for weight in checkpoint.expert(key).values():
        assert np.isfinite(weight).all()
        assert 0.3 < weight.std() * weight.shape[1] ** 0.5 < 100
    for name, tensor in checkpoint.spec.tensors.items():
        assert torch.isfinite(checkpoint.backbone_tensor(name, tensor.shape).float()).all(), name


@pytest.mark.parametrize("model", MODELS)
def test_numbers_follow_from_the_seed_and_the_name(tmp_path: Path, model: str) -> None:
    config = small(model) | ({"first_k_dense_replace": 1} if model == "deepseek-v3" else {})
    one, same, other = (VirtualTensors(config, LAYERS, seed) for seed in (7, 7, 8))
    fewer = {"num_hidden_layers": 2} | {name: config[name][:2] for name in ("layer_types",) if name in config}
    cut = VirtualTensors(config | fewer, LAYERS, 7)
    names = [name for name in one.names if ".layers.1." in name]
    for name in reversed(names):
        assert alike(one.fetch(name), same.fetch(name)), name
        assert alike(one.fetch(name), cut.fetch(name)), name
    matrix = next(name for name in names if "q_" in name and one.stored[name].kind == "into")
    assert not alike(one.fetch(matrix), other.fetch(matrix))


def test_experts_differ() -> None:
    """They are cut from the same numbers, yet each from a place of its own."""
    tensors = VirtualTensors(small("olmoe"), LAYERS, 1)
    some = [tensors.fetch(f"model.layers.{n % 4}.mlp.experts.{n}.up_proj.weight").float().flatten() for n in range(40)]
    correlation = torch.corrcoef(torch.stack(some)).fill_diagonal_(0)
    assert correlation.abs().max() < 0.03


@pytest.mark.parametrize("model", sorted(set(MODELS) - CODED - UNROUTED))
def test_tokens_go_to_experts_as_in_trained_models(tmp_path: Path, model: str) -> None:
    """What files hold is run by transformers: logits are spread like a trained model's, no layer is lost."""
    config = small(model) | {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes.write_weights(VirtualTensors(config, LAYERS, 3), tmp_path, 40_000_000)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    windows = np.random.default_rng(0).integers(0, config["vocab_size"], (6, 128)).tolist()
    with torch.no_grad():
        out = loaded(torch.tensor(windows[:1]), output_hidden_states=True)
    assert torch.isfinite(out.logits).all()
    assert 1.5 < out.logits.std() < 5
    squares = [state.square().mean() for state in out.hidden_states[:-1]]
    assert 2 < squares[-1] / squares[0] < 12
    n = getattr(loaded.config, "num_experts", None) or loaded.config.num_local_experts
    for layer in of_model(loaded, windows, n):
        assert 1.1 < layer.busiest < 4.5
        assert 0.26 < layer.quarter < 0.55
        assert layer.unused < 0.05


def test_few_neurons_fire_and_few_of_them_often(tmp_path: Path) -> None:
    """As in OPT, and no token is written again and again because the head is its embedding."""
    config = small("opt") | {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes.write_weights(VirtualTensors(config, LAYERS, 3), tmp_path, 40_000_000)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    fired: list[torch.Tensor] = []
    for layer in loaded.model.decoder.layers:
        layer.activation_fn.register_forward_hook(lambda _, __, out: fired.append(out > 0))
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, config["vocab_size"], (6, 128)))
    with torch.no_grad():
        out = loaded(ids)
    assert torch.isfinite(out.logits).all()
    assert 1.5 < out.logits.std() < 5
    assert (out.logits.argmax(-1) == ids).float().mean() < 0.1
    assert len(fired) == LAYERS
    for layer in fired:
        often = layer.float().mean(0).sort(descending=True).values
        assert 0.01 < often.mean() < 0.08
        assert 0.6 < often[: len(often) * 26 // 100].sum() / often.sum() < 0.9


@pytest.mark.parametrize("model", MODELS)
def test_files_hold_what_is_made_when_it_is_read(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some rows are made at once, and in several shards."""
    monkeypatch.setattr(shapes, "AT_ONCE_BYTES", 100_000)
    config = small(model) | ({"n_routed_experts": 16} if model == "deepseek-v3" else {})
    tensors = VirtualTensors(config, LAYERS, 3)
    shapes.write_weights(tensors, tmp_path, 4_000_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == set(tensors.names)
    assert index["metadata"]["total_size"] == tensors.nbytes
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    for file in files:
        for name, tensor in load_file(tmp_path / file).items():
            made = tensors.fetch(name)
            assert alike(tensor, made), name
