"""The tensors of a GGUF model, read lazily, and their places in a description."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moeconv.source.archs.coding import OF_ACTIVATIONS, Kind, Scheme
from moeconv.source.archs.deepseek import MORE_PREDICTED
from moeconv.source.archs.description import Description, Source, View, halves, in_turn, rows
from moeconv.source.gguf.container import Container, Place, data_of
from moeconv.source.gguf.names import ARCHS, INSIDE, OUTSIDE, Arch
from moeconv.source.gguf.settings import LONG, ROPE, SHORT, TABLE
from moeconv.source.outline import CheckpointError, line
from moeconv.source.tensors import Digest, Shape, Tensors, add_file
from moert.pack.codec import F32
from moert.pack.mixers import GatedDelta
from moert.pack.model_spec import MOST_LAYERS, ExpertKey, ModelSpec
from moert.pack.parts import Attention, Latent

if TYPE_CHECKING:
    import torch

_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I32": "int32"}
_MX, _LOG, _SCALE = "MXFP4", ".log", ".scale"
_STORED, _GROUP = ({"Q4_0", "Q4_1"}, {"Q8_0"}), 32  # types that a pack can store without loss, and their inputs a scale
_NETWORK = tuple(f".ffn_{part}.weight" for part in ("gate", "up", "down"))
_MOST_NUMBERS = 1 << 16  # of a tensor that settings are made of
_MOST_AT_ONCE = 1 << 26  # numbers of a table that stays on the drive
_OF_CONFIG = re.compile(rf"(blk\.\d+\.)?({re.escape(ROPE)}|{re.escape(LONG)}|{re.escape(SHORT)}|attn_rot_embd)")
"""Tensors whose content is in config.json."""


class GgufTensors(Tensors):
    """The tensors of a model by their names in the file; in place of some a tensor NAME.log, the logarithm of the
    magnitude. A tensor NAME.weight beside NAME.scale is multiplied by it: by one number, or by one for each expert."""

    as_saved = False

    def __init__(self, container: Container) -> None:
        """Raises CheckpointError for a tensor of a type that can't be read."""
        from gguf import GGMLQuantizationType, quants

        self.container = container
        self._kinds = {name: GGMLQuantizationType(place.kind).name for name, place in container.tensors.items()}
        arch = ARCHS.get(str(container.metadata.values.get("general.architecture")))
        own = tuple(name for name in arch.names.values() if name.endswith(_SCALE)) if arch is not None else ()
        found = {name: name.removesuffix(".weight") + _SCALE for name in self._kinds if name.endswith(".weight")}
        self.of_activations = [name for name in self._kinds if name.endswith(OF_ACTIVATIONS)]
        self._scales = {name: by for name, by in found.items() if by in self._kinds and not by.endswith(own)}
        known = {*_PLAIN, *(kind.name for kind in quants._type_traits)}
        if (strange := next((name for name, kind in self._kinds.items() if kind not in known), None)) is not None:
            raise CheckpointError(
                f"{self.path}: {strange[:120]!r} is stored as {self._kinds[strange]}, which can't be read: take a "
                "file of another type"
            )

    @property
    def path(self) -> Path:
        """The first file."""
        return self.container.files[0]

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.container.files)

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: place.shape for name, place in self.container.tensors.items()}

    @cached_property
    def names(self) -> Collection[str]:
        found: dict[str, None] = {}
        apart = {*self._scales.values(), *self.of_activations}
        for name in self.container.tensors:
            if name in apart or _OF_CONFIG.fullmatch(name):
                continue
            found[name + _LOG if name.endswith(".ssm_a") else name] = None
        return found.keys()

    @property
    def types(self) -> str:
        """The types of matrices, the most frequent by bytes first, as words."""
        nbytes: dict[str, int] = {}
        for name, place in self.container.tensors.items():
            if len(place.shape) > 1:
                nbytes[self._kinds[name]] = nbytes.get(self._kinds[name], 0) + math.prod(place.shape)
        return ", ".join(sorted(nbytes, key=lambda kind: -nbytes[kind]))

    @cached_property
    def mxfp4(self) -> bool:
        """True if all experts are stored as MXFP4."""
        return self._of_experts == {_MX}

    @property
    def _of_experts(self) -> set[str]:
        """The types of the experts' matrices, with .scale where they are multiplied; of the networks', where a model
        has no experts."""
        names = list(self.container.tensors)
        for ends in ("_exps.weight",), _NETWORK:
            if found := {self._kinds[name] + _SCALE * (name in self._scales) for name in names if name.endswith(ends)}:
                return found
        return set()

    @cached_property
    def scheme(self) -> Scheme | None:
        """The coding of the numbers; None if all have 16 bits or more."""
        kinds, of_experts = {*self._kinds.values()} - {*_PLAIN}, self._of_experts
        kept = bool(of_experts) and any(of_experts <= stored for stored in _STORED)
        kind = Kind("mxfp4" if self.mxfp4 else "ggml", "", ())
        return Scheme(self.types, (kind,), group=_GROUP if kept else None) if kinds else None

    def is_coded(self, name: str) -> bool:
        return name in self._scales or self._kinds.get(name) not in (None, *_PLAIN)

    def dtype16(self, _: str) -> torch.dtype:
        """Returns the type of 16 bits that holds a coded matrix best: the one of the types' own scales."""
        import torch

        return torch.float16

    def parts(self, name: str) -> list[str]:
        """Returns the names of the stored tensors that a tensor is made of."""
        return [name]

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        place = self.container.tensors[name]
        rows, each = math.prod(place.shape[:-1]), max(1, _MOST_AT_ONCE // place.shape[-1])
        for start in range(0, rows, each):
            yield self._rows(place, start, min(each, rows - start))

    def fetch(self, name: str, index: int | None = None) -> torch.Tensor:
        """Returns one tensor, or one index of its first dimension; coded ones in float32. Raises CheckpointError."""
        stem = name.removesuffix(_LOG)
        place = self.container.tensors.get(stem)
        if place is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}: the checkpoint is incomplete")
        shape = place.shape if index is None else place.shape[1:]
        rows = math.prod(shape[:-1])
        found = self._rows(place, rows * (index or 0), rows).reshape(shape)
        if stem in self._scales:
            found = found.float() * self._scale(stem, index)
        return _log(found.float().abs()) if name.endswith(_LOG) else found

    def _rows(self, place: Place, first: int, count: int) -> torch.Tensor:
        """Returns rows of a tensor, [count, inputs]. Raises CheckpointError."""
        import torch
        from gguf import GGMLQuantizationType, quants

        kind, shape = GGMLQuantizationType(place.kind), (count, place.shape[-1])
        try:
            data = data_of(place, first, count)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{place.file} can't be read ({line(error)}): fetch it again") from None
        if kind.name in _PLAIN:
            found = torch.from_numpy(data).view(getattr(torch, _PLAIN[kind.name])).reshape(shape)
            return found if found.is_floating_point() else found.float()
        with np.errstate(all="ignore"):  # numbers that are not finite are refused where they are used
            return torch.from_numpy(quants.dequantize(data, kind)).reshape(shape)

    def _scale(self, name: str, index: int | None) -> torch.Tensor:
        """Returns the numbers by which a tensor, or one index of it, is multiplied. Raises CheckpointError."""
        import torch

        found, shape = torch.from_numpy(self.numbers(self._scales[name])), self.shapes[name]
        if len(found) == 1:
            return found
        if len(shape) != 3 or len(found) != shape[0]:
            raise CheckpointError(
                f"{self.path}: {self._scales[name]} has {len(found):,} numbers for a tensor of {shape}: fetch it again"
            )
        return found[:, None, None] if index is None else found[index]

    def numbers(self, name: str) -> F32:
        """Returns a small tensor's numbers, in a row. Raises CheckpointError."""
        if math.prod(self.shapes.get(name, ())) > _MOST_NUMBERS:
            raise CheckpointError(f"{self.path}: {name} has over {_MOST_NUMBERS:,} numbers")
        found: F32 = self.fetch(name).float().flatten().numpy()
        return found

    def digest(self, into: Digest) -> None:
        for file in self.container.files:
            add_file(into, file)

    def described(self, description: Description) -> Description:
        """Returns the description with the sources in this file. Raises CheckpointError for a tensor of another shape
        than the settings imply."""
        return _Described(self, description).found


