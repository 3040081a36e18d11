"""What a model tells of each pass before its layers run, to whoever foresees what they will ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from moert.kernels.backend import Matrix
from moert.pack.codec import F32
from moert.pack.model_spec import LayerKey


class Foresees(Protocol):
    """See moert.predict.foresight.Foresight. `embed`: the model's embedding [vocab, d_model]."""

    embed: Matrix | None

    def begin(self) -> Any:
        """What it will remember of a new sequence, a Heard."""
        ...

    def encodes(self, sequences: Sequence[Sequence[int]], heard: Sequence[Any]) -> None:
        """An encoder is about to read these."""
        ...

    def decodes(self, sequences: Sequence[Sequence[int]], heard: Sequence[Any]) -> None:
        """A decoder is about to read these behind what it has read."""
        ...

    def expects(self, prompts: Iterable[Sequence[int]]) -> None:
        """These wait for others to end, the next one first."""
        ...

    def numbers(self, at: LayerKey) -> F32:
        """Of the present pass, what stands for the numbers of a layer's router: [tokens, experts]."""
        ...
