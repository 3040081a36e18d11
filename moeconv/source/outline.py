"""The outline of a model: its config.json without any weights, and its parts in words."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from moeconv.errors import ConversionError
from moeconv.source.archs import FAMILIES, REFUSED, Description, Family, UnsupportedModel
from moeconv.source.archs.config import ConfigInvalid
from moeconv.strict_json import NotJson, bounded, parse
from moert.pack.documents import brief, plain, read
from moert.pack.errors import ManifestInvalid
from moert.pack.messages import nearest
from moert.pack.mixers import FixedState, GatedDelta, Mamba, Mamba2, Pooled, ShortConv
from moert.pack.model_spec import Layer, ModelSpec, Stack
from moert.pack.parts import Attention, Experts, Ffn, GatedStreams, Latent, Router

# Allowed places of a checkpoint's files: inside its folder, or in the hub's cache where the folder's links lead.

_READ = (".json", ".safetensors", ".model", ".txt", ".jinja", ".tiktoken", ".py")
_SNAPSHOTS, BLOBS = "snapshots", "blobs"
_KEPT = ("models--", "datasets--")  # how the folders of the hub's cache begin


def is_plain(name: str) -> bool:
    """Returns whether a file's name stays inside the folder that it is relative to."""
    pure = PurePosixPath(name)
    sound = name.isprintable() and not set("\\:").intersection(name) and 0 < len(name) <= 200
    return sound and bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts


def leads_out(folder: Path, path: Path) -> bool:
    """Returns whether a link on the way to `path`, which lies in `folder`, leads out of the folder. Two kinds of links
    are allowed: the hub's cache links from snapshots/REVISION to blobs beside it, and its older downloads link from any
    folder to the cache's blobs."""
    try:
        real, root = path.resolve(), folder.resolve()
        blobs = (root.parent.parent / BLOBS).resolve()
    except (OSError, RuntimeError):  # links in a circle
        return True
    kept = real.parent.name == BLOBS and real.parent.parent.name.startswith(_KEPT)
    linked = root.parent.name == _SNAPSHOTS and real.parent == blobs
    return not (real.is_relative_to(root) or linked or kept)


def stray(folder: Path) -> Path | None:
    """Returns the first of the folder's files, among those that are read, that is a link out of it; None if there is
    none. Raises OSError."""
    with os.scandir(folder) as entries:
        links = sorted(entry.name for entry in entries if entry.is_symlink() and entry.name.endswith(_READ))
    return next((folder / name for name in links if leads_out(folder, folder / name)), None)


# A model's parts in words: one short phrase for each feature that not all families have.


def features(spec: ModelSpec) -> list[str]:
    """Returns phrases for a model's features, without an order of rank; each feature once, of however many layers."""
    layers = [stack[at] for stack in spec.stacks.values() for at in range(len(stack))]
    mixers = [*_fixed_states(layers), *_attention(layers), *_positions(spec, layers)]
    return list(dict.fromkeys([*mixers, *_experts(spec, layers), *_stream(spec, layers)]))


def _fixed_states(layers: Sequence[Layer]) -> Iterator[str]:
    for part in dict.fromkeys(layer.mixer for layer in layers):
        if isinstance(part, FixedState):
            count = sum(layer.mixer == part for layer in layers)
            yield f"{_fixed(part)} in place of attention in {count} of {len(layers)} layers"


def _fixed(part: FixedState) -> str:
    if isinstance(part, ShortConv):
        return f"convolutions over {part.taps} tokens"
    if isinstance(part, GatedDelta):
        return f"gated delta rules of {part.n} heads" + (", by feature," if part.by_feature else "")
    if isinstance(part, Mamba2):
        return f"Mamba-2 of {part.n} heads with {part.state} numbers a feature"
    assert isinstance(part, Mamba)
    return f"Mamba of {part.features} channels with {part.state} numbers each"


