"""Constrained answers: the grammar that a request names, and where in an answer it begins and ends to bind."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from moert.errors import SettingInvalid
from moert.pack.codec import F32

MAX_GRAMMAR_BYTES = 1 << 18
"""Bytes of a grammar or of a schema; the longest in use have some ten thousands."""
JSON_SPACES = r"( |\n{1,2}[ \t]{0,40})?"
"""White space inside of JSON: enough for lines with indents, and never without end."""
_LEAST = float(np.finfo(np.float32).min)
Bools = NDArray[np.bool_]
Kind = Literal["json_schema", "json_object", "regex", "lark"]


@dataclass(frozen=True)
class Grammar:
    """The grammar of an answer. `kind`: "json_schema" (JSON that a schema allows), "json_object" (any JSON object),
    "regex" (the whole answer matches) or "lark" (a grammar in llguidance's form of Lark, whose rule `start` is the
    answer). `text`: the schema, the expression or the grammar. Raises SettingInvalid."""

    kind: Kind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "json_object", "regex", "lark"):
            kinds = "json_schema, json_object, regex and lark"
            raise SettingInvalid("grammar", f"has the kind {self.kind!r}: there are {kinds}")
        if not isinstance(self.text, str):
            raise SettingInvalid(self.setting, f"is {type(self.text).__name__}: it should be text")
        try:
            nbytes = len(self.text.encode())
        except UnicodeEncodeError:
            raise SettingInvalid(self.setting, "is not valid Unicode") from None
        if nbytes > MAX_GRAMMAR_BYTES:
            raise SettingInvalid(self.setting, f"has {nbytes:,} bytes, at most {MAX_GRAMMAR_BYTES:,} are taken")
        if not self.text.strip() and self.kind in ("json_schema", "lark"):
            raise SettingInvalid(self.setting, "is empty")

    @property
    def setting(self) -> str:
        """Name of the setting that it comes from."""
        return "json_schema" if self.kind == "json_schema" else "grammar"

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """Returns the grammar of JSON that a schema allows; of text, the schema in it. Raises SettingInvalid."""
        try:
            found = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(found, (Mapping, bool)):
                raise SettingInvalid("json_schema", f"is {type(found).__name__}: a JSON object, or true, is a schema")
            return cls("json_schema", json.dumps(found, ensure_ascii=False, allow_nan=False))
        except RecursionError:
            raise SettingInvalid("json_schema", "is nested too deep") from None
        except (TypeError, ValueError) as error:
            raise SettingInvalid("json_schema", f"is not JSON ({error})") from None


class Matcher(Protocol):
    """The place of one answer in its grammar; see moert.beside.grammar. A copy goes on by itself."""

    @property
    def allowed(self) -> Bools:
        """Tokens [vocab] that may come next, without end tokens."""

    @property
    def accepting(self) -> bool:
        """Whether the answer may end here."""

    def ready(self, within_s: float | None = None) -> bool:
        """Returns whether both are known `within_s` seconds, without a wait; None: waits until they are."""

    def take(self, token: int) -> None:
        """Goes on by an allowed token."""

    def take_text(self, text: str) -> None:
        """Goes on by a text; where the grammar does not allow it, no token is allowed any more."""


Room = Callable[[int, str], AbstractContextManager[object]]
"""A function that makes room in memory for a number of bytes, with a purpose, while a with block runs. Raises
BudgetTooSmall."""
Matching = Callable[[Grammar, Room], Matcher]
"""A function that returns the matcher of a grammar at its beginning. Raises SettingInvalid for one that can't be."""


def no_matching(grammar: Grammar, room: Room) -> Matcher:
    """Raises SettingInvalid: this session has no tokenizer."""
    raise SettingInvalid(grammar.setting, "needs a pack with its tokenizer")


@dataclass(frozen=True)
class Opening:
    """The beginning of a reply that no grammar binds. `begins`: the reply begins with it for sure; or else any of the
    tokens `openers` may begin it. It ends behind the first of the texts `until`; then one of the tokens `breaks` may
    come, too, before the answer. `ends`: end tokens may come in it."""

    until: tuple[str, ...]
    begins: bool = False
    openers: frozenset[int] = frozenset()
    breaks: frozenset[int] = frozenset()
    ends: bool = False


class Constrained:
    """An answer that a grammar binds from the end of its opening on, and whose end tokens come where the grammar may
    end. A copy goes on by itself."""

    def __init__(self, matcher: Matcher, ends: frozenset[int], opening: Opening | None = None) -> None:
        self._matcher, self._ends, self._opening = matcher, np.array(sorted(ends), np.int64), opening
        self._openers = frozenset[int]() if opening is None else opening.openers
        self._breaks = frozenset[int]()
        self._free = opening is not None and opening.begins
        self._text = ""  # of the opening so far, as far as a text that ends it may begin in it

    def __copy__(self) -> Constrained:
        twin = object.__new__(Constrained)
        twin.__dict__ |= {**self.__dict__, "_matcher": copy.copy(self._matcher)}
        return twin

    @property
    def allowed(self) -> Bools:
        """Tokens [vocab] that may come next."""
        if self._free:
            found: Bools = np.ones(len(self._matcher.allowed), np.bool_)
            found[self._ends] = self._opening is not None and self._opening.ends
            return found
        found = self._matcher.allowed.copy()
        found[self._ends] = self._matcher.accepting
        found[list(self._openers | self._breaks)] = True
        return found

    def ready(self, within_s: float | None) -> bool:
        """Returns whether the tokens that may come next are known within so many seconds; all else waits for them, and
        so does None."""
        return self._matcher.ready(within_s)

    @property
    def stuck(self) -> bool:
        """Whether no token may come next."""
        return not self.allowed.any()

    @property
    def complete(self) -> bool:
        """Whether the answer is whole as it is."""
        return not self._free and self._matcher.accepting

    def masked(self, scores: F32) -> F32:
        """Returns scores [vocab] with minus infinity for all tokens that may not come next, and for no others."""
        made: F32 = np.where(self.allowed, np.maximum(scores, np.float32(_LEAST)), np.float32(-np.inf))
        return made

    def take(self, token: int, text: str) -> None:
        """Goes on by an allowed token that is no end token. `text`: the text that is certain after it."""
        if self._free:
            self._go_on(text)
            return
        if self._matcher.allowed[token]:
            self._matcher.take(token)
            self._openers = self._breaks = frozenset()
            return
        if token in self._openers:
            self._free, self._openers = True, frozenset()
            self._go_on(text)
        self._breaks = frozenset()

    def _go_on(self, text: str) -> None:
        """Goes on in the opening; behind its end the grammar binds."""
        assert self._opening is not None
        held, until = self._text + text, self._opening.until
        found = [(held.index(each), len(each)) for each in until if each in held]
        if not found:
            self._text = held[-max(map(len, until)) :]
            return
        place, length = min(found)
        self._free, self._breaks = False, self._opening.breaks
        if rest := held[place + length :].lstrip("\n"):
            self._matcher.take_text(rest)
            self._breaks = frozenset()
