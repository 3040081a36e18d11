"""The routers of a loaded model: their inputs, scores and choices; and cache-aware routing in their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeconv.source.archs.description import Description
from moeconv.source.archs.weights import parameter
from moert.pack.manifest import Preference
from moert.pack.model_spec import LayerKey
from moert.pack.parts import Experts, Router

# The routers of a loaded model: their inputs, recorded while it runs, and the scores that follow from these.
# The input of a layer's router is recorded at the module that has the router's matrix, and scores are computed from it
# as the pack will do (moert.pack.parts.Router).

F32 = npt.NDArray[np.float32]


class RouterWeights(NamedTuple):
    """The weights of one layer's router, read when `router_of` was called."""

    part: Router
    weight: Tensor
    bias: Tensor | None
    choice_bias: F32 | None
    expert_scale: Tensor | None


class Routers:
    """The routers of some layers. `heard` [tokens, d_model] is the last input of each, inside `listening`."""

    def __init__(self, model: Any, description: Description, places: Sequence[LayerKey]) -> None:
        self.heard: dict[LayerKey, Tensor] = {}
        self.layers = {at: router_of(model, description, at) for at in places}
        self._modules: dict[LayerKey, Any] = {}
        for at in places:
            owner = description.parameters[f"{at.stack}.{at.layer}.router.weight"].name.rpartition(".")[0]
            self._modules[at] = model.get_submodule(owner)

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for at, module in self._modules.items():
                hooks.callback(module.register_forward_pre_hook(partial(self._hear, at)).remove)
            try:
                yield
            finally:
                self.heard.clear()

    def _hear(self, at: LayerKey, module: Any, inputs: tuple[Any, ...]) -> None:
        self.heard[at] = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).float()


def router_of(model: Any, description: Description, at: LayerKey) -> RouterWeights:
    name = f"{at.stack}.{at.layer}.router"
    part = description.spec.stacks[at.stack][at.layer].ffn
    assert isinstance(part, Experts)

    def tensor(suffix: str) -> Tensor | None:
        canonical = f"{name}{suffix}"
        if canonical not in description.parameters:
            return None
        return parameter(model, description, canonical).float()

    weight, choice = tensor(".weight"), tensor(".choice_bias")
    assert weight is not None
    numbers = None if choice is None else choice.numpy()
    return RouterWeights(part.router, weight, tensor(".bias"), numbers, tensor(".expert_scale"))


def numbers_of(x: Tensor, layer: RouterWeights) -> Tensor:
    """Returns the router's numbers [tokens, experts] for x [tokens, d_model], from which scores are made."""
    return torch.nn.functional.linear(x, layer.weight, layer.bias)


def scores_of(numbers: Tensor, layer: RouterWeights) -> Tensor:
    """Returns the scores [..., experts] of numbers [..., experts]."""
    if layer.part.score == "softmax":
        return numbers.softmax(-1)
    if layer.part.score == "sqrt_softplus":
        return torch.nn.functional.softplus(numbers).sqrt()
    return numbers.sigmoid() if layer.part.score == "sigmoid" else numbers