def _log(powers: torch.Tensor) -> torch.Tensor:
    """Returns the logarithms of powers of e in float32: the numbers of 16 bits that they are the powers of, where there
    are such numbers."""
    import torch

    found = powers.log()
    for dtype in (torch.bfloat16, torch.float16):
        short = found.to(dtype).float()
        found = torch.where(short.exp() == powers, short, found)
    return found


class _Described:
    """The description of a model with its sources in a file of llama.cpp's names."""

    def __init__(self, tensors: GgufTensors, description: Description) -> None:
        self._tensors, self._description = tensors, description
        arch: Arch = ARCHS[tensors.container.metadata.need("general.architecture", str)]
        key = f"{tensors.container.metadata.need('general.architecture', str)}.nextn_predict_layers"
        self._more = min(tensors.container.metadata.get(key, int) or 0, MOST_LAYERS)
        own = {**arch.names, **(arch.alone if description.spec.moe.n == 1 else {})}
        self._arch, self._names = arch, {**OUTSIDE, **INSIDE, **own}

    @property
    def found(self) -> Description:
        described, spec = self._description, self._spec
        sources = {name: self._source(name, source) for name, source in described.backbone.items()}
        self._check_experts()
        return replace(
            described, backbone=sources, experts=self._expert, copies=(), joined=None, other_root=None,
            biases=None if described.biases is None else self._bias, scheme=self._tensors.scheme, tables=self._tables,
            left_out={
                **{rf"blk\.{len(spec.decoder) + at}\.": MORE_PREDICTED for at in range(self._more)},
                **self._arch.left_out,
            },
        )  # fmt: skip

    @property
    def _spec(self) -> ModelSpec:
        return self._description.spec

    def _source(self, canonical: str, own: Source) -> Source:
        within = re.fullmatch(r"decoder\.(\d+)\.(.+)", canonical)
        at, part, layer = ("", canonical, None) if within is None else (f"blk.{within[1]}.", within[2], int(within[1]))
        name, shape = at + self._named(part, layer), self._spec.tensors[canonical].shape
        if part.startswith("attn.v.") and own.name == self._description.backbone[canonical.replace(".v.", ".k.")].name:
            name = name.replace("attn_v", "attn_k")
        if name not in self._tensors.names:
            raise CheckpointError(f"{self._tensors.path} has no tensor {name!r}: it is incomplete, or not as expected")
        found = self._tensors.shapes[name.removesuffix(_LOG)]
        if name.removeprefix(at).removesuffix(".weight").removesuffix(".bias") in self._arch.whole:
            if found != (wanted := own.shape or shape):
                raise self._unlike(name, found, wanted)
            return replace(own, name=name)
        mixer = None if layer is None else self._spec.decoder[layer].mixer
        if name == f"{at}attn_qkv.weight" and isinstance(mixer, Attention):
            shape = (mixer.q_features + 2 * mixer.kv_features, shape[-1])
        if isinstance(mixer, GatedDelta) and name == f"{at}attn_qkv.weight":
            shape = (2 * mixer.key_features + mixer.value_features, shape[-1])
        behind = tuple(name.replace("_q.", f"_{each}.") for each in "kv") if own.behind else ()
        shape = (shape[0] // (1 + len(behind)), *shape[1:])
        for each in (name, *behind):
            if not _alike(there := self._tensors.shapes.get(each.removesuffix(_LOG), ()), shape):
                raise self._unlike(each, there, shape)
        return Source(name, None, self._view(part, layer), found, behind=behind)

    @property
    def _tables(self) -> Mapping[str, tuple[Source, ...]]:
        """The sources of tables that stay on the drive. Raises CheckpointError, also if their rows are chosen by other
        numbers than config.json implies."""
        tables, found = self._spec.tables, self._tensors.shapes.get(TABLE, ())
        metadata = self._tensors.container.metadata
        for part in (kind.ngrams for kind in self._spec.decoder.kinds if kind.ngrams is not None):
            starts = tuple(sum(part.sizes[:head]) for head in range(len(part.sizes)))
            for name, wanted in (
                ("layer_multipliers", part.multipliers), ("head_vocab_sizes", part.sizes), ("head_offsets", starts),
            ):  # fmt: skip
                key = f"qwen4exp.ple.{name}"
                if tuple(metadata.listed(key, int) or ()) != wanted:
                    raise metadata.wrong(key, "has other numbers than transformers computes for such a model")
            if found != (part.rows, part.dim):
                raise self._unlike(TABLE, found, (part.rows, part.dim))
        return {name: (Source(TABLE, shape=shape),) for name, shape, _ in tables.values()}

    def _named(self, part: str, layer: int | None) -> str:
        for suffix in (".weight", ".bias", ""):
            name = part.removesuffix(suffix) if suffix else part
            if part == name + suffix and name in self._names:
                found = self._names[name]
                if layer is not None and self._together(layer) and name in ("attn.q", "attn.k", "attn.v"):
                    found = "attn_qkv"
                if layer is not None and isinstance(self._spec.decoder[layer].mixer, Latent):
                    found = self._latent(name, layer, found)
                return found + suffix
        raise KeyError(f"{part} has no name in GGUF files")

    def _together(self, layer: int) -> bool:
        """Returns whether a layer of attention has queries, keys and values in one tensor."""
        attends = isinstance(self._spec.decoder[layer].mixer, Attention)
        return attends and f"blk.{layer}.attn_qkv.weight" in self._tensors.shapes

    def _latent(self, name: str, layer: int, usual: str) -> str:
        """Returns the name of a tensor of latent attention, whose queries may have no rank of their own, and whose keys
        and values old files have in one tensor."""
        part = self._spec.decoder[layer].mixer
        assert isinstance(part, Latent)
        if name in ("attn.q", "attn.q_turn"):
            return "attn_q" if part.q_rank is None else "attn_q_b"
        if name == "attn.q_norm":
            return "attn_q_a_norm"
        together = f"blk.{layer}.attn_kv_b.weight" in self._tensors.shapes
        return "attn_kv_b" if together and name in ("attn.keys", "attn.values") else usual

    def _view(self, part: str, layer: int | None) -> View | None:
        if layer is None:
            return None
        mixer, attention = self._spec.decoder[layer].mixer, self._spec.decoder[layer].attention
        name = part.removesuffix(".weight").removesuffix(".bias")
        if self._arch.turned and attention is not None and name in ("attn.q", "attn.k"):
            return halves(attention.n if name == "attn.q" else attention.kv)
        if attention is not None and self._together(layer) and name in ("attn.q", "attn.k", "attn.v"):
            q, kv = attention.q_features, attention.kv_features
            return {"attn.q": rows(0, q), "attn.k": rows(q, q + kv), "attn.v": rows(q + kv)}[name]
        if isinstance(mixer, GatedDelta) and name.startswith("mixer.") and self._names["mixer.q"] == "attn_qkv":
            return _delta(mixer, name.removeprefix("mixer."), self._arch.tiled)
        return None

    def _expert(self, key: ExpertKey, projection: str) -> Source:
        at, width, shapes = f"blk.{key.layer}.ffn_", self._spec.moe.ffn.d_ff, self._tensors.shapes
        alone, index, view = self._spec.moe.n == 1, None if self._spec.moe.n == 1 else key.expert, None
        gated = self._spec.moe.ffn.gated
        of, both = (".weight", "up.weight") if alone else ("_exps.weight", "gate_up_exps.weight")
        name = f"{at}{projection}{of}"
        if f"{at}gate{of}" not in shapes and f"{at}{both}" in shapes and projection != "down" and gated:
            name, view = f"{at}{both}", rows(0, width) if projection == "gate" else rows(width)
        elif name not in shapes and (single := f"{at}{projection}.{key.expert}.weight") in shapes:  # in old files
            name, index = single, None
        shape = shapes.get(name)
        if shape is None:
            return Source(name, index)
        return Source(name, index, view, shape if index is None else shape[1:])

    def _bias(self, key: ExpertKey, projection: str) -> Source:
        if self._spec.moe.n == 1:
            return Source(f"blk.{key.layer}.ffn_{projection}.bias")
        return Source(f"blk.{key.layer}.ffn_{projection}_exps.bias", key.expert)

    def _check_experts(self) -> None:
        spec = self._spec
        for key in {key.layer: key for key in spec.expert_keys()}.values():
            for projection in spec.moe.ffn.projections:
                source, (out, inputs) = self._expert(key, projection), spec.projection_shape(projection)
                before = () if source.index is None else (spec.moe.n,)
                wanted = (*before, out if source.view is None else 2 * out, inputs)
                found = self._tensors.shapes.get(source.name)
                if found is not None and found != wanted:
                    raise self._unlike(source.name, found, wanted)

    def _unlike(self, name: str, found: Shape, wanted: Shape) -> CheckpointError:
        return CheckpointError(f"{self._tensors.path}: {name} has the shape {found}, its metadata imply {wanted}")


def _alike(found: Shape, wanted: Shape) -> bool:
    """Returns whether a tensor has a pack's numbers in their order: dimensions of 1, and leading ones that are joined
    in a pack, make no difference."""
    last = [[size for size in shape if size != 1][-1:] for shape in (found, wanted)]
    return math.prod(found) == math.prod(wanted) and (len(wanted) == 1 or last[0] == last[1])


def _delta(part: GatedDelta, name: str, tiled: bool) -> View | None:
    """Returns the view of a tensor of the gated delta rule: queries, keys and values lie in one; `tiled`: heads of
    values are ordered by their place in a group first."""
    keys, values = part.key_features, part.value_features
    share = part.n // part.keys
    parts: Mapping[str, View] = {"q": rows(0, keys), "k": rows(keys, 2 * keys), "v": rows(2 * keys, 2 * keys + values)}
    found: list[View] = [parts[name]] if name in parts else []
    if tiled and share > 1:
        if name in ("v", "z"):
            found.append(_regrouped(share, part.keys, part.v))
        elif name in ("a", "b", "a_log", "dt_bias"):
            found.append(_regrouped(share, part.keys, 1))
        elif name == "conv":
            found.append(_behind(2 * keys, _regrouped(share, part.keys, part.v)))
        elif name == "out":
            turn = _regrouped(share, part.keys, part.v)
            found.append(lambda matrix: turn(matrix.T).T)
    return in_turn(*found) if found else None


def _regrouped(share: int, groups: int, size: int) -> View:
    """Returns the view of rows [share, groups, size, ...] as [groups · share · size, ...]."""

    def view(tensor: torch.Tensor) -> torch.Tensor:
        apart = tensor.reshape(share, groups, size, *tensor.shape[1:])
        return apart.transpose(0, 1).reshape(tensor.shape)

    return view


def _behind(start: int, of_rest: Callable[[torch.Tensor], torch.Tensor]) -> View:
    def view(tensor: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.cat((tensor[:start], of_rest(tensor[start:])))

    return view
