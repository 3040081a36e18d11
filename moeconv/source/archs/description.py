"""The description of a model: its tree of parts, and the source of each of their tensors in a checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from moeconv.source.archs.coding import Scheme
from moeconv.source.archs.config import Config, ShapeDiffers, UnsupportedModel, check_computed
from moert.pack.codec import F32
from moert.pack.model_spec import ExpertKey, Head, Layer, ModelSpec, Tokens, stack_of
from moert.pack.parts import Attention, Experts, Rope

if TYPE_CHECKING:
    from torch import Tensor

# Views of a checkpoint's tensors, each with a pack's tensor inside: writing to a view changes the tensor itself.

View: TypeAlias = "Callable[[Tensor], Tensor]"
"""A tensor → its view, which may have more dimensions than the pack's tensor, with its numbers in the same order."""


def rows(start: int | None = None, stop: int | None = None, step: int | None = None) -> View:
    return lambda tensor: tensor[start:stop:step]


def transposed(tensor: Tensor) -> Tensor:
    """Returns a tensor with its last two dimensions exchanged."""
    return tensor.transpose(-1, -2)


def of_heads(heads: int, start: int | None = None, stop: int | None = None) -> View:
    """Returns the view of some rows of each head of a matrix [heads · dim, ...]: [heads, stop - start, ...]."""
    return lambda tensor: tensor.reshape(heads, -1, *tensor.shape[1:])[:, start:stop]


def of_columns(heads: int) -> View:
    """Returns the view of the columns of each head of a matrix [out, heads · dim]: [out, heads, dim]."""
    return lambda tensor: tensor.reshape(len(tensor), heads, -1)


def halves(heads: int, start: int | None = None, stop: int | None = None) -> View:
    """Returns the view of `of_heads` for rotary positions that turn pairs (2i, 2i + 1): the first of all pairs, then
    the second, as a pack has them. Heads all turned alike give the same scores in any order."""
    pick = of_heads(heads, start, stop)
    return lambda tensor: pick(tensor).unfold(1, 2, 2).movedim(-1, 1)


def in_turn(*views: View) -> View:
    """Returns the view that applies these views one after the other."""

    def all_of_them(tensor: Tensor) -> Tensor:
        for view in views:
            tensor = view(tensor)
        return tensor

    return all_of_them


# The source of a pack's tensor: its place in a checkpoint, and its form there.


class Fetch(Protocol):
    """A reader of a checkpoint's tensor by its name, or of one index of its first dimension."""

    def __call__(self, name: str, index: int | None) -> Tensor: ...


