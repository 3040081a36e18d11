"""Token ids to text as they come, never half a character."""

from __future__ import annotations

from tokenizers import Tokenizer

from moert.errors import TokenizerMissing
from moert.pack.fence import Broken, unbroken

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Feed it ids one at a time; the pieces it returns, with the last from `flush`, make up the whole text.

    What a token adds depends on the one before (spaces at word starts), so each is decoded after the last piece.
    All raise TokenizerMissing where the tokenizer breaks at some.
    """

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[int] | None = None) -> None:
        """`silent` tokens give no text: by default all that are special."""
        self._tokenizer, self._silent = tokenizer, silent
        self._ids: list[int] = []  # the ids of the last piece, then those not yet turned into text
        self._done = 0  # how many of them belong to the last piece

    def __copy__(self) -> Detokenizer:
        twin = Detokenizer(self._tokenizer, self._silent)
        twin._ids, twin._done = list(self._ids), self._done
        return twin

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        if self._silent is not None and token in self._silent:
            return ""
        self._ids.append(token)
        before, now = self._texts()
        if len(now) <= len(before) or now.endswith(_INCOMPLETE):
            return ""
        self._ids, self._done = self._ids[self._done :], len(self._ids) - self._done
        return now[len(before) :]

    def flush(self) -> str:
        """What is left at the end, with a replacement character for each incomplete one."""
        before, now = self._texts()
        self._ids, self._done = [], 0
        return now[len(before) :]

    def piece(self, token: int) -> str:
        """Returns the text of a token that comes next by itself: of a special one its name, of half a character a
        replacement character."""
        done = self._ids[: self._done]
        before, now = self._decoded(done, [*done, token], special=False)
        return now[len(before) :]

    def _texts(self) -> tuple[str, str]:
        return self._decoded(self._ids[: self._done], self._ids, special=self._silent is None)

    def _decoded(self, one: list[int], other: list[int], special: bool) -> tuple[str, str]:
        """Two texts; `special`: without special tokens."""
        decode = self._tokenizer.decode
        try:
            return unbroken(lambda: (decode(one, special), decode(other, special)))
        except Broken as error:
            raise TokenizerMissing(f"the pack's tokenizer can't make text of its tokens ({error})") from None
