"""The experts of a loaded model, run in one way for every measurement: grouped, counted, with a probe's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moeconv.source.archs import Family
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec
from moert.pack.parts import Act, Ffn

Weights = tuple[Tensor, ...]
"""One expert's matrices [out, in], in the order of `ffn.projections`."""

Biases = tuple[Tensor, ...]
"""One expert's biases [out], in the order of its matrices; empty if it has none."""

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [..., in], a matrix [out, in] and a bias [out] → the product [..., out], as of `linear`."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nn.functional.relu,
    "relu2": lambda x: nn.functional.relu(x).square(),
    "gelu": nn.functional.gelu,
    "gelu_new": partial(nn.functional.gelu, approximate="tanh"),
}


@dataclass(frozen=True)
class Call:
    """A call of one layer's experts: x [tokens, d_model], chosen [tokens, top_k] (-1: no expert, as for padding), and
    the router's weights of these choices [tokens, top_k]."""

    x: Tensor
    chosen: Tensor
    weights: Tensor

    def rows(self, num_experts: int) -> Tensor:
        """Returns the number of rows that each expert gets. [num_experts]"""
        return torch.bincount(self.chosen[self.chosen >= 0], minlength=num_experts)


@dataclass(frozen=True)
class Substitute:
    """Weights for probes: row r of the batch belongs to probe `probe_of_row[r]`, for which other weights stand in for
    one expert of the layer `place`."""

    place: LayerKey
    probe_of_row: Tensor  # [rows]
    expert_of_probe: Tensor  # [probes]
    weights: Sequence[Weights]  # [probes]


