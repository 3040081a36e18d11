"""gpt-oss: sinks and windows, biases everywhere, experts with bounded gates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moeconv.source.archs.coding import scheme_of
from moeconv.source.archs.config import Config
from moeconv.source.archs.description import Description, Names, Source, decoder, in_turn, rows, transposed
from moeconv.source.archs.family import Family
from moert.pack.model_spec import ExpertKey, Layer, Tokens
from moert.pack.parts import Act, Experts, Ffn, Norm, Router

if TYPE_CHECKING:
    from torch import Tensor, nn

_OF_PAIRS = {"gate": rows(0, None, 2), "up": rows(1, None, 2)}
"""Gate and up lie row by row, one after the other."""


class GptOss(Family):
    """See `Family`."""

    model_type = "gpt_oss"
    model_class = "GptOssForCausalLM"
    reads_mxfp4 = True

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("hidden_act", "initial_context_length")
        top_k, norm = config.count("num_experts_per_tok"), Norm(config.get("rms_norm_eps"))
        config.only(experts_per_token=(top_k,))
        biases = config.biases("attention_bias", "qkvo")
        act = Act("silu", config.get("swiglu_limit"), slope=config.get("swiglu_alpha"), plus=1.0)
        network = Ffn(config.count("intermediate_size"), act, gated=True, bias=True)
        n = config.count("num_local_experts", "num_experts")
        experts = Experts(n, network, Router(top_k, True, None, bias=True))
        layers = [
            Layer(norm, config.attention(biases=biases, window=window, sinks=True), None, experts)
            for window in config.windows()
        ]
        coded = scheme_of(config.quantization) is not None
        d_ff, d_model = network.d_ff, config.count("hidden_size")

        def of_expert(layer: int, expert: int, projection: str) -> Source:
            at, view = f"layers.{layer}.mlp.experts", _OF_PAIRS.get(projection)
            name = f"{at}.{'down' if view is None else 'gate_up'}_proj"
            shape = (d_model, d_ff) if view is None else (2 * d_ff, d_model)
            if coded:
                return Source(name, expert, view, shape)
            turned = transposed if view is None else in_turn(transposed, view)
            return Source(name, expert, turned, shape[::-1])

        def of_bias(layer: int, expert: int, projection: str) -> Source:
            at, view = f"layers.{layer}.mlp.experts", _OF_PAIRS.get(projection)
            name = f"{at}.{'down' if view is None else 'gate_up'}_proj_bias"
            return Source(name, expert, view, (d_model,) if view is None else (2 * d_ff,))

        names = Names({"router": "mlp.router"}, {}, of_expert, of_bias)
        return decoder(self.model_type, config, tokens, layers, names)

    def expert_weight(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        return self._part(model, key, projection, "").T

    def expert_bias(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        return self._part(model, key, projection, "_bias")

    def _part(self, model: Any, key: ExpertKey, projection: str, suffix: str) -> Tensor:
        """Returns a view of an expert's parameter. [..., out_features]"""
        experts, name = self.experts_module(model, key.at), "down_proj" if projection == "down" else "gate_up_proj"
        found = experts.get_parameter(name + suffix).detach()[key.expert]
        return found if projection == "down" else found[..., ("gate", "up").index(projection) :: 2]
