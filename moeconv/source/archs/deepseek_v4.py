"""DeepSeek-V4: attention to the last tokens and to pools of the tokens before, between several streams; √softplus
routers, whose first ones take the experts that a table names for a token, and a shared expert."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moeconv.source.archs.config import Config, count_of
from moeconv.source.archs.deepseek import MORE_PREDICTED
from moeconv.source.archs.description import Description, Inside, Names, Place, decoder, named, rows
from moeconv.source.archs.family import Family
from moeconv.source.archs.kda import one_stream, places_of_streams, streams_of, within
from moert.pack.mixers import Indexer, Pooled, Pools
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Experts, Norm

if TYPE_CHECKING:
    from torch import Tensor, nn

_SCORES: Mapping[str, str] = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid"}
_W123 = {"gate": "w1", "up": "w3", "down": "w2"}
_END = {f"decoder.streams.{name}": f"hc_head.hc_{at}" for name, at in (("weight", "fn"), ("bias", "base"))}
_OUTSIDE: Inside = {**_END, "decoder.streams.scale": "hc_head.hc_scale"}


class DeepseekV4(Family):
    """DeepSeek-V4: see above. Some layers attend to pools of a few tokens that an indexer chooses, some to all pools of
    many tokens, and some to the last tokens alone."""

    model_type = "deepseek_v4"
    model_class = "DeepseekV4ForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("attention_bias")
        config.must_be("norm_topk_prob", True, "transformers makes the weights of a token's experts sum to 1")
        config.must_be("mlp_bias", False, "networks with biases can't be packed for this family")
        config.must_be("num_key_value_heads", 1, "transformers has one head of keys in this family")
        config.must_be("n_shared_experts", 1, "transformers has one shared expert in this family")
        config.only(topk_method=("noaux_tc",), expert_dtype=("fp4", "fp8"))
        config.get("layer_types", "compress_ratios")
        config.get("mlp_layer_types", "num_hash_layers")
        config.get("partial_rotary_factor", "qk_rope_head_dim", "rope_theta", "compress_rope_theta")
        dim, norm = config.head_dim(), Norm(config.get("rms_norm_eps"))
        ropes = [config.rope(dim, partial=True, of=kind) for kind in ("main", "compress")]
        mixers = config.of_layers("layer_types", _mixers(config, norm, dim, [rope.dims for rope, _ in ropes]))
        networks = config.of_layers("mlp_layer_types", _networks(config))
        streams = replace(streams_of(config), weighed=True)
        layers = [Layer(norm, mixer, None, ffn, streams=streams) for mixer, ffn in zip(mixers, networks, strict=True)]
        stored, in_memory = _places(mixers[0], _STORED), _places(mixers[0], _IN_MEMORY)
        names = Names(
            {**stored, **places_of_streams("hc_{}_{}")}, {**in_memory, **places_of_streams("{}_hc.{}")},
            expert=named("ffn.experts.{expert}.{projection}", _W123), left_out={r"(model\.)?mtp\.": MORE_PREDICTED},
            head="head", outside=_OUTSIDE, other_names=("embed.weight", _as_published),
        )  # fmt: skip
        return decoder(self.model_type, config, tokens, layers, names, ropes)

    def own(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        coding = config.get("quantization_config")
        if not isinstance(coding, dict) or "expert_dtype" not in config:
            return config
        return {**config, "quantization_config": {"expert_dtype": config["expert_dtype"], **coding}}

    def prepared(self, model: nn.Module) -> nn.Module:
        """Puts all streams of a token, and its number where a table names experts by it, into one vector between
        layers."""
        from moeconv.source.archs.modules import join_streams

        tower: Any = self.tower(model, "decoder")
        join_streams(tower.layers, tower.hc_head, numbered="hash_moe" in tower.config.mlp_layer_types)
        return model

    @contextmanager
    def resuming(self, tower: nn.Module) -> Iterator[None]:
        with one_stream(tower):
            yield


def _mixers(config: Config, norm: Norm, dim: int, turning: list[int]) -> Mapping[str, Pooled]:
    """Returns attention by the words for it. Raises UnsupportedModel."""
    rates = config.get("compress_rates", "compress_rate_csa", "compress_rate_hca")
    indexer = Indexer(config.count("index_n_heads"), config.count("index_head_dim"), config.count("index_topk"))
    plain = Pooled(
        config.count("num_attention_heads"), dim, turning[0], config.count("q_lora_rank"),
        config.count("sliding_window", least=2), dim**-0.5, norm, 0, config.count("o_groups"),
        config.count("o_lora_rank"), None,
    )  # fmt: skip
    pooled = replace(plain, turning=turning[1], rope=1)
    few, many = "compressed_sparse_attention", "heavily_compressed_attention"
    return {
        "sliding_attention": plain,
        few: replace(pooled, pools=Pools(count_of(few, rates.get(few)), True, indexer)),
        many: replace(pooled, pools=Pools(count_of(many, rates.get(many)), False, None)),
    }


def _networks(config: Config) -> Mapping[str, Experts]:
    """Returns experts by the words for their routers. Raises UnsupportedModel."""
    limit = config.number("swiglu_limit")
    network = within(limit, config.network("moe_intermediate_size"))
    score = _SCORES[config.one_of("scoring_func", [*_SCORES])]
    router = config.router(True, score, choice_bias=True, factor=config.number("routed_scaling_factor"))
    chosen = Experts(config.count("n_routed_experts", "num_local_experts"), network, router, network)
    table = replace(router, choice_bias=False, by_token=config.count("vocab_size"))
    return {"moe": chosen, "hash_moe": replace(chosen, router=table)}


_PUBLISHED = {
    r"^model\.embed_tokens\.": "embed.", r"^model\.hc_head\.hc_": "hc_head_", r"\.attn\.norm\.": ".attn.kv_norm.",
    r"^model\.": "",
}  # fmt: skip


def _as_published(name: str) -> str:
    """Returns the name in checkpoints of the makers, of one in those that transformers writes."""
    for pattern, other in _PUBLISHED.items():
        name = re.sub(pattern, other, name)
    return name


def _as_floats(table: Tensor) -> Tensor:
    return table.float()


_STORED: Inside = {
    "mixer_norm": "attn_norm", "ffn_norm": "ffn_norm", "mixer.q_a": "attn.wq_a", "mixer.q_norm": "attn.q_norm",
    "mixer.q": "attn.wq_b", "mixer.kv": "attn.wkv", "mixer.kv_norm": "attn.norm", "mixer.sinks": "attn.attn_sink",
    "mixer.narrow": "attn.wo_a", "mixer.out": "attn.wo_b", "mixer.index.q": "attn.indexer.wq_b",
    "mixer.index.weights": "attn.indexer.weights_proj", "router": "ffn.gate", "router.choice_bias": "ffn.gate.bias",
    "router.table": Place("ffn.gate.tid2eid", _as_floats),
    **{f"shared.{name}": f"ffn.shared_experts.{called}" for name, called in _W123.items()},
    **{
        f"mixer.{kind}.{name}": f"attn.{at}compressor.{called}"
        for kind, at in (("pool", ""), ("index", "indexer."))
        for name, called in (("values", "wkv"), ("gates", "wgate"), ("places", "ape"), ("norm", "norm"))
    },
}  # fmt: skip
_IN_MEMORY: Inside = {
    "mixer_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "mixer.q_a": "self_attn.q_a_proj",
    "mixer.q_norm": "self_attn.q_a_norm", "mixer.q": "self_attn.q_b_proj", "mixer.kv": "self_attn.kv_proj",
    "mixer.kv_norm": "self_attn.kv_norm", "mixer.sinks": "self_attn.sinks", "mixer.narrow": "self_attn.o_a_proj",
    "mixer.out": "self_attn.o_b_proj", "mixer.index.q": "self_attn.compressor.indexer.q_b_proj",
    "mixer.index.weights": "self_attn.compressor.indexer.scorer.weights_proj", "router": "mlp.gate",
    "router.choice_bias": "mlp.gate.e_score_correction_bias", "router.table": "mlp.gate.tid2eid",
    **{f"shared.{name}": f"mlp.shared_experts.{name}_proj" for name in _W123},
    **{
        f"mixer.{kind}.{name}": f"self_attn.compressor.{at}{called}"
        for kind, at in (("pool", ""), ("index", "indexer."))
        for name, called in (
            ("values", "kv_proj"), ("gates", "gate_proj"), ("places", "position_bias"), ("norm", "kv_norm")
        )
    },
}  # fmt: skip


def _places(part: Pooled, names: Inside) -> Inside:
    """Returns the places of a layer's tensors: those of the groups of heads are one in the model."""
    r, shape = part.o_rank, (part.groups * part.o_rank, part.n * part.dim // part.groups)
    narrow = {
        f"mixer.narrow.{group}": Place(str(names["mixer.narrow"]), rows(group * r, group * r + r), shape)
        for group in range(part.groups)
    }
    return {**names, **narrow}
