"""DeepSeek-V2: latent attention, softmax routers with groups, shared experts, first layers without experts."""

from __future__ import annotations

from moeconv.source.archs.config import Config
from moeconv.source.archs.deepseek import dense_first, experts, latent, latent_names, no_more_predicted
from moeconv.source.archs.description import Description, Names, decoder
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Groups, Norm, Router


class DeepseekV2(Family):
    """See `Family`. Weights of experts are never made to sum to 1: transformers ignores norm_topk_prob."""

    model_type = "deepseek_v2"
    model_class = "DeepseekV2ForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.only(scoring_func=("softmax",), moe_layer_freq=(1,))
        config.must_be("norm_topk_prob", False, "transformers computes this family without it")
        config.without_effect("ep_size", "seq_aux", "aux_loss_alpha", "head_dim")
        bias, norm = bool(config.get("mlp_bias")), Norm(config.get("rms_norm_eps"))
        routed, dense = experts(config, _router(config), bias=bias), config.network("intermediate_size", bias=bias)
        layers = [Layer(norm, latent(config), None, ffn) for ffn in dense_first(config, dense, routed)]
        names = Names(latent_names(config, pairs=True), left_out=no_more_predicted(config))
        return decoder(self.model_type, config, tokens, layers, names)


def _router(config: Config) -> Router:
    """Raises UnsupportedModel."""
    method = config.one_of("topk_method", ("greedy", "group_limited_greedy"))
    groups, best = config.get("n_group"), config.get("topk_group")
    return Router(
        config.count("num_experts_per_tok"), False, None, factor=config.number("routed_scaling_factor"),
        groups=Groups(groups, best, 1) if method == "group_limited_greedy" else None,
    )  # fmt: skip
