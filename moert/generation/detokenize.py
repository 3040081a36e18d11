"""Token ids to text as they come, never half a character."""

from __future__ import annotations

from tokenizers import Tokenizer

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Feed it ids one at a time; the pieces it returns, with the last from `flush`, make up the whole text.

    What a token adds depends on the one before (spaces at word starts), so each is decoded after the last piece.
    Special tokens give no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the ids of the last piece, then those not yet turned into text
        self._done = 0  # how many of them belong to the last piece

    def __copy__(self) -> Detokenizer:
        twin = Detokenizer(self._tokenizer)
        twin._ids, twin._done = list(self._ids), self._done
        return twin

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
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

    def _texts(self) -> tuple[str, str]:
        return self._tokenizer.decode(self._ids[: self._done]), self._tokenizer.decode(self._ids)