def _attention(layers: Sequence[Layer]) -> Iterator[str]:
    for part in dict.fromkeys(layer.mixer for layer in layers):
        if isinstance(part, Latent):
            yield f"latent attention of {part.kv_rank} + {part.turning} features a token" + " with gates" * part.gate
        elif isinstance(part, Pooled):
            yield from _pools(part)
        elif isinstance(part, Attention):
            yield from _heads(part)
    for what in ("window", "chunk"):
        sizes = [size for layer in layers if (size := getattr(layer.mixer, what, None)) is not None]
        if sizes:
            named = " or ".join(map(str, sorted(set(sizes))))
            yield f"{what}s of {named} tokens in {len(sizes)} of {len(layers)} layers"


def _pools(part: Pooled) -> Iterator[str]:
    yield f"{part.n} heads of {part.groups} groups, one key of {part.dim} features a token"
    yield "attention sinks"
    if (pools := part.pools) is not None:
        chosen = "" if pools.indexer is None else f", of which an indexer chooses {pools.indexer.top}"
        yield f"keys of {pools.every} tokens{chosen}"


def _heads(part: Attention) -> Iterator[str]:
    yield f"{part.n} heads" if part.n == part.kv else f"{part.n} heads, {part.kv} of keys"
    if part.qk_norm is not None:
        turned = ", after they turn" if part.norm_turned else ""
        yield f"queries and keys normed {'as a whole' if part.qk_norm == 'whole' else 'by head'}{turned}"
    if part.v_norm:
        yield "values normed by head"
    if part.biases is not None:
        yield f"biases of {', '.join(part.biases).replace('g', 'gate')}"
    if part.sinks:
        yield "attention sinks"
    if part.gate:
        yield "a gate on what each head gives" if part.gate_by_head else "a gate on what heads give"
    if part.stretch is not None:
        yield "queries that look more sharply from far on"
    if part.clip is not None:
        yield f"queries, keys and values within {part.clip:g}"
    if part.softcap is not None:
        yield f"scores within {part.softcap:g}"


def _positions(spec: ModelSpec, layers: Sequence[Layer]) -> Iterator[str]:
    if any(stack.buckets is not None for stack in spec.stacks.values()):
        yield "positions by buckets of distances"
    for n in dict.fromkeys(stack.positions.n for stack in spec.stacks.values() if stack.positions is not None):
        yield f"a table of {n} positions"
    if any(layer.positions is not None for layer in layers):
        yield "a table of positions of some layers' own"
    for part in dict.fromkeys(layer.attention for layer in layers):
        if part is not None and part.rope is not None and (dims := spec.ropes[part.rope].dims) < part.turning:
            yield f"rotary positions of {dims} of {part.turning} features"
    if without := sum(_has_no_positions(stack, at) for stack in spec.stacks.values() for at in range(len(stack))):
        yield f"no positions in {without} of {len(layers)} layers"


def _has_no_positions(stack: Stack, layer: int) -> bool:
    attention, own = stack[layer].attention, stack[layer].positions
    unturned = attention is not None and attention.rope is None
    return unturned and own is None and stack.positions is None and stack.buckets is None


def _experts(spec: ModelSpec, layers: Sequence[Layer]) -> Iterator[str]:
    experts = [layer.ffn for layer in layers if isinstance(layer.ffn, Experts)]
    if dense := len(layers) - len(experts):
        yield f"{dense} of {len(layers)} layers without experts"
    for part in dict.fromkeys(experts):
        if part.n == 1:
            yield "one network a layer, which is its only expert"
        else:
            yield from _router(part.router)
        if part.shared is not None:
            yield f"a shared expert of width {part.shared.d_ff}{' with a gate' if part.shared_gate else ''}"
        if part.narrow is not None:
            yield f"experts that see {part.narrow.features} features in place of {spec.d_model}"
        if part.bypass:
            yield "a projection beside the experts"
        if part.shortcut:
            yield "experts whose output takes a shortcut past the next layer"
        if part.beside is not None:
            yield f"a network of width {part.beside.ffn.d_ff} beside the experts"
        yield from _network(part.ffn)


_ROUTERS = {
    "softmax": "softmax", "sigmoid": "sigmoid", "sigmoid_of_chosen": "sigmoid",
    "sparsemixer": "a sparsemixer in place of", "sqrt_softplus": "√softplus",
}  # fmt: skip