class Rerouting(Protocol):
    """Routing in place of a model's routers: cache-aware (moeconv.source.routers), or by a hash function of the tokens
    (moeconv.foresight.network)."""

    def route(self, at: LayerKey, chosen: Tensor, weights: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Returns experts and weights to use in place of those of the model's own router, `chosen` and `weights`, all
        [tokens, top_k]. The tokens are sequences padded on the right; real [sequences, places] is true for tokens."""
        ...

    def writing(self, sequences: int) -> AbstractContextManager[object]:
        """Makes calls inside a with block continue the same sequences, which `keep` may reduce."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Keeps these of the sequences [sequences] only."""
        ...


class Naming(Protocol):
    """A predictor of the neurons of an expert that are computed (moeconv.foresight.neurons)."""

    def computed(self, key: ExpertKey, x: Tensor) -> Tensor:
        """Returns, for an expert's inputs x [rows, d_model], true where neurons are computed. bool [rows, d_ff]"""
        ...


class Supply(Protocol):
    """A source of experts' matrices and biases."""

    def weights(self, key: ExpertKey) -> Weights: ...

    def biases(self, key: ExpertKey) -> Biases: ...

    def expect(self, keys: Sequence[ExpertKey]) -> None:
        """Prepares for calls of `weights` with these keys, in this order."""
        ...


class OwnExperts:
    """The experts of a model in memory: views of its parameters, so that writing to them changes the model."""

    def __init__(self, model: Any, family: Family, spec: ModelSpec) -> None:
        projections = spec.moe.ffn.projections
        self._weights = {
            key: tuple(family.expert_weight(model, key, name) for name in projections) for key in spec.expert_keys()
        }
        self._biases: dict[ExpertKey, Biases] = {}
        if spec.moe.ffn.bias:
            self._biases = {
                key: tuple(family.expert_bias(model, key, name) for name in projections) for key in spec.expert_keys()
            }

    def weights(self, key: ExpertKey) -> Weights:
        return self._weights[key]

    def biases(self, key: ExpertKey) -> Biases:
        return self._biases.get(key, ())

    def expect(self, keys: Sequence[ExpertKey]) -> None:
        pass  # they are there


@dataclass(frozen=True)
class Pass:
    """The settings of passes through a model's experts; those that are None change nothing.

    active: [rows, tokens], true for tokens whose experts run; the others get zeros. substitute: weights of probes.
    rerouting: chooses other experts than the routers did. naming: neurons that it leaves out count as zero. attended:
    for each row of a decoder the row of the encoder's last input that it attends to [rows]. answer: gives the output of
    a layer's experts for a call [tokens, d_model]; where it returns None, they run. watch: gets each call.
    """

    active: Tensor | None = None
    substitute: Substitute | None = None
    rerouting: Rerouting | None = None
    naming: Naming | None = None
    attended: Tensor | None = None
    answer: Callable[[LayerKey, Call], Tensor | None] | None = None
    watch: Callable[[LayerKey, Call], None] | None = None


class ExpertCalls:
    """The runner of a model's experts, in place of the model's own code in all layers. `rows` counts computed rows,
    each by one expert. `now`: the settings of the present pass. `supply`: None for the model's own weights."""

    def __init__(self, model: Any, family: Family, spec: ModelSpec, supply: Supply | None = None) -> None:
        self.spec, self.family, self.rows, self.now = spec, family, 0, Pass()
        self.supply: Supply = OwnExperts(model, family, spec) if supply is None else supply
        for place in spec.moe_layers():
            family.experts_module(model, place).forward = partial(self._run, place)

    def flops(self, rows: int) -> int:
        """Returns the operations in `rows` expert rows: two for each weight."""
        return rows * 2 * self.spec.weights_per_expert()

    def weights(self, key: ExpertKey) -> Weights:
        return self.supply.weights(key)

    @contextmanager
    def during(self, **changes: Any) -> Iterator[None]:
        """Changes these settings of passes (see Pass) inside a with block."""
        before, self.now = self.now, replace(self.now, **changes)
        try:
            yield
        finally:
            self.now = before

    @contextmanager
    def recording(self) -> Iterator[dict[LayerKey, Call]]:
        """Collects the last call of each layer's experts inside a with block."""
        seen: dict[LayerKey, Call] = {}
        with self.during(watch=seen.__setitem__):
            yield seen

    @contextmanager
    def writing(self, sequences: int) -> Iterator[Callable[[Tensor], None]]:
        """Makes calls inside a with block continue the same sequences; gives the function that keeps some of them
        [sequences]."""
        if self.now.rerouting is None:
            yield lambda rows: None
            return
        with self.now.rerouting.writing(sequences):
            yield self.now.rerouting.keep

    def inner(self, key: ExpertKey, x: Tensor, weights: Weights | None = None) -> Tensor:
        """Returns the inputs of an expert's down matrix [rows, d_ff] for x [rows, d_model], by its own weights if no
        others are given."""
        return expert_inner(
            x, self.weights(key) if weights is None else weights, self.supply.biases(key), self.spec.experts[key.at].ffn
        )

    def given(self, place: LayerKey | None, call: Call) -> Tensor:
        """Returns the output of a layer's experts for a call. [tokens, d_model]"""
        assert place is not None
        return self._grouped(call, [place.expert(number) for number in range(self.spec.moe.n)], {})

    def ffn(self, key: ExpertKey, x: Tensor, weights: Weights) -> Tensor:
        """Returns the output of one expert with these weights [rows, d_model] for x [rows, d_model], and counts its
        rows."""
        self.rows += len(x)
        ffn, biases = self.spec.experts[key.at].ffn, self.supply.biases(key)
        if self.now.naming is None:
            return expert_ffn(x, weights, ffn, biases)
        inner = expert_inner(x, weights, biases, ffn).where(self.now.naming.computed(key, x), 0.0)
        return expert_outer(inner, weights, biases)

    def _run(self, place: LayerKey, x: Tensor, selected: Tensor, router_weights: Tensor) -> Tensor:
        now, (chosen, weights) = self.now, self.family.routed(selected, router_weights)
        if now.rerouting is not None:
            real = torch.ones((1, len(x)), dtype=torch.bool) if now.active is None else now.active
            chosen, weights = now.rerouting.route(place, chosen, weights, real)
        if self.spec.moe.router.weigh == "input":
            x, weights = x * weights, torch.ones_like(weights)
        if now.active is not None:
            chosen = chosen.masked_fill(~now.active.reshape(-1, 1), -1)
        n = self.spec.moe.n
        if not self.spec.experts[place].router.identities:
            return self._made(place, Call(x, chosen, weights))
        kept = weights.masked_fill(chosen < n, 0).sum(-1, keepdim=True)
        return self._made(place, Call(x, chosen.masked_fill(chosen >= n, -1), weights)) + kept * x

    def _made(self, place: LayerKey, call: Call) -> Tensor:
        """Returns the output of a layer's experts for a call, as the present pass has it. [tokens, d_model]"""
        now = self.now
        if now.watch is not None:
            now.watch(place, call)
        if now.answer is not None and (answer := now.answer(place, call)) is not None:
            return answer
        keys, given = [place.expert(number) for number in range(self.spec.moe.n)], {}
        if now.substitute is not None and now.substitute.place == place:
            call = replace(call, chosen=_substituted(call.chosen, now.substitute, len(keys)))
            given = dict(enumerate(now.substitute.weights, len(keys)))
            keys += map(place.expert, now.substitute.expert_of_probe.tolist())
        return self._grouped(call, keys, given)

    def _grouped(self, call: Call, keys: Sequence[ExpertKey], given: Mapping[int, Weights]) -> Tensor:
        """Returns the output of experts for a call [tokens, d_model]. Rows are sorted by expert, so that each expert
        runs once; a token's experts are summed in order of their number. `given`: weights of some of `keys`, by their
        place there; the other experts have their own."""
        x, chosen, weights = call.x, call.chosen, call.weights
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)[int((flat < 0).sum()) :]
        counts = torch.bincount(flat[order], minlength=len(keys)).tolist()
        self.supply.expect([keys[at] for at, count in enumerate(counts) if count and at not in given])
        tokens = order // chosen.shape[1]
        rows, start = x[tokens], 0  # inputs, which outputs then replace
        for expert, count in enumerate(counts):
            if count:
                mine = given[expert] if expert in given else self.supply.weights(keys[expert])
                rows[start : start + count] = self.ffn(keys[expert], rows[start : start + count], mine)
                start += count
        return torch.zeros_like(x).index_add_(0, tokens, rows.mul_(weights.reshape(-1, 1)[order]))