@dataclass(frozen=True)
class Source:
    """The source of a pack's tensor: the tensor `name` or one `index` of its first dimension, through a `view`, times
    `factor`, plus `plus`.

    `shape`: the shape of the tensor, or of one index of it; None for the shape of the pack's tensor. `either`: some
    checkpoints have it transposed. `room`: a dimension of the view and its size in the pack, where zeros follow.
    `behind`: tensors of the same shape, whose rows follow in the pack.
    """

    name: str
    index: int | None = None
    view: View | None = None
    shape: tuple[int, ...] | None = None
    factor: float = 1.0
    plus: float = 0.0
    either: bool = False
    room: tuple[int, int] | None = None
    behind: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.behind

    def read(self, fetch: Fetch, shape: tuple[int, ...]) -> Tensor:
        """Returns the pack's tensor of this shape, in the checkpoint's type, or in float32 if it is multiplied or
        added to. Raises ShapeDiffers."""
        if self.behind:
            import torch

            size = (shape[0] // len(self.names), *shape[1:])
            return torch.cat([replace(self, name=name, behind=()).read(fetch, size) for name in self.names])
        found = fetch(self.name, self.index)
        expected = self.shape or shape
        if self.either and tuple(found.shape) == expected[::-1] != expected:
            found = transposed(found)
        if tuple(found.shape) != expected:
            raise ShapeDiffers(f"{self.name} has the shape {tuple(found.shape)}, config.json implies {expected}")
        found = self._roomy(self._viewed(found)).reshape(shape)
        return found if self.as_it_is else found.float() * self.factor + self.plus

    def write(self, tensor: Tensor, weight: Tensor) -> None:
        """Writes the pack's tensor, `weight`, to its place in the tensor called `name`."""
        place = self._viewed(tensor if self.index is None else tensor[self.index])
        if self.room is not None:
            dim, size = self.room
            weight = weight.reshape(*place.shape[:dim], size, *place.shape[dim + 1 :]).narrow(dim, 0, place.shape[dim])
        place.copy_((weight if self.as_it_is else (weight - self.plus) / self.factor).reshape(place.shape))

    @property
    def as_it_is(self) -> bool:
        """True if its numbers are the tensor's own."""
        return self.factor == 1 and self.plus == 0

    def _viewed(self, tensor: Tensor) -> Tensor:
        return tensor if self.view is None else self.view(tensor)

    def _roomy(self, tensor: Tensor) -> Tensor:
        """Returns a view with zeros where the pack has more room."""
        if self.room is None:
            return tensor
        dim, size = self.room
        shape = [*tensor.shape]
        shape[dim] = size
        found = tensor.new_zeros(shape)
        found.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        return found


OtherNames = tuple[str, Callable[[str], str]]

# A family's description of one checkpoint: the model as a tree of parts, and the source of each of its tensors.

_LAYER = re.compile(r"decoder\.(\d+)\.(.+)")
_TENSOR_SUFFIXES = (".weight", ".bias", "")
_OUTSIDE = {"embed": "embed_tokens", "decoder.norm": "norm"}


class Place(NamedTuple):
    """A part of a tensor, with the fields of Source. `name` lacks the source's last word if that is weight or bias, and
    `plus` is not added to a bias."""

    name: str
    view: View | None = None
    shape: tuple[int, ...] | None = None
    factor: float = 1.0
    plus: float = 0.0
    room: tuple[int, int] | None = None
    behind: tuple[str, ...] = ()

    def source(self, before: str, suffix: str) -> Source:
        shape = self.shape[:1] if self.shape is not None and suffix == ".bias" else self.shape
        name, *behind = (f"{before}{name}{suffix}" for name in (self.name, *self.behind))
        plus = 0.0 if suffix == ".bias" else self.plus
        return Source(
            name, None, self.view, shape, self.factor, plus, room=self.room, behind=tuple(behind)
        )  # fmt: skip


Inside = Mapping[str, "str | Place"]
"""Canonical names within a layer, without a last word weight or bias, → the family's names."""

USUAL: Inside = {
    "mixer_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "router": "mlp.gate",
    "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj", "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm",
    "attn.sinks": "self_attn.sinks", "router.choice_bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate": "mlp.gate_proj", "ffn.up": "mlp.up_proj", "ffn.down": "mlp.down_proj",
    "shared.gate": "mlp.shared_experts.gate_proj", "shared.up": "mlp.shared_experts.up_proj",
    "shared.down": "mlp.shared_experts.down_proj",
}  # fmt: skip
ROUTED = {name: str(place) for name, place in USUAL.items() if name.partition(".")[0] in ("router", "shared")}
"""Those of routers and shared experts."""


def less_one(names: Mapping[str, str]) -> dict[str, str | Place]:
    """Returns the places of norms with these names, whose weights are stored less 1."""
    return {name: Place(called, plus=1.0) for name, called in names.items()}


LESS_ONE: Inside = less_one(
    {name: str(USUAL[name]) for name in ("mixer_norm", "ffn_norm", "attn.q_norm", "attn.k_norm")}
)
"""The usual norms, where their weights are stored less 1."""
LAST_LESS_ONE: Inside = less_one({"decoder.norm": "norm"})
"""The last norm, the same."""
OfExpert = Callable[[int, int, str], Source]
"""(layer, expert, projection) → the source of this matrix, with a name behind the root of all names."""


@dataclass(frozen=True)
class Description:
    """The description of a model. `backbone`: canonical names (ModelSpec.tensors) → sources; `experts`: the sources of
    one expert's matrices, and `biases` of their biases, if they have some; `joined`: the sources of the matrices in
    checkpoints with all experts of a layer in one tensor.

    `computed`: canonical name → a tensor that no checkpoint has. `parameters`: canonical name → its place in
    transformers' model. `copies`: pairs of a packed tensor and one that repeats it in the checkpoint, and must equal
    it; `repeated`: these pairs in transformers' model. `left_out`: beginnings of tensors' names (regular expressions)
    that a pack leaves out → a note on them. `other_root`: the beginning of names here, and their beginning in other
    checkpoints of the same model, for example in those that were saved without a head. `other_names`: a name that only
    some checkpoints have, and the function that turns all names here into theirs. `without_effect`: settings of
    config.json without effect on the model. `limits`: notes on texts that the pack refuses, and on settings that the
    pack does not follow. `scheme`: the coding of the checkpoint's numbers; None for plain ones. `tables`: canonical
    names of tables that stay on the drive (ModelSpec.tables) → the sources of their rows, one after the other, and
    `table_places`: their modules in transformers' model. `stated`: whole numbers that a checkpoint may repeat, and that
    must be these.
    """

    spec: ModelSpec
    backbone: Mapping[str, Source]
    experts: Callable[[ExpertKey, str], Source]
    parameters: Mapping[str, Source]
    computed: Mapping[str, F32] = field(default_factory=dict)
    copies: tuple[tuple[str, str], ...] = ()
    repeated: tuple[tuple[str, str], ...] = ()
    biases: Callable[[ExpertKey, str], Source] | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    joined: Callable[[ExpertKey, str], Source] | None = None
    other_root: tuple[str, str] | None = None
    other_names: OtherNames | None = None
    without_effect: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    scheme: Scheme | None = None
    tables: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    table_places: Mapping[str, str] = field(default_factory=dict)
    stated: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """The notes on config.json for a person, a line each."""
        notes, names = [*self.limits], ", ".join(dict.fromkeys(self.without_effect))
        if names:
            notes.append(f"transformers gives these settings of config.json no effect on the model: {names}")
        return notes if self.coding_note is None else [*notes, self.coding_note]

    @property
    def coding_note(self) -> str | None:
        """The note on the numbers that a loss is against; None for plain ones."""
        if self.scheme is None:
            return None
        return f"the weights are coded by {self.scheme.name}: a loss is against the numbers that these codes stand for"

    @property
    def wide(self) -> Collection[str]:
        """The canonical names of tensors that have 32 bits in a pack whatever the source has."""
        changed = (name for name, source in self.backbone.items() if not source.as_it_is or name.endswith(".table"))
        return {*self.computed, *changed}

    @property
    def mxfp4(self) -> bool:
        """True if the experts have four bits in the checkpoint, as OCP's MXFP4, which a pack can keep."""
        return self.scheme is not None and self.scheme.mxfp4

    def as_stored(self, names: Collection[str]) -> Description:
        """Returns the description of a checkpoint with tensors of these names: experts of a layer may lie in one
        tensor, and all tensors of a checkpoint that was saved without a head have other names."""
        if self.other_root and _begin_otherwise(names, *self.other_root):
            root, other = self.other_root

            def by_root(name: str) -> str:
                return other + name.removeprefix(root) if name.startswith(root) else name

            return self._renamed(by_root).as_stored(names)
        if self.other_names and self.other_names[0] in names:
            return self._renamed(self.other_names[1]).as_stored(names)
        if self.joined is not None and self.joined(self.spec.expert_keys()[0], "down").name in names:
            return replace(self, experts=self.joined, joined=None).as_stored(names)
        return self

    def _renamed(self, renamed: Callable[[str], str]) -> Description:
        """Returns the description with other names in checkpoints."""

        def placed(source: Source) -> Source:
            return replace(source, name=renamed(source.name), behind=tuple(map(renamed, source.behind)))

        def of(found: Callable[[ExpertKey, str], Source] | None) -> Any:
            return None if found is None else lambda key, name: placed(found(key, name))

        return replace(
            self, backbone={name: placed(source) for name, source in self.backbone.items()},
            experts=of(self.experts), biases=of(self.biases), joined=of(self.joined), other_root=None,
            other_names=None,
            copies=tuple((renamed(one), renamed(copy)) for one, copy in self.copies),
            tables={name: tuple(map(placed, pieces)) for name, pieces in self.tables.items()},
            stated={renamed(name): numbers for name, numbers in self.stated.items()},
        )  # fmt: skip


def _begin_otherwise(names: Collection[str], root: str, other: str) -> bool:
    """Returns whether a checkpoint's names begin with `other` in place of `root`: some begin with `other`, and none
    with `root`, unless `other` begins with `root` itself. A checkpoint with both is one of `root` in which a few names
    lack it."""
    if not other.startswith(root) and any(name.startswith(root) for name in names):
        return False
    return any(name.startswith(other) for name in names)


@dataclass(frozen=True)
class Names:
    """A family's own names, where they differ from most families'. `inside`: in its checkpoints; `in_memory`: in the
    model, where they differ again. `expert`, `bias`: an expert's matrices and their biases; `joined`: see Description.
    `root`: the beginning of names in checkpoints (longer if the model is published inside a larger one), `other_root`:
    another beginning in some checkpoints, `other_names`: see Description, `model`: the beginning in memory; `head`: the
    name of the head; `outside`: canonical names outside the layers. `ones`, `zeros`: endings of the canonical names of
    tensors that are not stored, because all their numbers are 1, or 0. `parts`: see Family; {part} in names inside is
    the place of a pack's layer among those of a layer, from 0."""

    inside: Inside = field(default_factory=dict)
    in_memory: Inside = field(default_factory=dict)
    expert: OfExpert | None = None
    bias: OfExpert | None = None
    joined: OfExpert | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    root: str = "model."
    model: str = "model."
    head: str = "lm_head"
    outside: Inside = field(default_factory=dict)
    ones: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    other_root: str = ""
    other_names: OtherNames | None = None
    parts: int = 1


def named(pattern: str, projections: Mapping[str, str] | None = None, last: str = "weight") -> OfExpert:
    """Returns the sources of experts with a tensor for each matrix (`last`: or for each bias): its name is `pattern`
    with {expert} and {projection}, which `projections` may rename, and `last`."""

    def of_expert(layer: int, expert: int, projection: str) -> Source:
        called = (projections or {}).get(projection, projection)
        return Source(f"layers.{layer}.{pattern.format(expert=expert, projection=called)}.{last}")

    return of_expert


def in_pairs(attention: Attention, d_model: int) -> dict[str, Place]:
    """Returns the places of queries and keys whose rotary positions turn pairs; see halves."""
    heads = {"q": attention.n, "k": attention.kv}
    return {
        f"attn.{name}": Place(f"self_attn.{name}_proj", halves(n), (n * attention.dim, d_model))
        for name, n in heads.items()
    }  # fmt: skip


def joined(experts: str, d_ff: int, d_model: int, turned: bool = False, either: bool = False) -> OfExpert:
    """Returns the sources of experts with one tensor for all of a layer: down_proj [experts, d_model, d_ff], and gate
    and up one after the other in gate_up_proj [experts, 2 · d_ff, d_model], both in the layer's module `experts`.
    `turned`: each matrix is transposed; `either`: it may be."""

    def of_expert(layer: int, expert: int, projection: str) -> Source:
        found = in_one(f"layers.{layer}.{experts}.{{}}_proj", projection, d_ff, d_model)
        if turned:
            view, shape = found.view, found.shape or (d_model, d_ff)
            found = replace(found, view=transposed if view is None else in_turn(transposed, view), shape=shape[::-1])
        return replace(found, index=expert, either=either)

    return of_expert


def in_one(name: str, projection: str, d_ff: int, d_model: int) -> Source:
    """Returns the source of a matrix of a network with gate and up one after the other: `name` with down or gate_up in
    place of {}."""
    if projection == "down":
        return Source(name.format("down"))
    part = rows(0, d_ff) if projection == "gate" else rows(d_ff)
    return Source(name.format("gate_up"), None, part, (2 * d_ff, d_model))


_EXPERT = named("mlp.experts.{expert}.{projection}_proj")
EXPERTS_W123 = named("block_sparse_moe.experts.{expert}.{projection}", {"gate": "w1", "up": "w3", "down": "w2"})
"""The sources of experts with Mixtral's names."""


def decoder(
    family: str, config: Config, tokens: Tokens, layers: Sequence[Layer], names: Names | None = None,
    ropes: Sequence[tuple[Rope, F32]] | None = None, **spec_fields: object,
) -> Description:  # fmt: skip
    """Returns the description of the decoder that most families share, of these layers. `ropes`: None for one rope that
    turns the heads' features, with config.json's settings. `spec_fields`: fields of ModelSpec with unusual values.
    Raises UnsupportedModel."""
    if len(layers) != (n := config.count("num_hidden_layers")):
        raise UnsupportedModel(
            f"config.json sets num_hidden_layers {n}, and says of {len(layers)} layers what they are"
        )
    if not any(isinstance(layer.ffn, Experts) for layer in layers):
        raise UnsupportedModel(
            "config.json sets no layer with experts: models of this family are packed only with some"
        )
    names, norm = names or Names(), layers[0].inner_norm
    if (attention := next((layer.attends for layer in layers if layer.attends is not None), None)) is None:
        raise UnsupportedModel("config.json sets no layer with attention: transformers writes no text with one")
    ropes = [config.rope(attention.turning)] if ropes is None else ropes
    spec = ModelSpec(
        family=family,
        vocab_size=config.get("vocab_size"),
        d_model=config.count("hidden_size"),
        encoder=None,
        decoder=stack_of(layers, norm),
        ropes=tuple(rope for rope, _ in ropes),
        head=Head(bool(config.get("tie_word_embeddings")), 1.0),
        tokens=replace(tokens, first=None),  # after a prompt nothing is forced
        max_positions=config.get("max_position_embeddings"),
    )
    spec = replace(spec, **spec_fields)  # type: ignore[arg-type]
    for _, frequencies in ropes:
        if not np.isfinite(frequencies).all():
            raise UnsupportedModel("config.json sets rope_parameters by which positions turn by no finite angle")
    computed = {f"rope.{place}.frequencies": frequencies for place, (_, frequencies) in enumerate(ropes)}
    for ends, value in ((names.ones, 1), (names.zeros, 0)):
        shapes = {name: tensor.shape for name, tensor in spec.tensors.items() if name.endswith(ends)}
        check_computed(sum(map(math.prod, shapes.values())))
        computed |= {name: np.full(shape, value, np.float32) for name, shape in shapes.items()}
    stored = [name for name in spec.tensors if name not in computed]
    hub = {**_OUTSIDE, **USUAL, **names.outside, **names.inside}
    backbone = {name: _source(name, hub, names.root, names.head, names.parts) for name in stored}
    in_memory = {**hub, **names.in_memory}
    parameters = {name: _source(name, in_memory, names.model, "lm_head", names.parts) for name in stored}

    def rooted(of_expert: OfExpert) -> Callable[[ExpertKey, str], Source]:
        def source(key: ExpertKey, projection: str) -> Source:
            found = of_expert(key.layer, key.expert, projection)
            return replace(found, name=names.root + found.name)

        return source

    copies, repeated = (
        ((f"{root}{hub['embed']}.weight", f"{head}.weight"),) if spec.head.tied else ()
        for root, head in ((names.root, names.head), (names.model, "lm_head"))
    )
    biases = None if names.bias is None else rooted(names.bias)
    at_once = None if names.joined is None else rooted(names.joined)
    return Description(
        spec, backbone, rooted(names.expert or _EXPERT), parameters, computed, copies, repeated, biases,
        names.left_out, at_once, (names.root, names.other_root) if names.other_root else None, names.other_names,
    )  # fmt: skip


def limited(described: Description, most: int, note: str) -> Description:
    """Returns the description of a model for texts of at most `most` tokens, with a note on the reason."""
    most = min(most, described.spec.max_positions or most)
    spec = replace(described.spec, max_positions=most)
    return replace(described, spec=spec, limits=(*described.limits, note))


def _source(canonical: str, inside: Inside, root: str, head: str, parts: int) -> Source:
    found = _LAYER.fullmatch(canonical)
    part, start, among = canonical, root, 0
    if found is not None:
        layer, among = divmod(int(found[1]), parts)
        part, start = found[2], f"{root}layers.{layer}."
    for suffix in _TENSOR_SUFFIXES:
        name = part.removesuffix(suffix) if suffix else part
        if part != name + suffix:
            continue
        if name == "head":
            return Source(head + suffix)
        if name in inside:
            found_at = inside[name]
            place = found_at if isinstance(found_at, Place) else Place(found_at)
            return place._replace(name=place.name.replace("{part}", str(among))).source(start, suffix)
    raise KeyError(f"{canonical} has no name in this family's checkpoints")
