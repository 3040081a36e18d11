"""What every model can do, and how one is made from a pack's ModelSpec and backbone."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from moert.kernels.backend import Backend, StoredWeights
from moert.models.kv import State
from moert.models.moe import ExpertRunner
from moert.pack.model_spec import ModelSpec


class Model(Protocol):
    """One sequence at a time (batch of 1), no gradients, float32, deterministic."""

    spec: ModelSpec

    def prefill(self, ids: list[int]) -> tuple[State, Tensor]:
        """Reads the prompt; returns the state after it and the logits [vocab] of the first token to write.

        Encoder–decoder: encodes the ids and runs the decoder's start token. Raises ValueError for an empty prompt.
        """
        ...

    def step(self, state: State, token: int) -> Tensor:
        """Appends one token to the state; returns the logits [vocab] of the token after it."""
        ...

    def forward_all(self, ids: list[int], target_ids: list[int] | None = None) -> Tensor:
        """Teacher-forced logits [n, vocab] in one pass.

        Decoder-only: row i follows ids[: i + 1]. Encoder–decoder: `target_ids` are what the decoder reads, start
        token included, and row i follows target_ids[: i + 1].
        """
        ...


def build_model(spec: ModelSpec, weights: dict[str, StoredWeights], runner: ExpertRunner, backend: Backend) -> Model:
    """`weights`: canonical name → as stored, what `moert.pack.model_spec.backbone_tensors` lists.

    The dict is emptied on the way. The model keeps copies, so that nothing holds the file that the weights lie in.
    """
    from moert.models.decoder import DecoderModel
    from moert.models.switch import SwitchModel

    model = DecoderModel if spec.encoder is None else SwitchModel
    return model(spec, weights, runner, backend)
