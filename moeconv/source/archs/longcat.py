"""LongCat-Flash: each layer is two of a pack, with latent attention and a dense network each. Experts of the first take
a shortcut past the second, and their router also chooses numbers that return their input."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moeconv.source.archs.config import Config
from moeconv.source.archs.deepseek import MORE_PREDICTED, latent, latent_names
from moeconv.source.archs.description import Description, Inside, Names, Place, Source, decoder
from moeconv.source.archs.family import Family
from moert.pack.model_spec import Layer, Tokens
from moert.pack.parts import Experts, Norm, Router

if TYPE_CHECKING:
    from torch import Tensor, nn

_NEVER_RUN = "matrices of choices that return their input are left out: no model runs them"


class LongcatFlash(Family):
    """LongCat-Flash: see above. Queries and the features that tokens leave are multiplied by factors; a pack has them
    in the scale of scores and in the norm of these features."""

    model_type = "longcat_flash"
    model_class = "LongcatFlashForCausalLM"
    loads_by_names = False
    parts = 2

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.only(
            attention_method=("MLA",), zero_expert_type=("identity",), mla_scale_q_lora=(True,),
            mla_scale_kv_lora=(True,), norm_topk_prob=(False,), router_bias=(False,),
        )  # fmt: skip
        config.get("num_hidden_layers", "num_layers")
        d_model, asked = config.count("hidden_size"), config.count("q_lora_rank")
        attention = latent(config)
        config.must_be("head_dim", attention.turning, "transformers turns as many features, qk_rope_head_dim of a head")
        attention = replace(attention, scale=attention.scale * (d_model / asked) ** 0.5)
        router = Router(
            config.count("moe_topk", "num_experts_per_tok"), False, None, choice_bias=True,
            factor=config.number("routed_scaling_factor"), identities=config.count("zero_expert_num", least=0),
        )  # fmt: skip
        dense = config.network("ffn_hidden_size")
        n = config.count("n_routed_experts", "num_local_experts")
        routed = Experts(n, config.network("expert_ffn_hidden_size"), router, dense, shortcut=True)
        config.get("ffn_hidden_size", "intermediate_size")
        config.get("expert_ffn_hidden_size", "moe_intermediate_size")
        norm = Norm(config.get("rms_norm_eps"))
        both = Layer(norm, attention, None, routed), Layer(norm, attention, None, dense)
        unused = "|".join(map(str, range(n, n + router.identities)))
        left_out = {rf"model\.layers\.\d+\.mlp\.experts\.({unused})\.": _NEVER_RUN} if unused else {}
        names = Names(
            _inside(latent_names(config, pairs=True), (d_model / attention.kv_rank) ** 0.5), expert=_of_expert,
            left_out={**left_out, r"model\.mtp\.": MORE_PREDICTED}, parts=self.parts,
        )  # fmt: skip
        return decoder(self.model_type, config, tokens, both * config.count("num_layers"), names)

    def prepared(self, model: nn.Module) -> nn.Module:
        """Makes each router call the module of its matrix, so that others hear its input."""
        for module in model.modules():
            if type(module).__name__ == "LongcatFlashTopkRouter":
                module.register_forward_pre_hook(_announced)
        return model


def _announced(router: Any, given: tuple[Tensor, ...]) -> None:
    router.classifier(given[0].float())


def _inside(attention: Inside, factor: float) -> Inside:
    """Returns the places within a layer of the model; `factor`: of the features that a token leaves."""

    def of_part(place: str | Place) -> Place:
        found = place if isinstance(place, Place) else Place(place)
        return found._replace(name=found.name.replace("self_attn.", "self_attn.{part}."))

    networks = {
        f"{of}.{name}": f"mlps.{{part}}.{name}_proj" for of in ("ffn", "shared") for name in ("gate", "up", "down")
    }
    return {
        **{name: of_part(place) for name, place in {**attention, "attn.o": "self_attn.o_proj"}.items()}, **networks,
        "attn.kv_norm": Place("self_attn.{part}.kv_a_layernorm", factor=factor),
        "mixer_norm": "input_layernorm.{part}", "ffn_norm": "post_attention_layernorm.{part}",
        "router": "mlp.router.classifier", "router.choice_bias": "mlp.router.e_score_correction_bias",
    }  # fmt: skip


def _of_expert(layer: int, expert: int, projection: str) -> Source:
    return Source(f"layers.{layer // 2}.mlp.experts.{expert}.{projection}_proj.weight")
