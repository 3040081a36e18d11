"""Weights by their canonical names → the layers that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from moert.kernels.backend import (
    NO_NORM,
    AttentionWeights,
    Backend,
    Floats,
    Matrix,
    NormWeights,
    RouterWeights,
    Stored,
)
from moert.models.ffn import (
    BesideExperts,
    DenseFfn,
    ExpertRunner,
    MoeFfn,
    MoeJoin,
    NarrowExperts,
    Network,
    Routers,
    SharedExpert,
)
from moert.models.mixers import MIXES, FixedMixer
from moert.models.router import LearnedRouter
from moert.pack.codec import F32
from moert.pack.model_spec import LayerKey
from moert.pack.parts import Attention, Beside, Experts, Ffn, FixedState, Latent, Layer, Norm, Rope, Tensor


class Weights(Protocol):
    """Canonical name → as stored. What is taken out is the taker's own."""

    def __contains__(self, name: object, /) -> bool: ...

    def pop(self, name: str, /) -> Stored: ...


class Builder:
    """Takes weights out by name."""

    def __init__(self, weights: Weights, ropes: Sequence[Rope], backend: Backend) -> None:
        self._weights, self._ropes, self.backend = weights, ropes, backend

    def matrix(self, name: str) -> Matrix:
        """With its bias, if it has one."""
        bias = self.floats(f"{name}.bias") if f"{name}.bias" in self._weights else None
        return self.backend.matrix(self._weights.pop(f"{name}.weight"), bias)

    def floats(self, name: str) -> F32:
        """What is never quantised: a copy in float32."""
        stored = self._weights.pop(name)
        assert isinstance(stored, Floats), f"{name} is no tensor of floats"
        return stored.widened()

    def stored(self, name: str) -> Floats:
        """The same as it is stored."""
        found = self._weights.pop(name)
        assert isinstance(found, Floats), f"{name} is no tensor of floats"
        return found

    def norm(self, part: Norm | None, name: str) -> NormWeights:
        if part is None:
            return NO_NORM
        weight = self.floats(f"{name}.weight")
        return NormWeights(weight, self.floats(f"{name}.bias") if part.kind == "layer" else None, part.eps)

    def attention(self, layer: Layer, name: str, crossing: bool, causal: bool) -> AttentionWeights[Matrix]:
        part, join = (layer.cross, None) if crossing else (layer.attention, layer.mixer_join)
        assert part is not None
        at = f"{name}.{'cross' if crossing else 'attn'}"
        norms = {"before": self.norm(layer.norm, f"{name}.{'cross' if crossing else 'mixer'}_norm")}
        if join is not None and join.after is not None:
            norms["after"] = self.norm(join.after, f"{name}.mixer_after")
        tensors = list(part.tensors(at, 1))
        inner = part.norm if isinstance(part, Latent) else _like(layer.norm)
        norms |= {each: self.norm(inner, f"{at}.{each}_norm") for each in _named(tensors, at, "_norm.weight")}
        matrices = {each: self.matrix(f"{at}.{each}") for each in _named(tensors, at, ".weight") if "_norm" not in each}
        sinks = self.floats(f"{at}.sinks") if isinstance(part, Attention) and part.sinks else None
        dims = 0 if part.rope is None else self._ropes[part.rope].dims
        add = 1.0 if join is None else join.add
        return AttentionWeights(part, not crossing, causal, dims, norms, matrices, sinks, add)

    def fixed(self, part: FixedState, layer: Layer, name: str) -> FixedMixer:
        join = layer.mixer_join
        norm = self.norm(layer.norm, f"{name}.mixer_norm")
        after = None if join.after is None else self.norm(join.after, f"{name}.mixer_after")
        return FixedMixer(MIXES[type(part)](part, f"{name}.mixer", self), norm, after, join.add, self.backend)

    def ffn(self, layer: Layer, at: LayerKey, runner: ExpertRunner, routers: Routers) -> MoeFfn | DenseFfn | None:
        name, join = f"{at.stack}.{at.layer}", layer.ffn_join
        if layer.ffn is None:
            return None
        norm = self.norm(layer.norm, f"{name}.ffn_norm")
        after = None if join.after is None else self.norm(join.after, f"{name}.ffn_after")
        if isinstance(layer.ffn, Ffn):
            return DenseFfn(self._network(layer.ffn, f"{name}.ffn"), norm, after, join.add, self.backend)
        experts, weighs_input = layer.ffn, layer.ffn.router.weigh == "input"
        scaled = (weighs_input or experts.narrow is not None) and join.add != 1
        apart = after is not None or experts.beside is not None or experts.bypass or scaled
        routers[at] = self._router(experts, name, norm, 1.0 if apart else join.add)
        joined = MoeJoin(after, join.add, apart, weighs_input, experts.router.overflow == "itself")
        shared, beside, narrow = self._shared(experts, name), self._beside(experts, name), self._narrow(experts, name)
        bypass = self.matrix(f"{name}.bypass") if experts.bypass else None
        return MoeFfn(at, routers, runner, self.backend, joined, shared, beside, narrow, bypass)

    def _network(self, part: Ffn, at: str) -> Network:
        gate, up, down = (self.matrix(f"{at}.{each}") if each in part.projections else None for each in _PROJECTIONS)
        assert up is not None
        assert down is not None
        return Network(part, self.backend.dense(gate, up, down), self.backend)

    def _router(self, experts: Experts, at: str, norm: NormWeights, factor: float) -> LearnedRouter:
        part = experts.router
        choice = self.floats(f"{at}.router.choice_bias") if part.choice_bias else None
        scale = self.floats(f"{at}.router.expert_scale") if part.expert_scale else None
        own = self.norm(Norm(norm.eps), f"{at}.router_norm") if part.own_norm else None
        matrix = self.matrix(f"{at}.router")
        return LearnedRouter(RouterWeights(part, factor, norm, own, matrix, choice, scale), self.backend)

    def _shared(self, experts: Experts, at: str) -> SharedExpert | None:
        if experts.shared is None:
            return None
        gate = self.matrix(f"{at}.shared_gate") if experts.shared_gate else None
        return SharedExpert(self._network(experts.shared, f"{at}.shared"), gate)

    def _beside(self, experts: Experts, at: str) -> BesideExperts | None:
        part: Beside | None = experts.beside
        if part is None:
            return None
        norm, after, experts_after = (
            self.norm(each, f"{at}.{name}")
            for each, name in (
                (part.norm, "beside_norm"), (part.after, "beside_after"), (part.experts_after, "experts_after")
            )
        )  # fmt: skip
        return BesideExperts(self._network(part.ffn, f"{at}.beside"), norm, after, experts_after)

    def _narrow(self, experts: Experts, at: str) -> NarrowExperts | None:
        if experts.narrow is None:
            return None
        return NarrowExperts(experts.narrow.features, self.matrix(f"{at}.narrow"), self.matrix(f"{at}.widen"))


_PROJECTIONS = ("gate", "up", "down")


def _like(norm: Norm | None) -> Norm | None:
    """Of the kind rms, with its eps."""
    return None if norm is None else Norm(norm.eps)


def _named(tensors: Iterable[Tensor], at: str, suffix: str) -> list[str]:
    """AT.NAMEsuffix → NAME"""
    return [tensor.name[len(at) + 1 : -len(suffix)] for tensor in tensors if tensor.name.endswith(suffix)]
