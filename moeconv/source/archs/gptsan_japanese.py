"""GPTSAN-japanese (`GPTSanJapaneseForConditionalGeneration`): Switch experts with a projection beside them, norms
behind each half, and prompts whose tokens before the first separator see each other (`prefix_text` in its tokenizer,
all of whose rules follow from the separator's place). It is compared with transformers 4.57.6, as version 5 lacks its
class. Its tokenizer is a program that no tokenizer.json can replace: text is token ids, as numbers with spaces between,
for conversions and packs alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeconv.source.archs.config import Config, UnsupportedModel
from moeconv.source.archs.description import Description, Source
from moeconv.source.archs.family import Family, torch_later
from moert.pack.model_spec import MOST_LAYERS, ExpertKey, Head, Join, Layer, ModelSpec, StackName, Tokens, stack_of
from moert.pack.parts import Act, Attention, Experts, Ffn, Norm, PositionTable, Router

if TYPE_CHECKING:
    from torch import Tensor, nn

_MOST_POSITIONS = 65535
_IDLE = ("router_ignore_padding_tokens", "d_spout", "do_sample", "top_k", "unk_token_id", "num_contexts")
_LEFT_OUT = {r"model\.spout\.": "the weights that make keys of a spout vector are left out: answers are those without"}
_LAYER = re.compile(r"decoder\.(\d+)\.(.+)\.(weight|bias)")
_INSIDE = {
    "positions": "positions", "mixer_after": "norm", "ffn_after": "network.norm", "router": "network.router",
    "bypass": "network.bypass", "ffn.up": "network.wi", "ffn.down": "network.wo",
    **{f"attn.{matrix}": f"attention.{'out' if matrix == 'o' else matrix}_proj" for matrix in "qkvo"},
}  # fmt: skip
_STORED_INSIDE = {
    "mixer_after": "self_attn.norm", "ffn_after": "feed_forward.norm", "router": "feed_forward.mlp.router.classifier",
    "bypass": "feed_forward.soft_bypass_mlp", "ffn.up": "feed_forward.mlp.wi", "ffn.down": "feed_forward.mlp.wo",
    **{f"attn.{matrix}": f"self_attn.self_attn.{'out' if matrix == 'o' else matrix}_proj" for matrix in "qkvo"},
}  # fmt: skip
_OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight", "decoder.positions.weight": "model.positions.weight",
    "head.project.weight": "model.project.weight", "head.project.bias": "model.project.bias",
    "head.bias": "lm_head.bias",
}  # fmt: skip
_STORED_OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight", "decoder.positions.weight": "model.position_embeddings.weight",
    "head.project.weight": "model.last_project.weight", "head.project.bias": "model.last_project.bias",
}  # fmt: skip
_NO_ID = "a word that is no token id"
_STORED_EXPERT = {"up": "wi", "down": "wo"}


class GptsanJapanese(Family):
    """See `Family`. Layers with experts, and perhaps some without behind them. The model is a module of our own."""

    model_type = "gptsan-japanese"
    model_class = "GptsanJapanese"
    towers: Mapping[StackName, str] = {"decoder": "model"}
    layer_list = "blocks"
    by_layers = False
    loads_by_names = False
    experts: Mapping[StackName, str] = {"decoder": "model.blocks.{layer}.network.experts"}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect(*_IDLE)
        config.must_be("router_dtype", "float32", "only float32 routers can be packed")
        config.must_be("tie_word_embeddings", True, "its head is its embedding")
        vocab, d_model = config.count("vocab_size"), config.count("d_model", "hidden_size")
        positions = PositionTable(config.count("max_position_embeddings"))
        if positions.n > _MOST_POSITIONS:
            raise UnsupportedModel(f"config.json sets max_position_embeddings {positions.n}: {_MOST_POSITIONS} at most")
        stack = stack_of(_layers(config, d_model, positions), None)
        spec = ModelSpec(
            family=self.model_type,
            vocab_size=vocab,
            d_model=d_model,
            encoder=None,
            decoder=replace(stack, positions=positions),
            ropes=(),
            head=Head(True, 1.0, bias=True, projected=True),
            tokens=replace(tokens, first=None, prefix_end=_separator(config, vocab)),
            max_positions=positions.n,
        )
        backbone = {name: _stored(name, vocab) for name in spec.tensors}
        parameters = {name: Source(_own(name)) for name in spec.tensors}
        copies = (("model.embed_tokens.weight", "lm_head.weight"),)
        return Description(spec, backbone, _expert, parameters, copies=copies, left_out=_LEFT_OUT)

    def empty(self, config_dir: Path) -> nn.Module:
        config = self._config_class.from_pretrained(config_dir, local_files_only=True)
        import torch

        with torch.device("meta"):
            model = self._class(config)
        model.to_empty(device="cpu").tie()
        found: nn.Module = model.float().requires_grad_(False).eval()
        return found

    def spelled(self, spec: ModelSpec) -> str:
        """Returns a tokenizer.json for text that is token ids as numbers: the model's own tokenizer follows rules that
        a tokenizer.json can't state. Other words get an id that the model lacks, so that text with them is refused."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        ids = {str(token): token for token in range(spec.vocab_size)}
        tokenizer = Tokenizer(models.WordLevel({**ids, _NO_ID: spec.vocab_size}, _NO_ID))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return str(tokenizer.to_str())

    def expert_weight(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        return self.experts_module(model, key.at).get_parameter(projection).detach()[key.expert]

    @property
    def _config_class(self) -> Any:
        with torch_later():
            from moeconv.source.gptsan_config import GptsanJapaneseConfig
        return GptsanJapaneseConfig

    @property
    def _class(self) -> Any:
        from moeconv.source import gptsan_japanese

        return gptsan_japanese.GptsanJapanese


def _layers(config: Config, d_model: int, positions: PositionTable) -> list[Layer]:
    """Returns the layers. Raises UnsupportedModel."""
    heads, eps = config.count("num_heads", "num_attention_heads"), config.number("layer_norm_epsilon")
    if d_model % heads:
        raise UnsupportedModel(
            f"config.json sets num_heads {heads} for d_model {d_model}: the first does not divide the second"
        )
    dim, after = d_model // heads, Join(Norm(eps, "layer"))
    attention = Attention(heads, heads, dim, dim**-0.5, None, None, rope=None, buckets=None)
    router = Router(
        1, False, config.count("expert_capacity"), bias=bool(config.get("router_bias")), overflow="itself"
    )  # fmt: skip
    ffn = Ffn(config.count("d_ff"), Act("relu"), gated=False)
    sparse = Layer(
        None, attention, None, Experts(config.count("num_experts"), ffn, router, bypass=True), after, after
    )  # fmt: skip
    dense = replace(sparse, ffn=Ffn(config.count("d_ext"), Act("silu"), gated=False, bias=True))
    switched, extra = config.count("num_switch_layers"), config.count("num_ext_layers", least=0)
    if switched + extra > MOST_LAYERS:
        raise UnsupportedModel(f"config.json sets {switched} + {extra} layers: {MOST_LAYERS} at most can be packed")
    if (said := config.get("num_layers", "num_hidden_layers")) != switched + extra:
        raise UnsupportedModel(
            f"config.json sets num_layers {said!r}, num_switch_layers and num_ext_layers {switched} + {extra}: they "
            "should say the same"
        )
    return [sparse] * switched + [replace(dense, positions=positions)][:extra] + [dense] * (extra - 1)


def _separator(config: Config, vocab: int) -> int | None:
    """Returns the id of the separator; None if it is no token of the vocabulary. Raises UnsupportedModel."""
    found = config.get("separator_token_id")
    if found is None or (isinstance(found, int) and not isinstance(found, bool) and found >= vocab):
        return None
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise UnsupportedModel(f"config.json sets separator_token_id {found!r}: it should be an id of the vocabulary")
    return found


def _expert(key: ExpertKey, projection: str) -> Source:
    at = f"model.blocks.{key.layer}.feed_forward.mlp.experts.expert_{key.expert}"
    return Source(f"{at}.{_STORED_EXPERT[projection]}.weight")


def _stored(canonical: str, vocab: int) -> Source:
    """Returns the source of a canonical tensor in a checkpoint."""
    if canonical == "head.bias":
        return Source("final_logits_bias", shape=(1, vocab))
    if (found := _LAYER.fullmatch(canonical)) is None:
        return Source(_STORED_OUTSIDE[canonical])
    layer, part, last = found.groups()
    if part == "positions":
        return Source("model.extra_position_embeddings.weight")
    return Source(f"model.blocks.{layer}.{_STORED_INSIDE[part]}.{last}")


def _own(canonical: str) -> str:
    """Returns the name of a canonical tensor in the module."""
    if (found := _LAYER.fullmatch(canonical)) is None:
        return _OUTSIDE[canonical]
    layer, part, last = found.groups()
    return f"model.blocks.{layer}.{_INSIDE[part]}.{last}"