def deciding_of(scores: F32, layer: RouterWeights) -> F32:
    """Returns the numbers by which experts are chosen [..., experts], of scores [..., experts]; -infinity for experts
    of groups that are left out."""
    deciding = scores if layer.choice_bias is None else scores + layer.choice_bias
    if (groups := layer.part.groups) is None:
        return deciding
    split = torch.from_numpy(deciding).reshape(*deciding.shape[:-1], groups.n, -1)
    worth = split.topk(min(groups.top, split.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(worth).scatter_(-1, worth.topk(groups.best, dim=-1).indices, 1).bool()
    found: F32 = split.masked_fill(~kept[..., None], -torch.inf).flatten(-2).numpy()
    return found


def weights_of(scores: Tensor, chosen: Tensor, layer: RouterWeights) -> Tensor:
    """Returns the weights of chosen experts [tokens, top_k], from scores [tokens, experts] and chosen [tokens, top_k],
    the first choice first."""
    part = layer.part
    weights = _mixed_sparsely(scores, chosen, part.jitter) if part.score == "sparsemixer" else scores.gather(1, chosen)
    if part.score == "sigmoid_of_chosen":
        weights = weights.sigmoid()
    if part.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    if layer.expert_scale is not None:
        weights = weights * layer.expert_scale[chosen]
    return weights * part.factor


def _mixed_sparsely(scores: Tensor, chosen: Tensor, jitter: float) -> Tensor:
    """Returns the weights of the sparse mixer [tokens, top_k]: each choice has its share of the softmax over the
    experts that are left and near it."""
    left, weights = scores.clone(), []
    for place in range(chosen.shape[1]):
        best = chosen[:, place : place + 1]
        most = scores.gather(1, best)
        far = (most - scores) / torch.maximum(scores.abs(), most) > 2 * jitter  # two zeros are not
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, best))
        left = left.scatter(1, best, -torch.inf)
    return torch.cat(weights, dim=1)


# Cache-aware routing in a loaded model: it prefers experts that a sequence has used lately.
# It decides token after token, as moert does. A decision depends only on the decisions of the same layer for earlier
# tokens of the same sequence, so that a pass over whole texts decides as a run token by token does.

I64 = npt.NDArray[np.int64]


class Recency:
    """The last uses of one layer's experts by some sequences: stamps [sequences, choices], the larger the later, below
    0 for no use, and for all choices behind the `experts`, which stand for none."""

    def __init__(self, sequences: int, choices: int, experts: int) -> None:
        self.stamps: I64 = np.full((sequences, choices), -1, np.int64)
        self._clock, self._experts = 0, experts

    def among_last(self, k: int) -> npt.NDArray[np.bool_]:
        """Returns, as booleans [sequences, experts], the k experts used last; among those of one token, smaller numbers
        come first."""
        least = -np.partition(-self.stamps, k - 1, axis=1)[:, k - 1 : k]
        return (self.stamps >= least) & (self.stamps >= 0)

    def use(self, chosen: I64, going: npt.NDArray[np.bool_]) -> None:
        """Notes that a token of each sequence in `going` [sequences] goes to the experts chosen [sequences, top_k]."""
        self._clock += 1
        n = self.stamps.shape[1]
        stamps = self._clock * n + (n - 1 - chosen)
        rows = np.flatnonzero(going)[:, None]
        self.stamps[rows, chosen[going]] = stamps[going]
        self.stamps[:, self._experts :] = -1


