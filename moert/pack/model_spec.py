"""ModelSpec: all that the runtime must know of an architecture, free of any family's own names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Stack = Literal["encoder", "decoder"]
_MOST_FEATURES = 1 << 24
STACKS: tuple[Stack, ...] = ("encoder", "decoder")

DenseRole = Literal["attention", "router", "ffn", "head", "embed"]
DENSE_ROLES: tuple[DenseRole, ...] = ("attention", "router", "ffn", "head", "embed")
"""What a dense matrix (one outside the experts) is for; a pack gives widths to roles."""


class ExpertKey(NamedTuple):
    """Names one expert: which stack, which layer of it (counted over all its layers), which expert."""

    stack: Stack
    layer: int
    expert: int

    def __str__(self) -> str:
        return f"{self.stack[0].upper()}{self.layer:02d}/E{self.expert:03d}"


@dataclass(frozen=True)
class StackSpec:
    """One tower of layers. `moe_layers` are the indices of the layers whose feed-forward part has experts."""

    n_layers: int
    moe_layers: tuple[int, ...]


@dataclass(frozen=True)
class MoeSpec:
    """The experts: one shape for all of them.

    `projections` are ("up", "down") for a plain and ("gate", "up", "down") for a gated feed-forward:
    y = down(act(up(x))) or y = down(act(gate(x)) * up(x)). `norm_topk` rescales the selected router
    probabilities to sum to 1. `capacity` is the most tokens of one sequence that one expert takes in one forward
    pass (later tokens skip it); None means no limit. With `activation_limit` the gate is clamped to at most the limit
    and up to ± the limit before the activation; without a gate, up to at most the limit.
    """

    num_experts: int
    top_k: int
    d_ff: int
    activation: Literal["relu", "silu", "gelu", "gelu_new"]
    gated: bool
    norm_topk: bool
    capacity: int | None
    activation_limit: float | None = None

    @property
    def projections(self) -> tuple[str, ...]:
        return ("gate", "up", "down") if self.gated else ("up", "down")


@dataclass(frozen=True)
class ModelSpec:
    """An architecture in canonical terms; the converter fills it from a family's config.

    Shapes: embeddings [vocab_size, d_model]; q [n_heads * head_dim, d_model]; k, v [n_kv_heads * head_dim,
    d_model]; expert gate, up [d_ff, d_model], down [d_model, d_ff].
    """

    family: str
    vocab_size: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    encoder: StackSpec | None
    decoder: StackSpec
    moe: MoeSpec
    d_ff_dense: int  # of layers without experts; 0 where there are none
    norm_eps: float
    positions: Literal["rope", "relative"]
    rope_theta: float  # 0 unless positions == "rope"
    relative_buckets: int  # 0 unless positions == "relative"
    relative_max_distance: int  # 0 unless positions == "relative"
    attention_scale: float
    qk_norm: bool  # RMS norm over the whole q and k vectors, before the heads are split
    clip_qkv: float | None
    tied_head: bool  # logits = hidden @ embed.T
    logit_scale: float  # hidden states are multiplied by it before the head
    max_positions: int | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    decoder_start_token_id: int | None

    def stack(self, name: Stack) -> StackSpec | None:
        return self.encoder if name == "encoder" else self.decoder

    def moe_layers(self) -> list[tuple[Stack, int]]:
        """Every layer with experts, in the order of execution."""
        order: list[tuple[Stack, int]] = []
        for name in STACKS:
            stack = self.stack(name)
            if stack is not None:
                order += [(name, layer) for layer in stack.moe_layers]
        return order

    def expert_keys(self) -> list[ExpertKey]:
        """Every expert, in the order of execution."""
        return [
            ExpertKey(name, layer, expert)
            for name, layer in self.moe_layers()
            for expert in range(self.moe.num_experts)
        ]

    def projection_shape(self, projection: str) -> tuple[int, int]:
        """(out_features, in_features) of one projection of an expert."""
        if projection == "down":
            return self.d_model, self.moe.d_ff
        return self.moe.d_ff, self.d_model

    def weights_per_expert(self) -> int:
        return len(self.moe.projections) * self.d_model * self.moe.d_ff


def backbone_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name → shape of every tensor that stays in memory. This list is the contract of backbone.safetensors.

    All matrices are stored [out_features, in_features].
    """
    d, q_dim, kv_dim = spec.d_model, spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (spec.vocab_size, d)}
    if not spec.tied_head:
        shapes["head.weight"] = (spec.vocab_size, d)
    for name in STACKS:
        stack = spec.stack(name)
        if stack is None:
            continue
        shapes[f"{name}.norm.weight"] = (d,)
        if spec.positions == "relative":
            shapes[f"{name}.relative_bias.weight"] = (spec.relative_buckets, spec.n_heads)
        for layer in range(stack.n_layers):
            at = f"{name}.{layer}"
            blocks = ["attn", "cross"] if name == "decoder" and spec.encoder is not None else ["attn"]
            for block in blocks:
                shapes[f"{at}.{block}_norm.weight"] = (d,)
                shapes[f"{at}.{block}.q.weight"] = (q_dim, d)
                shapes[f"{at}.{block}.k.weight"] = (kv_dim, d)
                shapes[f"{at}.{block}.v.weight"] = (kv_dim, d)
                shapes[f"{at}.{block}.o.weight"] = (d, q_dim)
                if spec.qk_norm:
                    shapes[f"{at}.{block}.q_norm.weight"] = (q_dim,)
                    shapes[f"{at}.{block}.k_norm.weight"] = (kv_dim,)
            shapes[f"{at}.ffn_norm.weight"] = (d,)
            if layer in stack.moe_layers:
                shapes[f"{at}.router.weight"] = (spec.moe.num_experts, d)
            else:
                for projection in spec.moe.projections:
                    out_in = (d, spec.d_ff_dense) if projection == "down" else (spec.d_ff_dense, d)
                    shapes[f"{at}.ffn.{projection}.weight"] = out_in
    return shapes


