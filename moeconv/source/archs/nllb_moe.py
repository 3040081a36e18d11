"""NLLB-MoE (`NllbMoeForConditionalGeneration`): translation, with positions added to embeddings, biases everywhere, and
two experts for each token. It is compared with transformers 4.57: version 5 runs the wrong experts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from moeconv.source.archs.config import Config, UnsupportedModel
from moeconv.source.archs.description import Description, Source
from moeconv.source.archs.family import Family, checked_start
from moert.pack.codec import F32
from moert.pack.model_spec import STACKS, ExpertKey, Head, Layer, ModelSpec, Stack, StackName, Tokens, stack_of
from moert.pack.parts import Attention, Experts, Ffn, Norm, PositionTable, Router

if TYPE_CHECKING:
    from torch import Tensor, nn

_NORM = Norm(1e-5, "layer")  # transformers has no setting for it
_SLOWEST = 10000.0  # wavelength of positions, over 2π
_MOST_POSITIONS, _MOST_NUMBERS = 65535, 1 << 28
# Of training; nothing is dropped where an expert may take all tokens (see _router), and no padding is packed.
_IDLE = (
    "activation_dropout", "batch_prioritized_routing", "decoder_layerdrop", "dropout", "encoder_layerdrop",
    "expert_capacity", "init_std", "max_length", "normalize_router_prob_before_dropping",
    "router_ignore_padding_tokens",
)  # fmt: skip
_PROJECTIONS = {"up": "fc1", "down": "fc2"}
_LAYER = re.compile(r"(encoder|decoder)\.(\d+)\.(.+)\.(weight|bias)")
_INSIDE = {
    "mixer_norm": "self_attn_layer_norm", "cross_norm": "cross_attention_layer_norm", "ffn_norm": "ff_layer_norm",
    "router": "ffn.router.classifier", **{f"ffn.{name}": f"ffn.{module}" for name, module in _PROJECTIONS.items()},
    **{
        f"{part}.{matrix}": f"{module}.{'out' if matrix == 'o' else matrix}_proj"
        for part, module in (("attn", "self_attn"), ("cross", "cross_attention"))
        for matrix in "qkvo"
    },
}  # fmt: skip


class NllbMoe(Family):
    """Layers are norm and attention, in the decoder norm and attention to the input, norm and feed-forward."""

    model_type = "nllb-moe"
    model_class = "NllbMoeForConditionalGeneration"
    towers: Mapping[StackName, str] = {stack: f"model.{stack}" for stack in STACKS}
    experts: Mapping[StackName, str] = {stack: f"model.{stack}.layers.{{layer}}.ffn.experts" for stack in STACKS}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect(*_IDLE)
        config.only(router_type=("tokens_masked",))
        config.must_be("router_dtype", "float32", "only float32 routers can be packed")
        d_model, vocab = config.count("d_model", "hidden_size", least=4), config.count("vocab_size")
        pad = config.get("pad_token_id")
        if isinstance(pad, bool) or not isinstance(pad, int) or not 0 <= pad < vocab:
            raise UnsupportedModel(f"config.json sets pad_token_id {pad!r}: it should be an id of the vocabulary")
        router, tied = _router(config), bool(config.get("tie_word_embeddings"))
        positions = PositionTable(config.count("max_position_embeddings"), skips_pad=True)
        if positions.n > _MOST_POSITIONS or positions.n * d_model > _MOST_NUMBERS:
            raise UnsupportedModel(
                f"config.json sets max_position_embeddings {positions.n}: their table would be too large to be packed"
            )
        encoder, decoder = (_stack(config, name, d_model, router, positions) for name in STACKS)
        spec = ModelSpec(
            family=self.model_type,
            vocab_size=vocab,
            d_model=d_model,
            encoder=encoder,
            decoder=decoder,
            ropes=(),
            head=Head(tied, 1.0),
            tokens=replace(checked_start(config, tokens), pad=pad),
            max_positions=positions.n,
            embed_scale=math.sqrt(d_model) if config.get("scale_embedding") else 1.0,
        )
        computed = {f"{name}.positions.weight": waves(positions.n, pad + 1, d_model) for name in STACKS}
        backbone = {name: Source(_name(name)) for name in spec.tensors if name not in computed}
        others = [f"model.{stack}.embed_tokens.weight" for stack in STACKS] + (["lm_head.weight"] if tied else [])
        copies = tuple(("model.shared.weight", other) for other in others)
        return Description(
            spec, backbone, self._expert, backbone, computed, copies, copies, partial(self._expert, of="bias")
        )

    def _expert(self, key: ExpertKey, projection: str, of: str = "weight") -> Source:
        experts = self.experts[key.stack].format(layer=key.layer)
        return Source(f"{experts}.expert_{key.expert}.{_PROJECTIONS[projection]}.{of}")

    def prepared(self, model: nn.Module) -> nn.Module:
        """Makes tokens pass the experts of their own router, as in transformers 4.57; in version 5 all pass the experts
        0 and 1. The router's weights get the share that dropout leaves, and a decoder counts the tokens of a whole text
        as it does one by one."""
        config: Any = model.get_submodule("model").config
        share = 1 - config.moe_token_dropout
        for stack in STACKS:
            for layer in self.tower(model, stack).layers:  # type: ignore[union-attr]
                if layer.is_sparse:
                    layer.ffn.router.register_forward_hook(partial(_weighed, share))
                    layer.ffn.experts.forward = partial(_run, layer.ffn.experts)
        places: Any = self.tower(model, "decoder").embed_positions
        places.create_position_ids_from_input_ids = _decoder_places
        return model

    @contextmanager
    def resuming(self, tower: nn.Module) -> Iterator[None]:
        positions: Any = tower.embed_positions
        positions.forward = lambda _ids, hidden, *_: hidden.new_zeros(hidden.shape)
        try:
            yield
        finally:
            del positions.forward

    def routed(self, selected: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        top, chosen = weights.topk(2, dim=-1)  # of [tokens, num_experts], 0 for others and for padding
        return chosen.masked_fill(top == 0, -1), top

    def expert_weight(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        return model.get_parameter(self._expert(key, projection).name).detach()

    def expert_bias(self, model: nn.Module, key: ExpertKey, projection: str) -> Tensor:
        return model.get_parameter(self._expert(key, projection, "bias").name).detach()


def _router(config: Config) -> Router:
    """Returns the router of all layers. Raises UnsupportedModel."""
    config.one_of("second_expert_policy", ("all",))
    config.allowed["moe_eval_capacity_token_fraction"] = ("1 and more",)
    if not (fraction := config.number("moe_eval_capacity_token_fraction")) >= 1:
        raise UnsupportedModel(
            f"config.json sets moe_eval_capacity_token_fraction {fraction!r}: an expert would take no more tokens than "
            "that share of all that are read at once, so that an answer would depend on other requests; set 1.0"
        )
    dropout = config.get("moe_token_dropout")
    if not 0 <= dropout < 1:
        raise UnsupportedModel(f"config.json sets moe_token_dropout {dropout!r}: it should be from 0 on and below 1")
    return Router(2, True, None, bias=bool(config.get("router_bias")), factor=1.0 - dropout)


def _stack(config: Config, name: StackName, d_model: int, router: Router, positions: PositionTable) -> Stack:
    """Returns a stack; the last of every `…_sparse_step` layers has experts, none with 0 or less. Raises
    UnsupportedModel."""
    aliases = {"layers": "num_hidden_layers", "attention_heads": "num_attention_heads"} if name == "encoder" else {}
    n_layers, heads = (config.count(f"{name}_{what}", *_of(aliases, what)) for what in ("layers", "attention_heads"))
    if d_model % heads:
        raise UnsupportedModel(
            f"config.json sets {name}_attention_heads {heads} for d_model {d_model}: the first does not divide "
            "the second"
        )
    dim = d_model // heads
    attention = Attention(heads, heads, dim, dim**-0.5, None, None, rope=None, buckets=None, biases="qkvo")
    cross = attention if name == "decoder" else None
    ffn = Ffn(config.count(f"{name}_ffn_dim"), config.activation("activation_function"), gated=False, bias=True)
    experts, step = Experts(config.count("num_experts", least=2), ffn, router), config.get(f"{name}_sparse_step")
    dense, sparse = (Layer(_NORM, attention, cross, part) for part in (ffn, experts))
    layers = [sparse if step > 0 and (layer + 1) % step == 0 else dense for layer in range(n_layers)]
    return replace(stack_of(layers, _NORM), positions=positions)


def _of(aliases: Mapping[str, str], what: str) -> list[str]:
    return [aliases[what]] if what in aliases else []


def _name(canonical: str) -> str:
    """Returns the family's own name of a canonical one."""
    if (found := _LAYER.fullmatch(canonical)) is not None:
        stack, layer, part, last = found.groups()
        return f"model.{stack}.layers.{layer}.{_INSIDE[part]}.{last}"
    if canonical in ("embed.weight", "head.weight"):
        return "model.shared.weight" if canonical == "embed.weight" else "lm_head.weight"
    stack, _, last = canonical.split(".")
    return f"model.{stack}.layer_norm.{last}"