def _router(part: Router) -> Iterator[str]:
    yield f"{_ROUTERS[part.score]} routers{' with biases' if part.bias else ''}"
    if part.choice_bias:
        yield "a bias for the choice of experts"
    if part.groups is not None and part.groups.n > 1:
        yield f"experts of {part.groups.best} of {part.groups.n} groups"
    if part.capacity is not None:
        kept = ", of which others keep what they are" if part.overflow == "itself" else ""
        yield f"at most {part.capacity} tokens an expert{kept}"
    if part.by_token is not None:
        yield "a table of each token's experts in some layers"
    if part.identities:
        yield f"{part.identities} choices that return their input"
    if part.own_norm:
        yield "a norm of the routers' own"
    if part.weigh == "input":
        yield "weights on what experts get"


def _network(part: Ffn) -> Iterator[str]:
    gated = "" if part.gated else " without gates"
    yield f"{part.act.name} experts{gated}{' with biases' if part.bias else ''}"
    if part.act.limit is not None:
        yield f"gates within {part.act.limit:g}"
    if part.act.bound is not None:
        yield f"gates within {part.act.bound:g} behind their activation in some layers"


def _stream(spec: ModelSpec, layers: Sequence[Layer]) -> Iterator[str]:
    if spec.encoder is not None:
        yield "an encoder"
    norms = [layer.norm or layer.mixer_join.after or layer.ffn_join.after for layer in layers]
    if any(norm is not None and norm.kind == "layer" for norm in norms):
        yield "LayerNorms"
    if (streams := spec.decoder.streams) is not None:
        yield f"{streams.n} streams in place of one" + " that gates mix" * isinstance(streams, GatedStreams)
    together = [layer.ngrams for layer in layers if layer.ngrams is not None]
    for n in dict.fromkeys(part.n for part in together):
        where = f"in {len(together)} of {len(layers)} layers, {sum(part.rows for part in together)} rows on the drive"
        yield f"embeddings of up to {n} tokens together {where}"
    if any(layer.parallel for layer in layers):
        yield "attention and feed-forward side by side"
    if any(layer.norm is None and not isinstance(layer.streams, GatedStreams) for layer in layers):
        yield "no norms before attention and experts"
    of_mixers = any(layer.mixer_join.after is not None for layer in layers)
    if of_mixers or any(layer.ffn_join.after is not None for layer in layers):
        yield "norms after attention and experts" if of_mixers else "norms after experts"
    if any(layer.scaled or (layer.mixer_join.add, layer.ffn_join.add) != (1, 1) for layer in layers):
        yield "factors of the stream"
    if spec.embed_scale != 1:
        yield "a factor of the embedding"
    if spec.head.tied:
        yield "a tied head"
    if spec.head.bias:
        yield "a head with a bias"
    if spec.head.projected:
        yield "a projection before the head"
    if spec.tokens.prefix_end is not None:
        yield f"a prompt's beginning, up to token {spec.tokens.prefix_end}, that sees itself whole"
    if spec.head.softcap is not None:
        yield f"logits within {spec.head.softcap:g}"


# The outline of a model, read from its config.json.

CONFIG, GENERATION_CONFIG, CODED = "config.json", "generation_config.json", "hf_quant_config.json"
MAX_JSON_BYTES = 1 << 27  # of any JSON file; the index of the largest model published has an eighth of it
MOST_EXPERTS = 1 << 20  # of a model: no manifest could list more
_LONGEST = 600
GGUF = ".gguf"
SPLIT = re.compile(rf"(.+)-(\d{{5}})-of-(\d{{5}}){re.escape(GGUF)}")
"""The name of one of several GGUF files of a model: what all names begin with, its number, and how many there are."""
MOST_FILES = 1 << 10  # of a model in GGUF files
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class CheckpointError(ConversionError):
    """The checkpoint can't be read: it is incomplete, damaged, in other files than safetensors or GGUF, or of a family
    that is not known. Fetch it again; `moeconv check MODEL` says more, and [models.md](models.md) lists the
    families."""


