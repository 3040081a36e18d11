"""Settings of config.json that many families have by the same names, from a GGUF file's metadata."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from moeconv.source.archs.config import frequencies
from moeconv.source.gguf.facts import Facts
from moeconv.source.outline import CheckpointError

Settings = dict[str, Any]

OUTPUT, EMBED, ROPE = "output.weight", "token_embd.weight", "rope_freqs.weight"
TABLE = "per_layer_token_embd.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
SOFTMAX, SIGMOID, SQRT_SOFTPLUS = 1, 2, 4
"""Values of expert_gating_func."""
_SCORES = {SOFTMAX: "softmax", SIGMOID: "sigmoid", SQRT_SOFTPLUS: "sqrtsoftplus"}
_CLOSE = 1e-4


def usual(facts: Facts) -> Settings:
    """Returns the settings that most families have by the same names."""
    embed = facts.container.tensors.get(EMBED)
    if embed is None or len(embed.shape) != 2:
        raise CheckpointError(f"{facts.container.files[0]} has no {EMBED}: it is incomplete, or not a language model")
    found: Settings = {
        "num_hidden_layers": facts.layers, "max_position_embeddings": facts.count("context_length"),
        "hidden_size": facts.count("embedding_length"), "vocab_size": embed.shape[0],
        "num_attention_heads": facts.heads, "num_key_value_heads": max(facts.each("attention.head_count_kv")),
        "tie_word_embeddings": OUTPUT not in facts.container.tensors,
    }  # fmt: skip
    for name, key in (("intermediate_size", "feed_forward_length"), ("head_dim", "attention.key_length")):
        if facts.said(key):
            found[name] = max(facts.each(key))
    return {**found, "rms_norm_eps": norm_eps(facts), "rope_parameters": positions(facts)}


def norm_eps(facts: Facts) -> float:
    return facts.number(
        f"attention.layer_norm_{'rms_' if facts.said('attention.layer_norm_rms_epsilon') else ''}epsilon"
    )


def positions(facts: Facts) -> Settings:
    """Returns the parameters of rotary positions."""
    found: Settings = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base", 10000.0)}
    kind, metadata = f"{facts.arch}.rope.scaling.type", facts.container.metadata
    match metadata.get(kind, str, "none"):
        case "none" | "longrope":
            pass
        case "linear":
            found |= {"rope_type": "linear", "factor": facts.number("rope.scaling.factor")}
        case "yarn":
            found |= {
                "rope_type": "yarn", "factor": facts.number("rope.scaling.factor"),
                "original_max_position_embeddings": facts.count("rope.scaling.original_context_length"),
            }  # fmt: skip
            for name in ("beta_fast", "beta_slow"):
                if facts.said(key := f"rope.scaling.yarn_{name}"):
                    found[name] = facts.number(key)
            if facts.said(key := "rope.scaling.yarn_attn_factor") or facts.said(key := "rope.scaling.attn_factor"):
                found["attention_factor"] = facts.number(key)
        case other:
            raise metadata.wrong(kind, f"is {other!r}, only none, linear, yarn and longrope are known")
    return found


def positions_of_llama3(facts: Facts, pairs: int | None = None) -> Settings:
    """Returns the parameters of Llama 3's positions that give a file's factors of its turns, of the first `pairs`; the
    file has no others."""
    plain, factors = positions(facts), facts.numbers(ROPE)[:pairs]
    if not np.isfinite(factors).all() or not (factors > 0).all():
        raise CheckpointError(f"{facts.container.files[0]}: {ROPE} holds values that are no factors")
    dims, longest = 2 * len(factors), facts.count("context_length")
    base = frequencies({**plain, "rope_type": "linear", "factor": 1.0}, dims, longest)[0]
    for low, high in ((1.0, 4.0), (1.0, 1.0)):
        for length in (8192, longest, *(1 << power for power in range(4, 21))):
            tried = {
                **plain, "rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": low,
                "high_freq_factor": high, "original_max_position_embeddings": length,
            }  # fmt: skip
            if np.allclose(frequencies(tried, dims, longest)[0] * factors, base, rtol=_CLOSE, atol=0):
                return tried
    raise CheckpointError(
        f"{facts.container.files[0]}: {ROPE} turns positions in a way that is not Llama 3's: it can't be converted"
    )


def with_llama3(facts: Facts) -> Settings:
    return {"rope_parameters": positions_of_llama3(facts)} if ROPE in facts.container.tensors else {}


def in_part(facts: Facts) -> Settings:
    """Returns rope_parameters of which a share of each head turns."""
    return {**positions(facts), **turning_share(facts, facts.head_dim)}


def turning_share(facts: Facts, dim: int) -> Settings:
    """Returns the share that turns of a head's `dim` features: a number that gives theirs again, rounded down."""
    turning = facts.count("rope.dimension_count")
    share = turning / dim
    return {"partial_rotary_factor": share if int(dim * share) == turning else math.nextafter(share, math.inf)}