class Preferring:
    """Cache-aware routing in place of the routers of a model's decoder, while it is `on`.

    Counts since then: `missed` counts for each layer how often each expert [experts] was chosen without being among the
    preferred ones, `tokens` the routed tokens, and `gap` is how much better, on the mean, the experts that a token
    takes are than the next ones, as many again.
    """

    def __init__(self, model: Any, description: Description) -> None:
        self._spec = description.spec
        self._routers = Routers(model, description, self.places)
        self._preference: Preference | None = None
        self._going: dict[LayerKey, Recency] | None = None
        self.missed: dict[LayerKey, I64] = {}
        self.tokens = 0
        self._gaps: dict[LayerKey, float] = {}

    @property
    def places(self) -> list[LayerKey]:
        """The decoder's layers with experts."""
        return [at for at in self._spec.moe_layers() if at.stack == "decoder"]

    @contextmanager
    def on(self, preference: Preference | None) -> Iterator[None]:
        """Makes routing cache-aware for the length of a with block; None: it stays exact."""
        if preference is None:
            yield
            return
        n = self._spec.moe.n
        self._preference, self.tokens = preference, 0
        self.missed = {at: np.zeros(n, np.int64) for at in self.places}
        self._gaps = dict.fromkeys(self.places, 0.0)
        with self._routers.listening():
            try:
                yield
            finally:
                self._preference = None

    @property
    def gap(self) -> dict[LayerKey, float]:
        return {at: total / max(1, self.tokens) for at, total in self._gaps.items()}

    @contextmanager
    def writing(self, sequences: int) -> Iterator[Preferring]:
        """See Rerouting."""
        self._going = {at: self._unused(at, sequences) for at in self.places}
        try:
            yield self
        finally:
            self._going = None

    def keep(self, rows: Tensor) -> None:
        """See Rerouting."""
        for recency in (self._going or {}).values():
            recency.stamps = recency.stamps[rows.numpy()]

    def _unused(self, at: LayerKey, sequences: int) -> Recency:
        return Recency(sequences, len(self._routers.layers[at].weight), self._spec.moe.n)

    def route(self, at: LayerKey, chosen: Tensor, weights: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """See Rerouting."""
        if self._preference is None or at not in self._routers.layers:
            return chosen, weights
        layer = self._routers.layers[at]
        shape = (*real.shape, len(layer.weight))
        scores = scores_of(numbers_of(self._routers.heard[at], layer), layer).reshape(shape).numpy()
        deciding = deciding_of(scores, layer)
        recency = self._unused(at, len(real)) if self._going is None else self._going[at]
        named = chosen.reshape(*real.shape, -1).numpy() if layer.part.by_token is not None else None
        mine = self._decide(at, deciding, recency, real.numpy(), named)
        found = torch.from_numpy(mine.reshape(-1, mine.shape[-1]))
        return found, weights_of(torch.from_numpy(scores.reshape(-1, shape[-1])), found, layer)

    def _decide(
        self, at: LayerKey, deciding: F32, recency: Recency, real: npt.NDArray[np.bool_], named: I64 | None
    ) -> I64:  # fmt: skip
        """Returns chosen [sequences, places, top_k], the first choice first, from deciding [sequences, places,
        experts]; `named`: those that tokens take in any case."""
        preference, top_k = self._preference, self._routers.layers[at].part.top_k
        assert preference is not None
        bonus = np.float32(preference.bonus[self.places.index(at)])
        found = np.zeros((*deciding.shape[:2], top_k), np.int64)
        for place in range(deciding.shape[1]):
            going, numbers = real[:, place], deciding[:, place]
            recent = recency.among_last(preference.recent)
            chosen = _best(numbers, bonus * recent, top_k, preference.sure) if named is None else named[:, place]
            lacking = ~np.take_along_axis(recent, chosen, axis=1) & going[:, None]
            counts = np.bincount(chosen[lacking], minlength=deciding.shape[2])
            self.missed[at] += counts[: len(self.missed[at])]
            if named is None:
                self._gaps[at] += float(_gaps(numbers[going], top_k).sum())
            if at == self.places[0]:
                self.tokens += int(going.sum())
            recency.use(chosen, going)
            found[:, place] = chosen
        return found


def _best(numbers: F32, raised: F32, top_k: int, sure: int) -> I64:
    """Returns the experts [rows, top_k] with the `sure` largest numbers, then with the largest sums of `numbers` and
    `raised`, both [rows, experts]."""
    first = np.argsort(-numbers, axis=1, kind="stable")[:, : min(sure, top_k)]
    sums = numbers + raised
    np.put_along_axis(sums, first, -np.inf, axis=1)
    others = np.argsort(-sums, axis=1, kind="stable")[:, : top_k - first.shape[1]]
    return np.concatenate([first, others], axis=1)


def _gaps(numbers: F32, top_k: int) -> F32:
    """Returns the mean of the top_k largest numbers of each row, less the mean of the next ones, as many again [rows],
    for numbers [rows, experts]."""
    ordered = -np.sort(-np.where(np.isfinite(numbers), numbers, 0), axis=1)
    behind = ordered[:, top_k : 2 * top_k]
    gaps: F32 = ordered[:, :top_k].mean(axis=1) - (behind.mean(axis=1) if behind.shape[1] else 0)
    return gaps
