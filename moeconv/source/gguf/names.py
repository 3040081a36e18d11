"""Architectures as llama.cpp knows them: the family of each, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from moeconv.source.archs import NOT_COMPARED
from moeconv.source.archs.deepseek import INDEXERS_LEFT_OUT
from moeconv.source.gguf import families
from moeconv.source.gguf.facts import Facts
from moeconv.source.gguf.settings import Settings, usual
from moert.pack.mixers import MOST_GROUPS

# Names of tensors: those of a pack, within a layer or outside, → a file's.

OUTSIDE = {"embed": "token_embd", "head": "output", "decoder.norm": "output_norm"}
INSIDE: Mapping[str, str] = {
    "mixer_norm": "attn_norm", "ffn_norm": "ffn_norm", "router": "ffn_gate_inp",
    "router.choice_bias": "exp_probs_b.bias",
    "attn.o": "attn_output", "attn.sinks": "attn_sinks.weight", "shared_gate": "ffn_gate_inp_shexp",
    **{f"attn.{name}": f"attn_{name}" for name in ("q", "k", "v", "q_norm", "k_norm")},
    **{f"{part}.{name}": f"ffn_{name}{end}" for part, end in (("ffn", ""), ("shared", "_shexp"))
       for name in ("gate", "up", "down")},
    "attn.gate": "attn_q", "attn.q_turn": "attn_q", "attn.q_a": "attn_q_a", "attn.kv_a": "attn_kv_a_mqa",
    "attn.k_turn": "attn_kv_a_mqa",
    "attn.kv_norm": "attn_kv_a_norm", "attn.keys": "attn_k_b", "attn.values": "attn_v_b",
    "mixer.in": "ssm_in", "mixer.dt": "ssm_in", "mixer.conv": "ssm_conv1d", "mixer.dt_bias": "ssm_dt.bias",
    "mixer.a_log": "ssm_a.log", "mixer.d": "ssm_d", "mixer.norm": "ssm_norm", "mixer.out": "ssm_out",
    "mixer.inner": "ssm_x", "mixer.steps": "ssm_dt", "mixer.dt_norm": "ssm_dt_norm", "mixer.b_norm": "ssm_b_norm",
    "mixer.c_norm": "ssm_c_norm", "narrow": "ffn_latent_down", "widen": "ffn_latent_up",
}  # fmt: skip
_DELTA = {
    **{f"mixer.{name}": "attn_qkv" for name in "qkv"}, "mixer.z": "attn_gate", "ffn_norm": "post_attention_norm",
}  # fmt: skip


@dataclass(frozen=True)
class Arch:
    """An architecture of llama.cpp. `model_type`: of config.json; `settings`: those that not all families have;
    `names`: names that differ from INSIDE and OUTSIDE; `whole`: names of tensors that lie as the family's own do, with
    all parts of a pack in them; `turned`: rows of queries and keys are reordered, so that positions turn pairs;
    `inside`: config.json has the settings under text_config; `left_out`: patterns of names that a pack leaves out → a
    note on them; `alone`: names that differ in a model without experts; `tiled`: heads of values in gated delta rules
    are ordered by their place in a group first."""

    model_type: str | Callable[[Facts], str]
    settings: Callable[[Facts], Settings]
    names: Mapping[str, str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    turned: bool = False
    inside: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)
    alone: Mapping[str, str] = field(default_factory=dict)
    tiled: bool = False

    def config(self, facts: Facts) -> Settings:
        """Returns the settings of config.json. Raises CheckpointError."""
        found = {**usual(facts), **self.settings(facts)}
        model_type = self.model_type if isinstance(self.model_type, str) else self.model_type(facts)
        if not self.inside:
            return {**found, "model_type": model_type}
        return {"model_type": model_type, "tie_word_embeddings": found["tie_word_embeddings"], "text_config": found}


_HYPER = {
    f"{place}.{name}": f"{at}_{called}.weight"
    for place, at in (("mixer_streams", "hc_attn"), ("ffn_streams", "hc_ffn"), ("decoder.streams", "output_hc"))
    for name, called in (("weight", "fn"), ("bias", "base"), ("scale", "scale"))
}
_BY_FEATURE = {
    **{f"mixer.{name}": f"attn_{name}" for name in "qkv"}, "mixer.conv": "ssm_conv1d_q", "mixer.b": "ssm_beta",
    "mixer.out": "attn_output",
}  # fmt: skip
_NARROWED = {
    "mixer.a_narrow": "ssm_f_a", "mixer.a": "ssm_f_b", "mixer.z_narrow": "ssm_g_a", "mixer.z": "ssm_g_b",
}  # fmt: skip
_POOLED = {
    "mixer.q_a": "attn_q_a", "mixer.q_norm": "attn_q_a_norm", "mixer.q": "attn_q_b", "mixer.kv": "attn_kv",
    "mixer.kv_norm": "attn_kv_a_norm", "mixer.sinks": "attn_sinks.weight", "mixer.out": "attn_output_b",
    **{f"mixer.narrow.{group}": "attn_output_a" for group in range(MOST_GROUPS)},
    "mixer.index.q": "indexer.attn_q_b", "mixer.index.weights": "indexer.proj",
    **{f"mixer.{kind}.{name}": f"{at}_compressor_{called}" for kind, at in (("pool", "attn"), ("index", "indexer"))
       for name, called in (("values", "kv"), ("gates", "gate"), ("places", "ape.weight"), ("norm", "norm"))},
    "router.table": "ffn_gate_tid2eid.weight",
    **_HYPER,
}  # fmt: skip
_BEHIND = {"mixer_after": "post_attention_norm", "ffn_after": "post_ffw_norm"}
_GATES = {
    f"{place}.{name}": f"{at}_{called}"
    for place, at in (("mixer_streams", "hc_attn"), ("ffn_streams", "hc_ffn"), ("decoder.streams", "output_hc"))
    for name, called in (("norm", "norm"), ("narrow", "down"), ("wide", "up"), ("join", "inject"))
}
_TOGETHER = {
    **{f"ngrams.{name}": f"ple_{name}" for name in ("key", "value")}, "ngrams.conv": "ple_conv1d",
    **{f"ngrams.{name}_norm": f"ple_norm_{called}"
       for name, called in (("key", "key"), ("stream", "query"), ("conv", "conv"))},
}  # fmt: skip
_CONVOLUTIONS = {
    "mixer.in": "shortconv.in_proj", "mixer.conv": "shortconv.conv", "mixer.out": "shortconv.out_proj",
    "decoder.norm": "token_embd_norm",
}  # fmt: skip
_ONE_BY_ONE = {**_DELTA, "mixer.a": "ssm_alpha", "mixer.b": "ssm_beta"}
_Q = frozenset({"attn_q", "attn_k"})
_IN = frozenset({"ssm_in"})
_LATENT = frozenset({"attn_q", "attn_q_b", "attn_kv_a_mqa", "attn_kv_b"})
_INDEXERS = {r"blk\.\d+\.indexer\.": INDEXERS_LEFT_OUT}
ARCHS: Mapping[str, Arch] = {
    "llama": Arch(families.llama_type, families.llama, turned=True),
    "qwen2": Arch("qwen2", families.qwen2_dense),
    "qwen3": Arch("qwen3", families.qwen3_dense),
    "smollm3": Arch("smollm3", families.qwen3_dense, turned=True),
    "phi3": Arch("phi3", families.phi3),
    "gemma": Arch("gemma", families.gemma),
    "gemma2": Arch("gemma2", families.gemma2, _BEHIND),
    "gemma3": Arch("gemma3_text", families.gemma3, _BEHIND),
    "phi2": Arch("phi", families.phi2, {"ffn_norm": "attn_norm"}),
    "nemotron": Arch("nemotron", families.nemotron_dense),
    "arcee": Arch("arcee", families.arcee, turned=True),
    "stablelm": Arch("stablelm", families.stablelm),
    "command-r": Arch("cohere", families.cohere, {"ffn_norm": "attn_norm"}, whole=_Q),
    "cohere2": Arch("cohere2", families.cohere2, {"ffn_norm": "attn_norm"}, whole=_Q),
    "cohere2moe": Arch("cohere2_moe", families.cohere2_moe, {"ffn_norm": "attn_norm"}, whole=_Q),
    "starcoder2": Arch("starcoder2", families.starcoder2),
    "seed_oss": Arch("seed_oss", families.seed, {"ffn_norm": "post_attention_norm"}),
    "exaone4": Arch("exaone4", families.exaone4, _BEHIND),
    "olmo": Arch("olmo", families.olmo, turned=True),
    "olmo2": Arch(families.olmo_type, families.olmo2, _BEHIND),
    "olmoe": Arch("olmoe", families.olmoe),
    "qwen2moe": Arch("qwen2_moe", families.qwen2),
    "qwen3moe": Arch("qwen3_moe", families.qwen3),
    "mellum": Arch("mellum", families.mellum),
    "qwen3vl": Arch("qwen3_vl", families.qwen3_dense, inside=True),
    "qwen3vlmoe": Arch("qwen3_vl_moe", families.qwen3, inside=True),
    "gpt-oss": Arch("gpt_oss", families.gpt_oss, {"ffn_norm": "post_attention_norm"}),
    "deepseek2": Arch(families.deepseek_type, families.deepseek, whole=_LATENT),
    "mistral3": Arch(families.mistral3_type, families.mistral3, turned=True),
    "mistral4": Arch("mistral4", families.mistral4, whole=_LATENT),
    "kimi-linear": Arch("kimi_linear", families.kimi_linear, {**_BY_FEATURE, **_NARROWED}, whole=_LATENT),
    "glm5-next": Arch("glm5_next", families.glm5_next, {**_BY_FEATURE, **_NARROWED, **_HYPER}, whole=_LATENT,
                      inside=True, left_out={r"blk\.\d+\.indexer[._]": INDEXERS_LEFT_OUT}),
    "bailingmoe3": Arch("bailing_hybrid", families.bailing3, {
        **_BY_FEATURE, "mixer.a": "ssm_f_a", "mixer.z": "ssm_g_a", "attn.gate": "attn_gate",
    }, whole=_LATENT),
    "step35": Arch("step3p5", families.step, {"attn.gate": "attn_gate"}),
    "glm-dsa": Arch("glm_moe_dsa", families.indexed, whole=_LATENT, left_out=_INDEXERS),
    "deepseek32": Arch("deepseek_v32", families.indexed, whole=_LATENT, left_out=_INDEXERS),
    "deepseek4": Arch("deepseek_v4", families.deepseek4, _POOLED, frozenset({"attn_output_a", "ffn_gate_tid2eid"})),
    "glm4moe": Arch("glm4_moe", families.glm4, {"ffn_norm": "post_attention_norm"}),
    "minimax-m2": Arch("minimax_m2", families.minimax),
    "minimax-m3": Arch("minimax_m3_vl", families.minimax_m3, inside=True, left_out=_INDEXERS),
    "ernie4_5": Arch("ernie4_5", families.ernie_dense, whole=_Q),
    "ernie4_5-moe": Arch("ernie4_5_moe", families.ernie, whole=_Q),
    "hunyuan-dense": Arch("hunyuan_v1_dense", families.hunyuan_dense),
    "hunyuan-moe": Arch("hunyuan_v1_moe", families.hunyuan),
    "hy_v3": Arch("hy_v3", families.hy, {"router.choice_bias": "exp_probs_b"}),
    "dots1": Arch("dots1", families.dots1),
    "granitemoe": Arch(families.granite_type, families.granite, turned=True),
    "granite": Arch("granite", families.granite_dense, turned=True),
    "granite_swa": Arch(families.granite_swa_type, families.granite_swa, {"shared.gate": "ffn_up_shexp"},
                        frozenset({"ffn_up_shexp"}), turned=True),
    "granitehybrid": Arch("granitemoehybrid", families.granite_hybrid, whole=_IN, turned=True),
    "phimoe": Arch("phimoe", families.phimoe),
    "afmoe": Arch("afmoe", families.afmoe, {**_BEHIND, "attn.gate": "attn_gate"}),
    "exaone-moe": Arch("exaone_moe", families.exaone),
    "mimo2": Arch("mimo_v2_flash", families.mimo, whole=frozenset({"attn_v", "attn_output"})),
    "llama4": Arch("llama4_text", families.llama4, whole=_Q),
    "lfm2": Arch("lfm2", families.lfm2_dense, _CONVOLUTIONS),
    "lfm2moe": Arch("lfm2_moe", families.lfm2, _CONVOLUTIONS),
    "jamba": Arch("jamba", families.jamba),
    "qwen3next": Arch("qwen3_next", families.qwen3_next, {**_DELTA, "mixer.a": "ssm_ba", "mixer.b": "ssm_ba"},
                      frozenset({"attn_q", "ssm_ba"})),
    "qwen35": Arch("qwen3_5_text", families.deltas, _ONE_BY_ONE, frozenset({"attn_q"}), tiled=True),
    "qwen35moe": Arch("qwen3_5_moe_text", families.qwen_next, _ONE_BY_ONE, frozenset({"attn_q"}), tiled=True),
    "qwen4exp": Arch("qwen4_exp_text", families.qwen4, {**_ONE_BY_ONE, **_GATES, **_TOGETHER}, frozenset({"attn_q"}),
                     left_out=_INDEXERS, tiled=True),
    **{name: Arch("nemotron_h", families.nemotron, {"ffn_norm": "attn_norm"}, _IN, turned=True)
       for name in ("nemotron_h", "nemotron_h_moe")},
    "gemma4": Arch("gemma4_text", families.gemma4, {
        "mixer_after": "post_attention_norm", "ffn_norm": "pre_ffw_norm_2", "ffn_after": "post_ffw_norm",
        "beside_norm": "ffn_norm", "beside_after": "post_ffw_norm_1", "experts_after": "post_ffw_norm_2",
        "router.expert_scale": "ffn_down_exps.scale", "router_norm.weight": "ffn_gate_inp.scale",
        "scale": "layer_output_scale.weight", "beside.gate": "ffn_gate", "beside.up": "ffn_up",
        "beside.down": "ffn_down",
    }, frozenset({"ffn_gate_inp.scale"}), alone={"ffn_norm": "ffn_norm"}),
}  # fmt: skip
"""llama.cpp's name → its family here."""

REFUSED: Mapping[str, str] = {
    "longcat-flash": "llama.cpp has not settled the layout of its files: take its safetensors files",
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "kimi-k3"), NOT_COMPARED),
}  # fmt: skip
"""llama.cpp's name of a known architecture whose files can't be read → the reason."""
