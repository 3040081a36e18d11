"""DeepSeek-V2: latent attention, softmax routers with groups, shared experts, first layers without experts."""

from __future__ import annotations

from moeconv.source.archs.config import Config
from moeconv.source.archs.deepseek import experts, latent, latent_names, no_more_predicted
from moeconv.source.archs.description import Description, Names, decoder
from moeconv.source.archs.errors import UnsupportedModel
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Tokens
from moert.pack.parts import Groups, Layer, Norm, Router


class DeepseekV2(Family):
    """See `Family`. Weights of experts are never made to sum to 1: transformers does not look at norm_topk_prob."""

    model_type = "deepseek_v2"
    model_class = "DeepseekV2ForCausalLM"

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.only(scoring_func=("softmax",), moe_layer_freq=(1,))
        config.must_be("norm_topk_prob", False, "transformers computes this family without it")
        config.without_effect("ep_size", "seq_aux", "aux_loss_alpha", "head_dim")
        bias, norm = bool(config.get("mlp_bias")), Norm(config.get("rms_norm_eps"))
        routed, dense = experts(config, _router(config), bias=bias), config.network("intermediate_size", bias=bias)
        layers = [
            Layer(norm, latent(config), None, dense if at < config.get("first_k_dense_replace") else routed)
            for at in range(config.get("num_hidden_layers"))
        ]
        names = Names(latent_names(config, pairs=True), left_out=no_more_predicted(config))
        return decoder(self.model_type, config, tokens, layers, names)


def _router(config: Config) -> Router:
    """Raises UnsupportedModel."""
    method, groups, best = config.get("topk_method"), config.get("n_group"), config.get("topk_group")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(
            f"config.json sets topk_method {method!r}: only greedy and group_limited_greedy can be packed"
        )
    return Router(
        config.get("num_experts_per_tok"), False, None, factor=float(config.get("routed_scaling_factor")),
        groups=Groups(groups, best, 1) if method == "group_limited_greedy" else None,
    )  # fmt: skip