def experts_of(facts: Facts, n: str = "num_experts", top_k: str = "num_experts_per_tok") -> Settings:
    return {n: facts.count("expert_count"), top_k: facts.count("expert_used_count")}


def widths_of(facts: Facts) -> Settings:
    return {"moe_intermediate_size": facts.count("expert_feed_forward_length")}


def dense_of(facts: Facts) -> Settings:
    without = [at for at, has in enumerate(facts.has("ffn_gate_inp.weight")) if not has]
    return {"mlp_only_layers": without, "decoder_sparse_step": 1}


def biases_of(facts: Facts, setting: str = "attention_bias") -> Settings:
    return {setting: facts.some("attn_q.bias")}


def longrope(facts: Facts) -> Settings:
    return {
        "rope_type": "longrope", "short_factor": facts.numbers(SHORT).tolist(),
        "long_factor": facts.numbers(LONG).tolist(),
        "original_max_position_embeddings": facts.count("rope.scaling.original_context_length"),
    }  # fmt: skip


def shared_experts(facts: Facts, n: str = "n_routed_experts", shared: str = "n_shared_experts") -> Settings:
    """Returns the settings of DeepSeek's experts and routers."""
    return {
        **experts_of(facts, n), **widths_of(facts), shared: facts.count("expert_shared_count", 0) or None,
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "norm_topk_prob": facts.flag("expert_weights_norm", False), **groups_of(facts),
    }  # fmt: skip


def groups_of(facts: Facts) -> Settings:
    return {"n_group": facts.count("expert_group_count", 1), "topk_group": facts.count("expert_group_used_count", 1)}


def scores_of(facts: Facts, usual: int = SIGMOID) -> str:
    """Returns the name of the function that makes a router's scores; `usual`: its number where a file says none."""
    said = facts.count("expert_gating_func", 0) or usual
    return _SCORES.get(said, f"number {said}")


def check_scores(facts: Facts, wanted: int) -> None:
    """Raises CheckpointError if a router's scores are made by another function."""
    if (scores := scores_of(facts, wanted)) != _SCORES[wanted]:
        raise facts.container.metadata.wrong(
            f"{facts.arch}.expert_gating_func", f"says {scores}, expected {_SCORES[wanted]}"
        )


def first_dense(facts: Facts) -> Settings:
    return {"first_k_dense_replace": facts.count("leading_dense_block_count", 0)}


def windows_of(facts: Facts, period: int = 1) -> Settings:
    """Returns the windows of layers. A file has a list of the layers with one, or a number N: each Nth layer has none;
    `period`: N if it says neither."""
    key, metadata = f"{facts.arch}.attention.sliding_window_pattern", facts.container.metadata
    if isinstance(said := metadata.values.get(key), list):
        kind = int if any(type(each) is int for each in said) else bool
        pattern = [bool(each) for each in facts.of_layers(key, kind) or ()]
    else:
        period = facts.count("attention.sliding_window_pattern", period)
        pattern = [period == 0 or at % period < period - 1 for at in range(facts.layers)]
    kinds = ["sliding_attention" if each else "full_attention" for each in pattern]
    window = facts.count("attention.sliding_window") if any(pattern) else None
    return {"layer_types": kinds, "sliding_window": window}


def plain_positions(facts: Facts) -> Settings:
    """Returns the parameters of rotary positions in layers with a window, which are never scaled."""
    theta = facts.number("rope.freq_base_swa", facts.number("rope.freq_base", 10000.0))
    return {"rope_type": "default", "rope_theta": theta}


def networks_of(facts: Facts) -> list[str]:
    """Returns for each layer whether it has experts, as words."""
    return ["sparse" if has else "dense" for has in facts.has("ffn_gate_inp.weight")]


def by_kind(numbers: Sequence[int], full: Sequence[bool]) -> tuple[list[int], list[int]]:
    """Returns the numbers of layers without a window, and of those with one."""
    both = [*zip(numbers, full, strict=True)]
    return [each for each, whole in both if whole], [each for each, whole in both if not whole]


def rows_of(facts: Facts, tensor: str) -> int | None:
    names = (f"blk.{layer}.{tensor}" for layer in range(facts.layers))
    return next((facts.container.tensors[name].shape[0] for name in names if name in facts.container.tensors), None)