def dense_role(spec: ModelSpec, name: str) -> DenseRole | None:
    """What the matrix of this canonical name (one of `backbone_tensors`) is for; None for norms and position biases."""
    if name in ("embed.weight", "head.weight"):
        return "head" if name == "head.weight" or spec.tied_head else "embed"
    block, _, matrix = name.removesuffix(".weight").rpartition(".")
    if matrix == "router":
        return "router"
    if block.endswith(".ffn"):
        return "ffn"
    return "attention" if block.endswith((".attn", ".cross")) and matrix in ("q", "k", "v", "o") else None


def dense_roles(spec: ModelSpec) -> tuple[DenseRole, ...]:
    """The roles that the model has matrices of."""
    found = {dense_role(spec, name) for name in backbone_tensors(spec)}
    return tuple(role for role in DENSE_ROLES if role in found)


def contradictions(spec: ModelSpec) -> Iterator[str]:
    """What numbers and choices that are each legal say together, and no model of version 1 can have."""
    if spec.n_heads * spec.head_dim > _MOST_FEATURES:
        yield f"n_heads times head_dim is {spec.n_heads * spec.head_dim}, it should be at most {_MOST_FEATURES}"
    if spec.norm_eps <= 0:
        yield f"norm_eps is {spec.norm_eps}, it should be above 0"
    limit = spec.moe.activation_limit
    if limit is not None and limit <= 0:
        yield f"activation_limit is {limit}, it should be above 0"
    for name in ("attention_scale", "logit_scale"):
        if getattr(spec, name) == 0:
            yield f"{name} is 0, so that nothing the model reads would matter"
    if spec.positions == "rope":
        if spec.encoder is not None:
            yield "positions are 'rope', but there is an encoder, whose positions are 'relative' in version 1"
        if spec.head_dim % 2:
            yield f"positions are 'rope', but head_dim is {spec.head_dim}, which has no halves"
        if spec.rope_theta <= 0:
            yield f"positions are 'rope', but rope_theta is {spec.rope_theta}, it should be above 0"
        return
    if spec.encoder is None:
        yield "positions are 'relative', but there is no encoder: a decoder alone has 'rope' in version 1"
    if spec.qk_norm or spec.clip_qkv is not None:
        yield "qk_norm or clip_qkv is set, which models with an encoder do not have in version 1"
    if spec.relative_buckets < 4 or spec.relative_buckets % 2:
        yield f"relative_buckets is {spec.relative_buckets}, it should be even and at least 4"
    if spec.relative_max_distance <= spec.relative_buckets // 2:
        yield (
            f"relative_max_distance is {spec.relative_max_distance}, it should be above {spec.relative_buckets // 2}, "
            "half of relative_buckets"
        )
    start = spec.decoder_start_token_id
    if start is None or start >= spec.vocab_size:
        yield f"decoder_start_token_id is {start}, the decoder starts with a token below {spec.vocab_size}"
