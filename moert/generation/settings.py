"""What a user may ask of a generation, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypedDict

from moert.adjustable import Adjustable
from moert.errors import SettingInvalid
from moert.generation.beams import EarlyStopping

_MOST_BEAMS = 64
_MOST_PENALTY = 4
"""Further from 0, float32 has no numbers for the scores of long answers."""
_MOST_REPEAT, _MOST_ADDED, _MOST_BIAS, _MOST_LOGPROBS = 10.0, 2.0, 100.0, 20  # but for the first as OpenAI has them


class GenerationOptions(TypedDict, total=False):
    """What can be asked of a generation, as arguments by name: the settings of GenerationSettings."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: str | Sequence[str]
    ignore_eos: bool
    first_token: int | str | None
    beams: int
    length_penalty: float
    early_stopping: EarlyStopping
    n_return: int
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    logprobs: int | None


@dataclass(frozen=True)
class GenerationSettings(Adjustable):
    """How to write. temperature 0 takes the likeliest token each time and uses none of the other sampling settings.

    `top_k` keeps the k likeliest tokens (0: all), `top_p` the smallest set that holds this much probability (1: all),
    `min_p` those at least this fraction as likely as the likeliest (0: all). Text ends before `stop`,
    or before the first of several such texts, and after an end token unless `ignore_eos`. The first token is
    `first_token`, an id or what the tokenizer calls it, if one is given, else what the pack says, if anything: of a
    model that translates, the language.

    With more than one of `beams`, so many beginnings go on at a time, and the `n_return` likeliest answers are given:
    by the sum of the logarithms of what their tokens were likely, over the number of tokens to the power of
    `length_penalty` (above 0 favours long ones). `early_stopping`: True ends as soon as there are as many answers as
    beams, False when the likeliest beam does not look better than these, "never" when it can't become better.

    Before a token is chosen, its logit gets what `logit_bias` has for its id, is divided by `repeat_penalty`
    (multiplied below 0) if it stands in the prompt or the answer (behind an encoder in the answer alone), and loses
    `frequency_penalty` for each time that it stands in the answer, and `presence_penalty` once if it does. With beams
    all this is done to logarithms of probabilities, as transformers has it. `logprobs`: how many of the likeliest
    tokens are told at each place beside the chosen one, with the model's own probabilities. Raises SettingInvalid.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    first_token: int | str | None = None
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    n_return: int = 1
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return bool(self._changed("repeat_penalty", "presence_penalty", "frequency_penalty", "logit_bias"))

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def without_effect(self) -> list[str]:
        """Names of settings that were changed and change nothing: those of sampling at temperature 0."""
        return [] if self.temperature != 0.0 else self._changed("top_k", "top_p", "min_p", "seed")

    def __post_init__(self) -> None:
        self.check_types()
        self._check_sampling()
        self._check_adjusting()
        self._check_beams()

    def _check_beams(self) -> None:
        if not 1 <= self.beams <= _MOST_BEAMS:
            raise SettingInvalid("beams", f"is {self.beams}: it should be between 1 and {_MOST_BEAMS}")
        if not abs(self.length_penalty) <= _MOST_PENALTY:
            raise SettingInvalid(
                "length_penalty",
                f"is {self.length_penalty}: it should be from -{_MOST_PENALTY} to {_MOST_PENALTY}, 0 for none",
            )
        if self.beams == 1:
            for name in self._changed("length_penalty", "early_stopping", "n_return"):
                raise SettingInvalid(name, "is of beam search: give the number of beams, 2 or more")
            return
        if not 1 <= self.n_return <= self.beams:
            raise SettingInvalid("n_return", f"is {self.n_return}: it should be between 1 and the {self.beams} beams")
        for name in [*self._changed("temperature", "logprobs"), *(["stop"] if self.stops else [])]:
            raise SettingInvalid(name, "does not go with beam search: leave one of both out")

    def _changed(self, *names: str) -> list[str]:
        return [each.name for each in fields(self) if each.name in names and getattr(self, each.name) != each.default]

    def _check_adjusting(self) -> None:
        if not 1 / _MOST_REPEAT <= self.repeat_penalty <= _MOST_REPEAT:
            raise SettingInvalid(
                "repeat_penalty",
                f"is {self.repeat_penalty}: it should be from {1 / _MOST_REPEAT} to {_MOST_REPEAT}, 1 for none",
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= _MOST_ADDED:
                raise SettingInvalid(
                    name, f"is {getattr(self, name)}: it should be from -{_MOST_ADDED} to {_MOST_ADDED}, 0 for none"
                )
        for token, bias in (self.logit_bias or {}).items():
            if not isinstance(token, int) or not abs(bias) <= _MOST_BIAS:
                raise SettingInvalid(
                    "logit_bias",
                    f"has {token!r}: {bias!r}: give ids of tokens with values from -{_MOST_BIAS} to {_MOST_BIAS}",
                )
        if self.logprobs is not None and not 0 <= self.logprobs <= _MOST_LOGPROBS:
            raise SettingInvalid("logprobs", f"is {self.logprobs}: it should be between 0 and {_MOST_LOGPROBS}")

    def _check_sampling(self) -> None:
        if self.max_new_tokens < 1:
            raise SettingInvalid("max_new_tokens", f"is {self.max_new_tokens}: it should be at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise SettingInvalid("temperature", f"is {self.temperature}: it should be 0 (greedy) or more")
        if self.top_k < 0:
            raise SettingInvalid("top_k", f"is {self.top_k}: it should be 0 (no limit) or more")
        if not 0 < self.top_p <= 1:
            raise SettingInvalid("top_p", f"is {self.top_p}: it should be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise SettingInvalid("min_p", f"is {self.min_p}: it should be between 0 and 1")
        if not 0 <= self.seed < 1 << 63:
            raise SettingInvalid("seed", f"is {self.seed}: it should be between 0 and 2**63 - 1")
        if any(not text for text in self.stops):
            raise SettingInvalid("stop", "has an empty stop string: no text would get a first letter")
