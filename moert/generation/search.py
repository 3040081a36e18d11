"""One generation by beam search: text is given out as soon as all beams agree on it."""

from __future__ import annotations

import copy

from moert.errors import SettingInvalid
from moert.generation import greedy
from moert.generation.adjusting import adjusted
from moert.generation.beams import BeamRules, Beams, Hypothesis
from moert.generation.generation import (
    Generation,
    GenerationResult,
    Piece,
    StopReason,
    TextSource,
    decoder_prompt,
    first_token_of,
    room,
)
from moert.generation.settings import GenerationSettings
from moert.pack.codec import F32
from moert.pack.model_spec import ModelSpec


class BeamGeneration:
    """As a Generation, of several sequences at once. `tokens` and `text` are what all of them begin with; when it has
    ended, the best answer."""

    def __init__(
        self, spec: ModelSpec, prompt_ids: list[int], settings: GenerationSettings, detokenizer: TextSource | None
    ) -> None:
        """Raises InputInvalid for a prompt that can't be run, and SettingInvalid for a first token that is none."""
        self.room = room(spec, prompt_ids)
        self.settings, self.prompt_ids = settings, prompt_ids
        self._first, self._written = first_token_of(spec, settings), 0
        self._ends = frozenset() if settings.ignore_eos else frozenset(spec.tokens.eos)
        most = settings.max_new_tokens if self.room is None else min(settings.max_new_tokens, self.room)
        rules = BeamRules(settings.beams, most, self._ends, settings.length_penalty, settings.early_stopping)
        read = decoder_prompt(spec, prompt_ids)
        self._beams = Beams(rules, lambda scores, tokens: adjusted(scores, settings, read, tokens))
        self._fresh, self._detokenizer = detokenizer, copy.copy(detokenizer)
        self.tokens: list[int] = []
        self.text = ""
        self.stop_reason: StopReason = "interrupted"
        self.ended = False

    @property
    def written(self) -> int:
        return self._written

    @property
    def follow(self) -> list[tuple[int, int]]:
        beams = self._beams
        return [(parent, each.tokens[-1]) for parent, each in zip(beams.parents, beams.running, strict=True)]

    @property
    def results(self) -> list[GenerationResult]:
        if self.stop_reason in ("interrupted", "cancelled"):
            return [GenerationResult(list(self.tokens), self.text, self.stop_reason)]
        best, *others = self._beams.finished[: self.settings.n_return]
        first = GenerationResult(list(self.tokens), self.text, self.stop_reason, float(best.score))
        return [first, *map(self._result, others)]

    def fork(self, settings: GenerationSettings) -> BeamGeneration:
        """Raises SettingInvalid."""
        raise SettingInvalid("beams", "can't be forked: ask for another request")

    def cancel(self) -> None:
        self.stop_reason, self.ended = "cancelled", True

    def take(self, logits: F32) -> Piece:
        """Raises NotFinite."""
        beams = self._beams
        for row in logits:
            greedy.check(row, self._written + 1)
        beams.step(logits, None if self._written else self._first)
        self._written += 1
        self.ended = beams.over
        best = beams.finished[0] if beams.over else beams.running[0]
        new = (best.tokens if beams.over else beams.agreed)[len(self.tokens) :]
        text = _text(self._detokenizer, new, last=beams.over)
        self.tokens.extend(new)
        self.text += text
        if beams.over:
            self.stop_reason = self._reason(best)
        return Piece(best.tokens[-1], text)

    def _result(self, found: Hypothesis) -> GenerationResult:
        text = _text(copy.copy(self._fresh), found.tokens, last=True)
        return GenerationResult(list(found.tokens), text, self._reason(found), float(found.score))

    def _reason(self, found: Hypothesis) -> StopReason:
        if found.tokens[-1] in self._ends:
            return "eos"
        return "max_new_tokens" if len(found.tokens) >= self.settings.max_new_tokens else "context_full"


Writing = Generation | BeamGeneration


def writing(
    spec: ModelSpec, prompt_ids: list[int], settings: GenerationSettings, detokenizer: TextSource | None
) -> Writing:
    """Raises InputInvalid and SettingInvalid."""
    kind = Generation if settings.beams == 1 else BeamGeneration
    return kind(spec, prompt_ids, settings, detokenizer)


def _text(detokenizer: TextSource | None, tokens: tuple[int, ...], last: bool) -> str:
    if detokenizer is None:
        return ""
    return "".join(map(detokenizer.push, tokens)) + (detokenizer.flush() if last else "")