def expert_ffn(x: Tensor, weights: Weights, ffn: Ffn, biases: Biases = (), product: Product | None = None) -> Tensor:
    """Returns the output of an expert [rows, d_model] for x [rows, d_model]: see moert.pack.parts.Ffn and Act."""
    return expert_outer(expert_inner(x, weights, biases, ffn, product), weights, biases, product)


def expert_outer(inner: Tensor, weights: Weights, biases: Biases, product: Product | None = None) -> Tensor:
    """Returns the output of the down matrix [rows, d_model] for inner [rows, d_ff]."""
    return (product or linear)(inner, weights[-1], biases[-1] if biases else None)


def expert_inner(x: Tensor, weights: Weights, biases: Biases, ffn: Ffn, product: Product | None = None) -> Tensor:
    """Returns the inputs of the down matrix [rows, d_ff] for x [rows, d_model]."""
    limit, bound, multiplied = ffn.act.limit, ffn.act.bound, product or linear
    first, *others = (
        multiplied(x, weight, biases[place] if biases else None)
        for place, weight in enumerate(weights[: 2 if ffn.gated else 1])
    )
    inner = _activated(ffn.act, first if limit is None else first.clamp(max=limit))
    inner = inner if bound is None else inner.clamp(max=bound)
    if not ffn.gated:
        return inner
    up = others[0]
    for most in (limit, bound):
        up = up if most is None else up.clamp(-most, most)
    return inner * (up if ffn.act.plus == 0 else up + ffn.act.plus)


def _activated(act: Act, x: Tensor) -> Tensor:
    if act.name != "silu":
        return _ACTIVATIONS[act.name](x)
    return nn.functional.silu(x) if act.slope == 1 else x * torch.sigmoid(x * act.slope)


def _substituted(chosen: Tensor, substitute: Substitute, num_experts: int) -> Tensor:
    """Returns choices [tokens, top_k] in which the number of its substitute replaces a row's probed expert."""
    rows = len(substitute.probe_of_row)
    probe = substitute.probe_of_row.repeat_interleave(len(chosen) // rows)[:, None]
    return torch.where(chosen == substitute.expert_of_probe[probe], num_experts + probe, chosen)


# Products with matrices. Where there is AVX-512, oneDNN's take half the time of torch's own, whose library leaves it
# unused on some of the processors that have it.

_MUCH = 1 << 24  # multiplications: with fewer, oneDNN's preparation for one more shape may take longer than it saves
_ONEDNN: Any = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if torch.backends.cpu.get_cpu_capability() == "AVX512"
    else None
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x Wᵀ + bias [..., out] for x [..., in] and weight [out, in]."""
    if _ONEDNN is None or torch.is_grad_enabled() or x.numel() * len(weight) < _MUCH:
        return nn.functional.linear(x, weight, bias)
    found: Tensor = _ONEDNN(x, weight, bias, "none", [], "")
    return found


def multiplied_by_linear(model: nn.Module) -> None:
    """Makes a model's linear modules multiply by `linear`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)
