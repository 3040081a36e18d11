"""Switch Transformers (`SwitchTransformersForConditionalGeneration`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeconv.source.archs.config import Config, UnsupportedModel
from moeconv.source.archs.description import Description, Source
from moeconv.source.archs.family import Family, checked_start
from moert.pack.model_spec import STACKS, ExpertKey, Head, Layer, ModelSpec, Stack, StackName, Tokens, stack_of
from moert.pack.parts import Act, Attention, Buckets, Experts, Ffn, Norm, Router

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_PROJECTIONS = {"up": "wi", "down": "wo"}
_GATED = {"gate": "wi_0", "up": "wi_1", "down": "wo"}
_FFN_PLACE: Mapping[StackName, int] = {"encoder": 1, "decoder": 2}
_SAID_ELSEWHERE = (
    "feed_forward_proj", "num_sparse_encoder_layers", "num_sparse_decoder_layers", "add_router_probs",
    "router_ignore_padding_tokens", "is_decoder", "add_cross_attention",
)  # fmt: skip
_ATTENTION = {"attn": ("0", "SelfAttention"), "cross": ("1", "EncDecAttention")}


class SwitchTransformers(Family):
    """Layers are blocks of attention, in the decoder attention to the input, and feed-forward, each with its norm."""

    model_type = "switch_transformers"
    model_class = "SwitchTransformersForConditionalGeneration"
    towers: Mapping[StackName, str] = {"encoder": "encoder", "decoder": "decoder"}
    layer_list = "block"
    experts: Mapping[StackName, str] = {
        stack: f"{stack}.block.{{layer}}.layer.{place}.mlp.experts" for stack, place in _FFN_PLACE.items()
    }

    def describe(self, config: Config, tokens: Tokens) -> Description:
        _refuse(config)
        gated, tokens = _is_gated(config), checked_start(config, tokens)
        norm, tied = Norm(config.get("layer_norm_epsilon")), config.get("tie_word_embeddings")
        heads = config.count("num_heads")
        cross = Attention(
            heads, heads, config.count("d_kv"), scale=1.0, qk_norm=None, clip=None, rope=None, buckets=None
        )
        buckets = Buckets(config.get("relative_attention_num_buckets"), config.get("relative_attention_max_distance"))
        act: Any = config.one_of("dense_act_fn", ("relu", "silu", "gelu", "gelu_new"))
        attention, ffn = replace(cross, buckets=buckets), Ffn(config.count("d_ff"), Act(act), gated)
        router = Router(1, renormalise=False, capacity=config.get("expert_capacity"))
        experts = Experts(config.count("num_experts"), ffn, router)
        encoder, decoder = (
            [Layer(norm, attention, crossing, part) for part in (ffn, experts)] for crossing in (None, cross)
        )
        spec = ModelSpec(
            family=self.model_type,
            vocab_size=config.get("vocab_size"),
            d_model=config.count("d_model"),
            encoder=_stack(encoder, config.count("num_layers"), config.count("encoder_sparse_step", least=0), norm),
            decoder=_stack(
                decoder, config.count("num_decoder_layers"), config.count("decoder_sparse_step", least=0), norm
            ),
            ropes=(),
            head=Head(tied, config.count("d_model") ** -0.5 if tied else 1.0),
            tokens=tokens,
            max_positions=None,
        )
        if config.get("is_full_sparse") and len(spec.experts) < sum(map(len, spec.stacks.values())):
            raise UnsupportedModel(
                f"config.json sets is_full_sparse True, and only {len(spec.experts)} of "
                f"{sum(map(len, spec.stacks.values()))} layers would have experts: set num_decoder_layers, "
                "encoder_sparse_step and decoder_sparse_step to what the weights are"
            )
        names, others = _names(spec), ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
        copies = tuple(("shared.weight", other) for other in (*others, *(["lm_head.weight"] if tied else [])))
        backbone = {canonical: Source(name) for canonical, name in names.items()}

        def of_expert(key: ExpertKey, projection: str) -> Source:
            return Source(f"{self._expert(key)}.{_modules(gated)[projection]}.weight")

        return Description(spec, backbone, of_expert, backbone, copies=copies, repeated=copies)

    def _expert(self, key: ExpertKey) -> str:
        return f"{self.experts[key.stack].format(layer=key.layer)}.expert_{key.expert}"

    def load(self, path: Path, dtype: torch.dtype) -> nn.Module:
        with self._networks(path):
            return super().load(path, dtype)

    def empty(self, config_dir: Path) -> nn.Module:
        with self._networks(config_dir):
            return super().empty(config_dir)

    @contextmanager
    def _networks(self, path: Path) -> Iterator[None]:
        """Makes transformers, inside a with block, build networks with gates for a model that has them. By itself it
        ignores the setting for all Switch models; T5's gated networks take their place."""
        from transformers.models.switch_transformers import modeling_switch_transformers as switch
        from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

        class Gated(T5DenseGatedActDense):
            wi = property(lambda self: self.wi_0)  # asked for when weights are drawn that are never used

        config = self._config_class.from_pretrained(path, local_files_only=True)
        before = switch.SwitchTransformersDenseActDense
        if getattr(config, "is_gated_act", False):
            switch.SwitchTransformersDenseActDense = Gated  # type: ignore[assignment, misc]
        try:
            yield
        finally:
            switch.SwitchTransformersDenseActDense = before  # type: ignore[misc]

    def prepared(self, model: nn.Module) -> nn.Module:
        """Lets every layer of a tower compute the position bias. By itself only the first layer does, for all of them;
        now a tower cut to its last layers gives the same results as a whole one."""
        for stack in STACKS:
            blocks = model.get_submodule(f"{stack}.block")
            attentions = [block.get_submodule("layer.0.SelfAttention") for block in blocks.children()]
            bias = attentions[0].get_submodule("relative_attention_bias")
            for attention in attentions[1:]:
                # not registered as a part of the module, or the weights would be listed twice
                attention.__dict__ |= {"has_relative_attention_bias": True, "relative_attention_bias": bias}
        return model

    def resumed(self, layers: Sequence[nn.Module], start: int, stop: int | None = None) -> list[nn.Module]:
        return list(layers[start:stop])

    def routed(self, selected: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        dispatch = selected[:, 0]  # [tokens, num_experts], one-hot, all zero where the expert was full
        chosen: Tensor = dispatch.argmax(-1).masked_fill(dispatch.sum(-1) == 0, -1)
        return chosen[:, None], weights

    def expert_weight(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        modules = model.get_submodule(self._expert(key))
        return modules.get_parameter(f"{_modules(hasattr(modules, 'wi_1'))[projection]}.weight").detach()


def _names(spec: ModelSpec) -> dict[str, str]:
    """Returns canonical names of the backbone → the family's own."""
    names = {"embed.weight": "shared.weight"}
    if not spec.head.tied:
        names["head.weight"] = "lm_head.weight"
    for name, stack in spec.stacks.items():
        names[f"{name}.norm.weight"] = f"{name}.final_layer_norm.weight"
        first = f"{name}.block.0.layer.0.SelfAttention"
        names[f"{name}.relative_bias.weight"] = f"{first}.relative_attention_bias.weight"
        for layer in range(len(stack)):
            part = stack[layer].ffn
            assert part is not None
            names |= _layer_names(name, layer, part)
    return names


def _modules(gated: bool) -> Mapping[str, str]:
    """Returns projection → module of a network."""
    return _GATED if gated else _PROJECTIONS


def _is_gated(config: Config) -> bool:
    """Returns whether networks have gates, from is_gated_act, which `feed_forward_proj` repeats. Raises
    UnsupportedModel if they differ."""
    gated, said = config.get("is_gated_act") or False, config.get("feed_forward_proj")
    if not isinstance(gated, bool) or (isinstance(said, str) and said.startswith("gated-") != gated):
        raise UnsupportedModel(
            f"config.json sets is_gated_act {gated!r} and feed_forward_proj {said!r}: they should say the same"
        )
    return gated


def _refuse(config: Config) -> None:
    """Raises UnsupportedModel for settings that a pack can't describe. Settings without effect: `num_sparse_…` repeat
    the steps, and the model sets `is_decoder` and `add_cross_attention` of each stack itself."""
    config.only(router_type=("tokens_masked",), num_selected_experts=(1,), batch_prioritized_routing=(False,))
    config.must_be("router_bias", False, "routers with a bias can't be packed")
    config.must_be("router_dtype", "float32", "only float32 routers can be packed")
    if (capacity := config.get("expert_capacity")) < 1:
        raise UnsupportedModel(f"config.json sets expert_capacity {capacity}: it should be at least 1")
    config.without_effect(*_SAID_ELSEWHERE)


def _stack(kinds: Sequence[Layer], n_layers: int, sparse_step: int, norm: Norm) -> Stack:
    """Returns a stack of layers of two `kinds`, without experts and with. Every `sparse_step`-th layer has experts,
    beginning with the second of each run; 0 means none."""
    layers = [int(sparse_step > 0 and (sparse_step == 1 or i % sparse_step == 1)) for i in range(n_layers)]
    return stack_of([kinds[kind] for kind in layers], norm)


def _layer_names(stack: StackName, layer: int, part: Ffn | Experts) -> dict[str, str]:
    at, block = f"{stack}.{layer}", f"{stack}.block.{layer}.layer"
    names: dict[str, str] = {}
    for each in ("attn", "cross") if stack == "decoder" else ("attn",):
        place, module = _ATTENTION[each]
        names[f"{at}.{'mixer' if each == 'attn' else each}_norm.weight"] = f"{block}.{place}.layer_norm.weight"
        for matrix in "qkvo":
            names[f"{at}.{each}.{matrix}.weight"] = f"{block}.{place}.{module}.{matrix}.weight"
    ffn = f"{block}.{_FFN_PLACE[stack]}"
    names[f"{at}.ffn_norm.weight"] = f"{ffn}.layer_norm.weight"
    if isinstance(part, Experts):
        names[f"{at}.router.weight"] = f"{ffn}.mlp.router.classifier.weight"
    else:
        for projection, module in _modules(part.gated).items():
            names[f"{at}.ffn.{projection}.weight"] = f"{ffn}.mlp.{module}.weight"
    return names
