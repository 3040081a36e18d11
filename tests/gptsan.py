"""Tiny GPTSAN-japanese: checkpoints as transformers 4.57 wrote them, and our torch module as that fed it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from moeconv.source.checkpoint import Checkpoint

SEPARATOR = 5
SETTINGS: dict[str, Any] = {
    "architectures": ["GPTSanJapaneseForConditionalGeneration"], "model_type": "gptsan-japanese", "vocab_size": 96,
    "d_model": 24, "d_ff": 40, "d_ext": 28, "d_spout": 6, "num_heads": 4, "num_experts": 5, "num_switch_layers": 2,
    "num_ext_layers": 0, "expert_capacity": 1000, "max_position_embeddings": 512, "separator_token_id": 96,
    "pad_token_id": 0, "eos_token_id": 1, "router_bias": False, "layer_norm_epsilon": 1e-5, "router_dtype": "float32",
    "dropout_rate": 0.0, "torch_dtype": "bfloat16",
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "a prefix": {"separator_token_id": SEPARATOR},
    "layers without experts": {"num_ext_layers": 2},
    "small capacity": {"expert_capacity": 2},
    "routers with biases": {"router_bias": True},
    "no spout": {"d_spout": 0},
    "all of it": {
        "separator_token_id": SEPARATOR, "num_ext_layers": 2, "expert_capacity": 4, "router_bias": True,
        "layer_norm_epsilon": 1e-3,
    },
}  # fmt: skip


def weights_of(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """By the names of 4.57's model, in bfloat16: of a size that keeps the signal's from layer to layer."""
    chance, found = np.random.default_rng(seed), {}
    for name, shape in _shapes(config):
        noise = chance.standard_normal(shape).astype(np.float32)
        if "bias" in name:
            values = 0.2 * noise
        elif len(shape) == 1:
            values = 1 + 0.2 * noise
        elif "embed" in name:
            values = 0.2 * noise
        else:
            values = 1.5 * noise * shape[-1] ** -0.5
        found[name] = torch.from_numpy(values).to(torch.bfloat16)
    return found


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, switched, spout = config["d_model"], config["num_switch_layers"], config["d_spout"]
    layers = switched + config["num_ext_layers"]
    yield "final_logits_bias", (1, config["vocab_size"])
    yield "model.embed_tokens.weight", (config["vocab_size"], d)
    yield "model.position_embeddings.weight", (config["max_position_embeddings"], d)
    if layers > switched:
        yield "model.extra_position_embeddings.weight", (config["max_position_embeddings"], d)
    yield from _matrix("model.last_project", (d, d), True)
    for place in range(8) if spout else ():
        yield f"model.spout.{2 * place}.weight", (spout, spout)
    if spout:
        yield "model.spout.16.weight", (layers * 2 * d, spout)
    for layer in range(layers):
        at = f"model.blocks.{layer}"
        for matrix in ("q", "k", "v", "out"):
            yield f"{at}.self_attn.self_attn.{matrix}_proj.weight", (d, d)
        for norm in ("self_attn", "feed_forward"):
            yield from ((f"{at}.{norm}.norm.{part}", (d,)) for part in ("weight", "bias"))
        mlp = f"{at}.feed_forward.mlp"
        if layer >= switched:
            yield from _matrix(f"{mlp}.wi", (config["d_ext"], d), True)
            yield from _matrix(f"{mlp}.wo", (d, config["d_ext"]), True)
            continue
        yield f"{at}.feed_forward.soft_bypass_mlp.weight", (d, d)
        yield from _matrix(f"{mlp}.router.classifier", (config["num_experts"], d), config["router_bias"])
        for expert in range(config["num_experts"]):
            yield f"{mlp}.experts.expert_{expert}.wi.weight", (config["d_ff"], d)
            yield f"{mlp}.experts.expert_{expert}.wo.weight", (d, config["d_ff"])


def _matrix(at: str, shape: tuple[int, int], bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.weight", shape
    if bias:
        yield f"{at}.bias", shape[:1]


def write(path: Path, seed: int = 0, **overrides: Any) -> Path:
    """A checkpoint of 2 layers and 5 experts without a tokenizer; overrides go to its config."""
    config = {**SETTINGS, **overrides}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**config, "num_layers": _layers(config)}))
    ends = {name: config[name] for name in ("eos_token_id", "pad_token_id")}
    (path / "generation_config.json").write_text(json.dumps(ends))
    save_file(weights_of(config, seed), path / "model.safetensors", {"format": "pt"})
    return path


def _layers(config: dict[str, Any]) -> Any:
    return config.get("num_layers", config["num_switch_layers"] + config["num_ext_layers"])


def token_types(ids: torch.Tensor, separator: int) -> torch.Tensor:
    """As its tokenizer gives them [rows, tokens]: 1 for what is before the first separator, if there is one."""
    behind = (ids == separator).cumsum(1) > 0
    return (~behind & behind[:, -1:]).long()


class Reference:
    """Our torch module, given the token types that 4.57's tokenizer gives; and its generate()."""

    def __init__(self, path: Path) -> None:
        self.model: Any = Checkpoint.open(path).model(torch.float32)
        decoder = SimpleNamespace(is_encoder_decoder=False, eos_token_id=self.model.config.eos_token_id)
        self.config = SimpleNamespace(get_text_config=lambda **_: decoder)

    def __call__(self, input_ids: torch.Tensor, **more: Any) -> Any:
        types = token_types(input_ids, self.model.config.separator_token_id)
        return self.model(input_ids, **{"token_type_ids": types, **more})

    def generate(self, ids: torch.Tensor, max_new_tokens: int, **_: Any) -> torch.Tensor:
        """Greedy, one token after the other with what was kept: ids and answers [rows, tokens]."""
        pasts: list[Any] = []
        logits = self(ids, past_key_values=pasts).logits
        for _step in range(max_new_tokens):
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
            logits = self.model(ids[:, -1:], past_key_values=pasts).logits
        return ids
