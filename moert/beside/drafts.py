"""Drafts of an answer: tokens that come next if the text goes on as it did before, in the prompt or in the answer. One
pass reads several of them, and those count that would have been chosen anyway (prompt lookup decoding, Saxena 2023)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moert.errors import SettingInvalid, said
from moert.pack.model_spec import ModelSpec

AUTO, NONE, MOST = "auto", "none", 64
PASSES = (4, 8, 16)
"""Tokens of passes with drafts that a Price chooses from."""
ALIKE = 3
"""Tokens that have to be alike before a draft."""
_LONGEST = 8  # as many are compared
_FIRST, _AGAIN = 8, 32  # passes of one token before the first draft; passes with drafts until another one
_RATE = 1 / 16  # of a new observation of drafted tokens
_SLOWEST_RATE = 1 / 8  # of a new time of a pass
_PRIOR = 0.3  # cost of each further token of a pass, in passes of one token, until passes were timed
_OUTLIER = 4.0  # times as long as expected: longer times count as this
_GAIN = 1.05  # least gain that drafts are made for
_FADING = 1 / 512  # of what a pass costs above its prior, for each token without a draft
_LOSS, _SAVED = 0.002, 32.0  # drafts may lose this share of the time, and as much as they saved, up to so many tokens


@dataclass
class Drafted:
    """Counts of drafts: passes that read some, the tokens that were drafted, and the accepted ones among them."""

    passes: int = 0
    drafted: int = 0
    accepted: int = 0

    def lines(self) -> list[str]:
        """Returns a line for people."""
        return [f"drafts           {self.drafted} tokens in {self.passes} passes, {self.accepted} accepted"]


class Price:
    """The price of drafts: how many drafted tokens are worth reading, by the measured time of passes, and by how often
    drafts were right behind as many equal tokens. Drafts that are not read count too, so that no time is lost with
    trials in text that does not repeat. Where drafts lose time none the less, they pause."""

    def __init__(self) -> None:
        self._one_s = 0.0
        self._untimed = _FIRST  # passes of one token that are to be timed before another draft
        self._costs = {tokens: 1 + _PRIOR * (tokens - 1) for tokens in PASSES}  # in passes of one token
        self._timed = dict.fromkeys(PASSES, 1)
        self._lost = -_SAVED  # in passes of one token; drafts pause above 0
        self._rates = [min(0.8, 0.1 * (alike + 1)) for alike in range(_LONGEST + 1)]

    def worth(self, alike: int, limit: int) -> int:
        """Returns the number of drafted tokens to read, at most `limit`. `alike`: equal tokens before the draft."""
        best, gain, chance, expected = 0, _GAIN, 1.0, 1.0
        if self._untimed > 0 or self._lost > 0 or not self._one_s:
            return 0
        for drafted in range(1, min(limit, PASSES[-1] - 1) + 1):
            chance *= self._rates[min(alike + drafted - 1, _LONGEST)]
            expected += chance
            cost = self._costs.get(drafted + 1)
            if cost is not None and expected > gain * cost:
                best, gain = drafted, expected / cost
        return best

    def observe(self, alike: int, right: int, wrong: bool) -> None:
        """Learns from a draft, of which the first `right` tokens were right, and the next one `wrong` or not known."""
        rates = self._rates
        for place in range(alike, alike + right):
            at = min(place, _LONGEST)
            rates[at] += _RATE * (1 - rates[at])
        if wrong:
            rates[min(alike + right, _LONGEST)] *= 1 - _RATE

    def passed(self, tokens: int, accepted: int, seconds: float) -> None:
        """Records the time of a pass of one token, or of one of PASSES, and how many drafted tokens were accepted."""
        if tokens == 1:
            known = self._one_s or seconds
            self._one_s = known + _SLOWEST_RATE * (min(seconds, _OUTLIER * known) - known)
            self._untimed -= 1
            self._lost -= _LOSS
            for each, cost in self._costs.items():
                self._costs[each] -= _FADING * max(0.0, cost - 1 - _PRIOR * (each - 1))
        elif tokens in self._costs:
            cost = self._costs[tokens]
            self._timed[tokens] += 1
            self._untimed = int(self._timed[tokens] % _AGAIN == 0)
            rate = max(_SLOWEST_RATE, 1 / self._timed[tokens])
            took = min(seconds / self._one_s, _OUTLIER * cost)
            self._costs[tokens] += rate * (took - cost)
            self._lost = max(-_SAVED, self._lost + took - accepted - 1)


class Draft:
    """The drafts of one text: the tokens that came the last time after the same tokens as now. The text is a string
    with a letter for each token, in which searches are quick."""

    def __init__(self, prompt_ids: Sequence[int], most: int, price: Price | None, figures: Drafted) -> None:
        """Without a price, `most` tokens are always drafted where some were found."""
        self._most, self._price, self._figures = most, price, figures
        self._text = "".join(map(chr, prompt_ids))
        self._written = 0
        self._guess = ""
        self._place, self._alike = 0, 0  # where the guess was found, and the number of equal tokens before it

    def next(self, written: Sequence[int], limit: int) -> list[int]:
        """Returns tokens that probably come after `written`, the answer so far, and are worth reading: `limit` or
        fewer, often none."""
        new, guess = "".join(map(chr, written[self._written :])), self._guess
        self._text += new
        self._written = len(written)
        right = 0
        if guess:
            known = min(len(new), len(guess))
            right = next((place for place in range(known) if new[place] != guess[place]), known)
            if self._price is not None:
                self._price.observe(self._alike, right, wrong=right < known)
        if right and right == len(new):
            self._place, self._alike = self._place + right, self._alike + right
        else:
            self._find()
        if not self._alike:
            self._guess = ""
            return []
        after = self._text[self._place : self._place + self._most]
        self._guess = (after * self._most)[: self._most]  # behind the end of the text it begins anew
        count = min(self._most, limit) if self._price is None else self._price.worth(self._alike, limit)
        return list(map(ord, self._guess[:count]))

    def passed(self, drafted: int, accepted: int, seconds: float) -> None:
        """Records the time of a pass that read one token and a draft, and how many of it were accepted."""
        if self._price is not None:
            self._price.passed(1 + drafted, accepted, seconds)
        if drafted:
            self._figures.passes += 1
            self._figures.drafted += drafted
            self._figures.accepted += accepted

    def _find(self) -> None:
        """Finds the last place behind tokens like those at the end of the text, and how many these are."""
        text, alike = self._text, ALIKE
        self._place, self._alike = text.rfind(text[-alike:], 0, -1) + alike, 0
        if self._place >= alike:
            while alike < _LONGEST and alike < self._place and text[self._place - alike - 1] == text[-alike - 1]:
                alike += 1
            self._alike = alike


class Drafts:
    """The drafts of all requests of an engine, which share a price."""

    def __init__(self, wish: str | int) -> None:
        price = wish == AUTO
        self.most = PASSES[-1] - 1 if price else int(wish)
        """The most tokens of a draft."""
        self.figures = Drafted()
        self._price = Price() if price else None

    def begin(self, prompt_ids: Sequence[int]) -> Draft:
        """Returns the drafts of a text that begins with these tokens."""
        return Draft(prompt_ids, self.most, self._price, self.figures)


def check_wish(wish: str | int) -> None:
    """Raises SettingInvalid."""
    if wish not in (AUTO, NONE) and not (str(wish).isdecimal() and 1 <= int(wish) <= MOST):
        raise SettingInvalid("draft", f"{wish!r} is none of {AUTO}, {NONE} and the numbers from 1 to {MOST}")


def drafts_for(wish: str | int, spec: ModelSpec, exact: bool, note: Callable[[str], None]) -> Drafts | None:
    """Returns the drafts of an engine; None, with a note, for a model of which tokens that were read can't be forgotten
    one by one, or that reads several tokens in another way than one after the other. `exact`: tokens go where its
    routers say."""
    if any(kind.state_shapes(spec.d_model) for kind in spec.decoder.kinds):
        why = "its recurrent states cannot forget a wrong draft"
    elif any(experts.router.capacity is not None for experts in spec.experts.values()):
        why = "its experts take a limited number of tokens in each pass"
    elif not exact:
        why = "its routing is not exact"
    elif spec.vocab_size > sys.maxunicode:
        why = "its vocabulary is too large"
    else:
        return Drafts(wish)
    note(f"{said('draft')} has no effect with this model: {why}")
    return None
