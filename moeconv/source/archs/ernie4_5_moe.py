"""ERNIE 4.5: rotary positions of pairs, softmax routers with a bias for the choice, shared experts, a run of layers
that have experts."""

from __future__ import annotations

from moeconv.source.archs.config import Config, UnsupportedModel
from moeconv.source.archs.description import Description, Names, Place, decoder, halves
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Head, Layer, Tokens
from moert.pack.parts import Experts, Norm, Router

_NEVER_REACHED = 1e-6  # by the sum of the chosen experts' weights


class Ernie45Moe(Family):
    """See `Family`."""

    model_type = "ernie4_5_moe"
    model_class = "Ernie4_5_MoeForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.only(moe_use_aux_free=(True,), moe_gate=("topk",))
        config.without_effect("moe_capacity", "compression_ratio")
        if (least := config.number("moe_norm_min")) > _NEVER_REACHED:
            raise UnsupportedModel(
                f"config.json sets moe_norm_min {least!r}: a pack divides by the sum of weights however small that is"
            )
        bias, norm = bool(config.get("use_bias")), Norm(config.get("rms_norm_eps"))
        attention = config.attention(biases=config.biases("use_bias", "qkvo"))
        router = Router(config.count("moe_k", "num_experts_per_tok"), True, None, choice_bias=True)
        shared = config.get("moe_num_shared_experts")
        experts = Experts(
            config.count("moe_num_experts", "num_experts"), config.network("moe_intermediate_size"), router,
            config.network("moe_intermediate_size", bias=bias, times=shared) if shared else None,
        )  # fmt: skip
        dense, n = config.network("intermediate_size", bias=bias), config.count("num_hidden_layers")
        first, last = config.count("moe_layer_start_index", least=0), config.count("moe_layer_end_index", least=-1)
        run = range(first, (n - 1 if last == -1 else last) + 1)
        step = config.count("moe_layer_interval")
        layers = [
            Layer(norm, attention, None, experts if at in run and (at + 1) % step == 0 else dense) for at in range(n)
        ]
        heads, kv, dim, d_model = attention.n, attention.kv, attention.dim, config.count("hidden_size")
        inside = {
            "attn.q": Place("self_attn.q_proj", halves(heads), (heads * dim, d_model)),
            "attn.k": Place("self_attn.k_proj", halves(kv), (kv * dim, d_model)),
            "router.choice_bias": Place("mlp.moe_statics.e_score_correction_bias", None, (1, experts.n)),
        }
        in_memory = {"router.choice_bias": Place("mlp.gate.moe_statics.e_score_correction_bias", None, (1, experts.n))}
        names = Names(inside, in_memory, left_out={r".*mtp": "the layers that predict several tokens are left out"})
        head = Head(bool(config.get("tie_word_embeddings")), 1.0, bias=bias)
        return decoder(self.model_type, config, tokens, layers, names, head=head)