def waves(n: int, start: int, features: int) -> F32:
    """Returns sines of positions from `start` on, then cosines, [n, features]; of an odd number of features the last is
    0."""
    half = features // 2
    exponents = np.arange(half, dtype=np.float32) * np.float32(-math.log(_SLOWEST) / (half - 1))
    rates = np.exp(exponents.astype(np.float64)).astype(np.float32)
    angles = (np.arange(start, start + n, dtype=np.float32)[:, None] * rates).astype(np.float64)
    table = [np.sin(angles), np.cos(angles), np.zeros((n, features % 2))]
    return np.concatenate(table, axis=1).astype(np.float32)


def _weighed(share: float, _router: nn.Module, _inputs: Any, said: Any) -> Any:
    first, weights, logits = said
    return first, weights * share, logits


def _run(experts: nn.ModuleDict, x: Tensor, _: Tensor, weights: Tensor) -> Tensor:
    """Returns the sum of weights times experts' outputs [tokens, d_model], for x [tokens, d_model] and weights [tokens,
    num_experts]."""
    found = x.new_zeros(x.shape)
    for number in range(weights.shape[1]):
        tokens = weights[:, number].nonzero()[:, 0]
        found.index_add_(0, tokens, experts[f"expert_{number}"](x[tokens]) * weights[tokens, number, None])
    return found


def _decoder_places(ids: Tensor, pad: int, past: int = 0) -> Tensor:
    """Returns the rows of the table of positions for ids [rows, tokens] after `past` others; the pad token has its
    own."""
    return (ids.new_ones(ids.shape[1]).cumsum(0) + past) * ids.ne(pad) + pad
