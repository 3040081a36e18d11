"""Qwen4-Exp: several streams that gates mix, gated delta rules and attention between them, and embeddings of the last
few tokens together in some layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from moeconv.source.archs.config import Config, UnsupportedModel
from moeconv.source.archs.deepseek import IMAGES_LEFT_OUT, INDEXERS_LEFT_OUT
from moeconv.source.archs.description import Description, Inside, Place, Source, decoder, limited
from moeconv.source.archs.kda import one_stream
from moeconv.source.archs.qwen import SEES, Qwen35MoeText, attention_inside, delta_of, gated_experts
from moert.pack.mixers import GatedDelta
from moert.pack.model_spec import Layer, Tokens, stack_of
from moert.pack.parts import Attention, GatedStreams, Ngrams, Norm

if TYPE_CHECKING:
    from torch import nn

_OF_INDEXERS = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_compress_ratio")
_MOST_HEADS = 1 << 14
_MOST_WORDS = 1 << 32


class Qwen4ExpText(Qwen35MoeText):
    """Qwen4-Exp without its model for images. Texts of a pack are no longer than an indexer chooses tokens."""

    model_type = "qwen4_exp_text"
    model_class = "Qwen4ExpForCausalLM"
    loads_by_names = False  # which would take the tables into memory
    left_out: Mapping[str, str] = {**Qwen35MoeText.left_out, r".*\.self_attn\.indexer\.": INDEXERS_LEFT_OUT}

    def describe(self, config: Config, tokens: Tokens) -> Description:
        config.without_effect("full_attention_interval", *_OF_INDEXERS)  # the first is in layer_types
        config.without_effect("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
        config.without_effect("number_of_conv_states")  # follows from the others
        config.without_effect_on_text("mrope_section", "mrope_interleaved")  # a word's place has one number, not three
        config.one_of("hidden_act", ("silu", "swish"))  # also of the convolutions
        norm, d_model = Norm(config.get("rms_norm_eps")), config.count("hidden_size")
        attention = config.attention(qk_norm="head", biases=config.biases("attention_bias", "qkvog"), gate=True)
        gate = config.one_of("output_gate_type", ("sigmoid", "silu")) if config.get("output_gate_type") else "silu"
        delta = replace(delta_of(config, norm), gate="sigmoid" if gate == "sigmoid" else "silu")
        kinds: Mapping[str, GatedDelta | Attention] = {"linear_attention": delta, "indexed_attention": attention}
        mixers = config.of_layers("layer_types", kinds)
        streams = GatedStreams(config.count("hc_count", least=2), config.count("hc_lowrank"), norm)
        experts, together = gated_experts(config, bool(config.get("norm_topk_prob"))), _together(config, norm)
        layers = [
            Layer(None, mixer, None, experts, streams=streams, ngrams=together.get(at))
            for at, mixer in enumerate(mixers)
        ]
        inside = {**attention_inside(attention, d_model), **self.of_delta(delta, d_model), **_of_streams()}
        inside |= _of_ngrams(next(iter(together.values())), streams.n * d_model) if together else {}
        names = replace(
            self.of_networks(config, d_model), root=self.root, left_out=self.left_out, other_root=self.other_root,
            inside=inside, outside=_gates("decoder.streams", "hyper_connection_mixer"),
        )  # fmt: skip
        rope = config.rope(attention.dim, partial=True)
        described = decoder(
            self.model_type, config, tokens, layers, names, [rope], decoder=stack_of(layers, None)
        )  # fmt: skip
        described = _with_tables(described, together, self.root, config)
        kept = config.count("indexer_budget")
        note = f"texts are at most {kept} tokens long: in longer ones an indexer chooses tokens, which a pack can't say"
        return limited(described, kept, note)

    def empty(self, config_dir: Path) -> nn.Module:
        from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

        from moeconv.source.archs.modules import TableRows

        module: Any = theirs
        whole = module.nn

        def embedding(rows: int, features: int, *pad: int | None) -> nn.Module:
            return whole.Embedding(rows, features, *pad) if pad else TableRows()  # of tokens together

        module.nn = SimpleNamespace(**{**vars(whole), "Embedding": embedding})
        try:
            return super().empty(config_dir)
        finally:
            module.nn = whole

    def prepared(self, model: nn.Module) -> nn.Module:
        """Takes the indexers out, so that each token attends to all before it, and lets tokens' numbers travel beside
        their streams."""
        from moeconv.source.archs.modules import AllBefore, carry_ids

        tower = self.tower(model, "decoder")
        layers: list[Any] = list(tower.get_submodule(self.layer_list).children())
        for layer in layers:
            if layer.layer_type == "indexed_attention":
                layer.self_attn.indexer = AllBefore()
        config: Any = tower.config
        if config.ple_layer_ids:
            carry_ids(tower, layers, tower.get_submodule("hyper_connection_mixer"))
        return model

    @contextmanager
    def resuming(self, tower: nn.Module) -> Iterator[None]:
        with one_stream(tower, "hc_count"):
            yield


class Qwen4Exp(Qwen4ExpText):
    """Qwen4-Exp inside a model for text and images."""

    model_type = "qwen4_exp"
    config_type = "qwen4_exp_text"
    inside_tied = False
    beside = SEES
    root, other_root = "model.language_model.", ""
    left_out: Mapping[str, str] = {**Qwen4ExpText.left_out, r"model\.visual\.": IMAGES_LEFT_OUT}


def _gates(at: str, module: str) -> Inside:
    return {
        f"{at}.norm": Place(f"{module}.hc_norm", plus=1.0), f"{at}.narrow": f"{module}.input_mix_weight_down",
        f"{at}.wide": f"{module}.input_mix_weight_up",
    }  # fmt: skip


def _of_streams() -> Inside:
    found: dict[str, str | Place] = {}
    for half, module in (("mixer", "attn_hyper_connection"), ("ffn", "mlp_hyper_connection")):
        found |= {**_gates(f"{half}_streams", module), f"{half}_streams.join": f"{module}.block_inject_weight"}
    return found


def _of_ngrams(part: Ngrams, width: int) -> Inside:
    return {
        "ngrams.key": "ple.key_proj", "ngrams.value": "ple.value_proj",
        "ngrams.conv": Place("ple.conv1d", shape=(width, 1, part.taps)),
        **{
            f"ngrams.{name}_norm": Place(f"ple.norm_{called}", plus=1.0)
            for name, called in (("key", "key"), ("stream", "query"), ("conv", "conv"))
        },
    }  # fmt: skip


def _with_tables(described: Description, together: Mapping[int, Ngrams], root: str, config: Config) -> Description:
    """Returns the description with the tables' pieces in checkpoints, and the numbers by which rows are chosen, which
    checkpoints repeat."""
    pieces = config.count("split_ngram_parts")
    tables, places, stated = {}, {}, dict[str, tuple[int, ...]]()
    for at, part in together.items():
        name, module = f"decoder.{at}.ngrams.table", f"layers.{at}.ple.ple_embedding"
        each = -(-part.rows // pieces)
        starts = range(0, part.rows, each)
        tables[name] = tuple(
            Source(
                f"{root}{module}.ngram_embedding.shard_{piece}.weight", shape=(min(each, part.rows - start), part.dim)
            )
            for piece, start in enumerate(starts)
        )
        places[name] = f"model.{module}.ngram_embedding"
        sizes = part.sizes
        stated |= {
            f"{root}{module}.{buffer}": numbers
            for buffer, numbers in (
                ("layer_multipliers", part.multipliers), ("ngram_heads_vocab_sizes", sizes),
                ("ngram_heads_offsets", tuple(sum(sizes[:head]) for head in range(len(sizes)))),
            )
        }  # fmt: skip
    return replace(described, tables=tables, table_places=places, stated=stated)


# The numbers by which rows are chosen, as transformers computes them.


def _together(config: Config, norm: Norm) -> dict[int, Ngrams]:
    """Returns the embeddings of tokens together, by the place of their layer. Raises UnsupportedModel."""
    ids, end = config.get("ple_layer_ids"), config.parsed.eos_token_id
    n, each = config.count("ngram_size", least=2), config.count("heads_per_ngram")
    taps = config.count("ple_conv_kernel_size", least=2)  # transformers keeps no state of shorter ones
    step, features = (config.count(name) for name in ("make_ngram_vocab_size_divisible_by", "ple_embed_dim"))
    seed, least, heads = config.get("seed"), config.get("ngram_vocab_size_base"), (n - 1) * each
    if not ids:
        return {}
    if not isinstance(least, int) or not 0 < least < _MOST_WORDS or heads * len(ids) > _MOST_HEADS:
        raise UnsupportedModel(
            f"config.json sets ngram_vocab_size_base {least!r}, and heads_per_ngram {each} in {len(ids)} layers: "
            f"up to {_MOST_WORDS} rows of up to {_MOST_HEADS} heads can be packed"
        )
    primes, vocab, found = _primes(least), config.count("vocab_size"), {}
    for place, layer in enumerate(ids):
        sizes = tuple(islice(primes, heads))
        rows = -(-sum(sizes) // step) * step
        end = end[0] if isinstance(end, list) else end
        multipliers = multipliers_of(vocab, n, seed + 10007 * place)
        found[layer - 1] = Ngrams(n, features // heads, rows, taps, end, multipliers, sizes, norm)
    return found


def _primes(least: int) -> Iterator[int]:
    """Yields the primes from `least` on."""
    number = max(2, least)
    while True:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number
        number += 1


_WORD, _STEP = (1 << 64) - 1, 0x9E3779B97F4A7C15


def multipliers_of(vocab: int, n: int, seed: int) -> tuple[int, ...]:
    """Returns n odd numbers, whose products with a token's number have 63 bits."""
    half = max(1, ((1 << 63) - 1) // vocab // 2)
    return tuple(2 * (_mixed(seed + _STEP * (place + 1)) % half) + 1 for place in range(n))


def _mixed(value: int) -> int:
    """Returns the number of splitmix64 that follows `value` (Steele et al. 2014)."""
    value = (value + _STEP) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)
