"""What every model can do, and how one is made from a pack's ModelSpec and backbone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from moert.kernels.backend import Backend, StoredWeights
from moert.models.kv import State
from moert.models.moe import ExpertRunner, Guess
from moert.pack.model_spec import ModelSpec, Stack


class Model(Protocol):
    """Reads tokens and gives logits: without gradients, in float32, deterministic. Each sequence has its own State.

    Many sequences at once read each expert once per layer for all of them; what comes out is bit for bit what each
    alone gives on the native kernels, and close to it on the reference, where torch multiplies many rows otherwise.
    """

    spec: ModelSpec

    def prefill(self, ids: list[int]) -> tuple[State, Tensor]:
        """Reads the prompt; returns the state after it and the logits [vocab] of the first token to write.

        Encoder–decoder: encodes the ids and runs the decoder's start token. Raises ValueError for an empty prompt.
        """
        ...

    def step(self, state: State, token: int) -> Tensor:
        """Appends one token to the state; returns the logits [vocab] of the token after it."""
        ...

    def prefill_many(self, prompts: Sequence[list[int]]) -> list[tuple[State, Tensor]]:
        """`prefill` for several prompts at once."""
        ...

    def step_many(self, states: Sequence[State], tokens: Sequence[int]) -> Tensor:
        """`step` for several sequences at once; returns logits [sequences, vocab]."""
        ...

    def guesses(self) -> Mapping[tuple[Stack, int], Guess]:
        """For each layer with experts: its router, to be asked about a hidden state before the layer is reached."""
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