@dataclass(frozen=True)
class Outline:
    """The outline of a model: `config` and `generation_config` as JSON objects, and its family's description of it."""

    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    family: Family
    description: Description

    @classmethod
    def read(cls, file: Path, made_of: Path | None = None) -> Outline:
        """Returns the outline of a config.json, and of a generation_config.json beside it. `made_of`: the file that
        both were made of, for messages. Raises CheckpointError."""
        config = json_object(file)
        if config is None:
            raise CheckpointError(f"{file.parent} has no {file.name}: give a directory with a Hugging Face model")
        said = (json_object(file.parent / CODED) or {}).get("quantization")
        if isinstance(said, dict) and said.get("quant_algo") and not config.get("quantization_config"):
            config = {**config, "quantization_config": {**said, "quant_method": "modelopt"}}
        named = file if made_of is None else made_of / file.name
        return cls.of(config, json_object(file.parent / GENERATION_CONFIG) or {}, named)

    @classmethod
    def of(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any], file: Path) -> Outline:
        """Returns the outline of both objects. `file`: the config.json's path, for messages. Raises CheckpointError."""
        family = FAMILIES.get(str(config.get("model_type")))
        if family is None:
            name = str(config.get("model_type"))
            why = REFUSED.get(name) or nearest(name, FAMILIES)
            raise CheckpointError(
                f"{file.parent}: model_type {brief(config.get('model_type'))} is not supported: {why}"
            )
        try:
            family = family.of(config)
            description = family.description(config, generation_config)
        except UnsupportedModel as error:
            raise CheckpointError(f"{file.parent}: {line(error, _LONGEST)}") from None
        except ConfigInvalid as error:
            raise CheckpointError(f"{file} is not a valid {family.model_type} config: {line(error)}") from None
        except (ConversionError, ImportError):
            raise
        except Exception as error:  # of arithmetic with config.json's values, here and in transformers
            raise CheckpointError(
                f"{file} is not a valid {family.model_type} config ({type(error).__name__}: {line(error)})"
            ) from error
        _check(description.spec, file)
        return cls(config, generation_config, family, description)

    @property
    def spec(self) -> ModelSpec:
        return self.description.spec


def _check(spec: ModelSpec, file: Path) -> None:
    """Raises CheckpointError for a model that no pack can describe."""
    try:
        read(ModelSpec, plain(spec), f"{file} can't be converted: the model", closed=True)
    except ManifestInvalid as error:
        raise CheckpointError(str(error)) from None
    if (contradiction := next(spec.contradictions(), None)) is not None:
        raise CheckpointError(f"{file} can't be converted: {contradiction}")
    if (count := len(spec.experts) * spec.moe.n) > MOST_EXPERTS:
        raise CheckpointError(f"{file} can't be converted: it has {count} experts, a pack at most {MOST_EXPERTS}")


def split_names(one: re.Match[str], count: int) -> list[str]:
    """Returns the names of the first `count` GGUF files of a model, by the name of one of them, a match of SPLIT."""
    return [f"{one[1]}-{number:05}-of-{one[3]}{GGUF}" for number in range(1, count + 1)]


def indexed_files(path: Path, index: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns name of each tensor → the name of its file, inside the folder `path`, from the folder's index. Raises
    CheckpointError."""
    found = index.get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise CheckpointError(f"{path / INDEX} lacks its weight_map: fetch the checkpoint again")
    if (strange := next((file for file in found.values() if not is_plain(file)), None)) is not None:
        raise CheckpointError(f"{path / INDEX} names the file {strange[:80]!r}, which does not lie inside {path}")
    return found


def json_object(path: Path) -> dict[str, Any] | None:
    """Returns the object in a JSON file; None if the file is missing. Raises CheckpointError."""
    try:
        value = parse(bounded(path, MAX_JSON_BYTES), finite=False)
    except FileNotFoundError:
        return None
    except (OSError, NotJson) as error:
        raise CheckpointError(f"{path} can't be read as JSON ({line(error)}): fetch the checkpoint again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should hold a JSON object, found a {type(value).__name__}")
    return value


def line(error: BaseException, longest: int = 200) -> str:
    """Returns the message of an error on one line of moderate length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= longest else text[:longest] + "…"
