"""OPT: a dense decoder with learnt positions, LayerNorms and biases; each layer's network is packed as its only expert.
Galactica is the same with gelu. A checkpoint without safetensors gets them when transformers'
save_pretrained writes the model anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moeconv.source.archs.config import Config, UnsupportedModel
from moeconv.source.archs.dense import NO_ROUTERS, Dense, alone
from moeconv.source.archs.description import Description, Inside, Names, Place, decoder, named, rows
from moert.pack.model_spec import Layer, StackName, Tokens, stack_of
from moert.pack.parts import Attention, Ffn, Norm, PositionTable

if TYPE_CHECKING:
    from torch import nn

_NORM = Norm(1e-5, "layer")  # transformers has no setting for it
_MOST_POSITIONS = 65535
_FIRST_ROW = 2  # of the table of positions: the rows before belong to no position
_IDLE = ("activation_dropout", "dropout", "init_std", "layerdrop", "prefix")
_MATRICES = {"up": "fc1", "down": "fc2"}
_INSIDE: Inside = {
    "mixer_norm": "self_attn_layer_norm", "ffn_norm": "final_layer_norm", "attn.o": "self_attn.out_proj",
}  # fmt: skip
_NORMS = ("norm.weight", "norm.bias")
_BEFORE = "only layers with their norms before attention and network can be packed, as all but OPT-350m have"


class Opt(Dense):
    """See `Dense`."""

    model_type = "opt"
    model_class = "OPTForCausalLM"
    towers: Mapping[StackName, str] = {"decoder": "model.decoder"}
    experts: Mapping[StackName, str] = {"decoder": "model.decoder.layers.{layer}.fc1.experts"}
    projections: Mapping[str, str] = {"up": "0", "down": "2"}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect(*_IDLE)
        config.must_be("do_layer_norm_before", True, _BEFORE)
        d_model, n_layers = config.count("hidden_size"), config.count("num_hidden_layers")
        config.must_be("word_embed_proj_dim", d_model, "only embeddings of hidden_size can be packed")
        bias, learnt = bool(config.get("enable_bias")), bool(config.get("layer_norm_elementwise_affine"))
        ffn = Ffn(config.count("ffn_dim"), config.activation("activation_function"), gated=False, bias=bias)
        layer = Layer(_NORM, _attention(config, d_model), None, alone(ffn))
        layers, positions = [layer] * n_layers, PositionTable(config.count("max_position_embeddings"))
        if positions.n > _MOST_POSITIONS:
            raise UnsupportedModel(f"config.json sets max_position_embeddings {positions.n}: {_MOST_POSITIONS} at most")
        norm = None if config.get("_remove_final_layer_norm") else _NORM
        table = Place("embed_positions", rows(_FIRST_ROW), (positions.n + _FIRST_ROW, d_model))
        weights, biases = (named("{projection}", _MATRICES, last) for last in ("weight", "bias"))
        names = Names(
            _INSIDE, {}, weights, biases if bias else None, root="model.decoder.", model="model.decoder.",
            outside={"decoder.norm": "final_layer_norm", "decoder.positions": table},
            ones=() if learnt else _NORMS[:1], zeros=(*NO_ROUTERS, *(() if learnt else _NORMS[1:])),
            other_root="decoder.",
        )  # fmt: skip
        stack = replace(stack_of(layers, norm), positions=positions)
        return decoder(self.model_type, config, tokens, layers, names, ropes=[], decoder=stack)

    def prepared(self, model: nn.Module) -> nn.Module:
        from torch import nn

        from moeconv.source.archs.modules import Alone

        for layer in self.layers(model):
            layer.fc1 = Alone(nn.Sequential(layer.fc1, layer.activation_fn, layer.fc2))
            layer.activation_fn, layer.fc2 = nn.Identity(), nn.Identity()
        return model

    @contextmanager
    def resuming(self, tower: nn.Module) -> Iterator[None]:
        """Keeps the tower from adding positions to hidden states, which have theirs already, inside a with block."""
        import torch

        positions: Any = tower.get_submodule("embed_positions")
        positions.forward = lambda *_, **__: torch.zeros(())
        try:
            yield
        finally:
            del positions.forward


def _attention(config: Config, d_model: int) -> Attention:
    """Returns the attention of all layers. Raises UnsupportedModel."""
    heads = config.count("num_attention_heads")
    if d_model % heads:
        raise UnsupportedModel(
            f"config.json sets num_attention_heads {heads} for hidden_size {d_model}: the first does not "
            "divide the second"
        )
    dim, biases = d_model // heads, config.biases("enable_bias", "qkvo")
    return Attention(heads, heads, dim, dim**-0.5, None, None, rope=None, buckets=None, biases=biases)
