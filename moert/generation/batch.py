"""One or more generations that run together, with their times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moert.generation.loop import Generation, GenerationResult, Piece, advance
from moert.models.model import Model
from moert.stats import RequestTimes


@dataclass(frozen=True)
class Answer:
    """One request that was run. Times count from when its batch was made, before room was made for it."""

    result: GenerationResult
    prompt_tokens: int
    time_to_first_token_s: float
    total_s: float

    @property
    def text(self) -> str:
        return self.result.text

    @property
    def finished(self) -> bool:
        """False where Ctrl-C came first."""
        return self.result.stop_reason != "interrupted"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while requests ran; `answers` is what there was by then of those that had begun, in order."""

    def __init__(self, answers: list[Answer]) -> None:
        super().__init__()
        self.answers = answers


class Batch:
    """New generations, for all of which each expert is read once per layer, in the prompt phase and in every turn.

    Iterate over it for the pieces of each turn; the rest is for asking at any time.
    """

    def __init__(self, model: Model, generations: Sequence[Generation]) -> None:
        self.turns = 0
        self._model, self._generations = model, generations
        self._started_s, self._first_s = time.perf_counter(), 0.0
        self._ended_s: dict[int, float] = {}  # by place

    def __iter__(self) -> Iterator[list[Piece]]:
        for pieces in advance(self._model, self._generations):
            self.turns += 1
            if self.turns == 1:
                self._first_s = self._so_far_s
            yield pieces
            if len(self.running) + len(self._ended_s) < len(self._generations):
                for place, generation in enumerate(self._generations):
                    if generation.ended:
                        self._ended_s.setdefault(place, self._so_far_s)

    @property
    def running(self) -> list[int]:
        """Prompt tokens of those that have not ended."""
        return [len(generation.prompt_ids) for generation in self._generations if not generation.ended]

    @property
    def answers(self) -> list[Answer]:
        return [
            Answer(
                generation.result, len(generation.prompt_ids), self._first_s, self._ended_s.get(place, self._so_far_s)
            )
            for place, generation in enumerate(self._generations)
        ]

    def count(self, times: RequestTimes) -> None:
        """Adds what was run."""
        if self.turns:
            prompt_tokens = sum(len(generation.prompt_ids) for generation in self._generations)
            new_tokens = sum(len(generation.tokens) for generation in self._generations)
            times.add(prompt_tokens, new_tokens, self._first_s, self._so_far_s, len(self._generations))

    @property
    def _so_far_s(self) -> float:
        return time.perf_counter() - self._started_s
