"""One request that was run, as whoever asked gets it."""

from __future__ import annotations

from dataclasses import dataclass

from moert.generation.generation import GenerationResult, StopReason
from moert.generation.likelihood import Logprobs


@dataclass(frozen=True)
class Answer:
    """One request that was run. Times count from when it was added, before room was made for it. `kept_tokens` of its
    prompt had been read before, by others of the same conversation. `others`: with beam search, what was asked for
    beside the best answer, in order."""

    result: GenerationResult
    prompt_tokens: int
    time_to_first_token_s: float
    total_s: float
    kept_tokens: int = 0
    others: tuple[GenerationResult, ...] = ()

    @property
    def text(self) -> str:
        return self.result.text

    @property
    def tokens(self) -> list[int]:
        """Token ids of what was written, with the end token if one came."""
        return self.result.tokens

    @property
    def stop_reason(self) -> StopReason:
        """Why it ends: "eos", "stop_string", "max_new_tokens", "context_full", "cancelled" or "interrupted"."""
        return self.result.stop_reason

    @property
    def logprobs(self) -> list[Logprobs] | None:
        """One for each token, where they were asked for."""
        return self.result.logprobs

    @property
    def finished(self) -> bool:
        """False where Ctrl-C came first."""
        return self.stop_reason != "interrupted"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while requests ran; `answers` is what there was by then of those that had begun, in order."""

    def __init__(self, answers: list[Answer]) -> None:
        super().__init__()
        self.answers = answers
