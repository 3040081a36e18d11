"""Routing by a hash function in the place of a model's routers: each token goes to the experts that it names first.

What the function says of a stack's tokens is made before the stack's first layer runs, as the runtime does it. Its
numbers take the place of those that the router would have made; all that follows is the router's own arithmetic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeconv.foresight.network import Encoded, Networks, Past
from moeconv.measure.scorers import Subject
from moeconv.measure.trial import Trial
from moeconv.source.archs.description import Description
from moeconv.source.archs.weights import parameter
from moeconv.source.routers import deciding_of, router_of, scores_of, weights_of
from moert.pack.hash import HashFunction
from moert.pack.model_spec import LayerKey, StackName
from moert.pack.parts import Experts


@dataclass(frozen=True)
class HashRouting:
    """An Instead of moeconv.measure.assignments."""

    function: HashFunction

    @cached_property
    def rule(self) -> Any:
        return ["hash", hashlib.sha256(self.function.to_bytes()).hexdigest()]

    @contextmanager
    def on(self, trial: Trial) -> Iterator[None]:
        with Following(trial, trial.checkpoint.description, self.function).routing():
            yield

    def seen(self, trial: Trial) -> dict[str, Any]:
        return {}


def refusal(experts: Experts) -> str | None:
    """Why a function can't take the place of these experts' router; None where it can."""
    router = experts.router
    if not experts.chooses:
        return "would have no choice, as every token passes all experts of a layer"
    if router.score != "softmax":
        return f"takes the place of routers that choose by a softmax, and these choose by {router.score}"
    if router.overflow == "itself" or (router.capacity is not None and router.top_k > 1):
        return "does not take the place of routers of which experts that are full give what they got"
    return None


class Following:
    """Of a loaded model, with its embedding and its routers' own factors as they are when it is made."""

    def __init__(self, subject: Subject, description: Description, function: HashFunction) -> None:
        self._subject, self._networks = subject, Networks.of(function)
        self._embedding = parameter(subject.model, description, "embed.weight").float()
        spec = subject.spec
        self._layers = {at: router_of(subject.model, description, at) for at in spec.moe_layers()}
        self._places = {at: place for name in function.stacks for place, at in enumerate(spec.moe_layers(name))}
        self._said: dict[StackName, Tensor] = {}
        self._encoded: Encoded | None = None
        self._is_writing = False
        self._past: Past | None = None

    @contextmanager
    def routing(self) -> Iterator[None]:
        """Inside the block tokens go where the function says."""
        with ExitStack() as stack:
            for name in self._networks.names:
                tower = self._subject.family.tower(self._subject.model, name)
                stack.callback(tower.register_forward_pre_hook(partial(self._foretell, name), with_kwargs=True).remove)
            stack.enter_context(self._subject.calls.rerouted(self))
            yield

    @torch.inference_mode()
    def _foretell(self, name: StackName, module: Any, _: Any, named: dict[str, Any]) -> None:
        """Before the tokens of a stack go through its layers."""
        ids, calls = named["input_ids"], self._subject.calls
        real = torch.ones_like(ids, dtype=torch.bool) if calls.active is None else calls.active
        if name == "encoder":
            self._said[name], y, _past = self._networks.read(name, self._embedding[ids], real)
            self._encoded = Encoded(y, real)
            return
        encoded, rows = self._encoded, calls.attended
        if encoded is not None and rows is not None:
            encoded = Encoded(encoded.y[rows], encoded.real[rows])
        self._said[name], _, past = self._networks.read(name, self._embedding[ids], real, encoded, self._past)
        if self._is_writing:
            self._past = past

    @contextmanager
    def writing(self, sequences: int) -> Iterator[None]:
        """See Rerouting."""
        self._is_writing, before = True, self._encoded
        try:
            yield
        finally:
            self._is_writing, self._past, self._encoded = False, None, before

    def keep(self, rows: Tensor) -> None:
        """See Rerouting."""
        if self._past is not None:
            self._past = self._past.keep(rows)
        if self._encoded is not None:
            self._encoded = Encoded(self._encoded.y[rows], self._encoded.real[rows])

    def route(self, at: LayerKey, chosen: Tensor, weights: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """See Rerouting."""
        layer = self._layers[at]
        scores = scores_of(self._said[at.stack][:, :, self._places[at]], layer).flatten(0, 1)
        deciding = deciding_of(scores.numpy(), layer)
        found = torch.from_numpy(np.argsort(-deciding, axis=-1, kind="stable")[:, : layer.part.top_k].copy())
        if layer.part.capacity is None:
            return found, weights_of(scores, found, layer)
        return _within(layer.part.capacity, found, real), weights_of(scores, found, layer)


def _within(capacity: int, chosen: Tensor, real: Tensor) -> Tensor:
    """chosen [tokens, 1] of sequences real [sequences, places] → the same, -1 where an expert has had its `capacity` of
    tokens of the sequence."""
    mine = chosen.reshape(real.shape).masked_fill(~real, -1)
    asked = mine[..., None] == torch.arange(int(chosen.max()) + 1)
    before = asked.cumsum(1).gather(-1, mine.clamp(min=0)[..., None])[..., 0]
    return mine.masked_fill(before > capacity, -1).reshape(-1, 1)
