"""A pack's tokenizer: ids of a prompt, and text of ids as they come."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from math import inf
from operator import index
from typing import TypeVar

import numpy as np
from tokenizers import Encoding, Tokenizer, pre_tokenizers

from moert.errors import BudgetTooSmall, InputInvalid, PromptTooLong, SettingInvalid, TokenizerMissing
from moert.kernels.backend import I64
from moert.machine import return_freed
from moert.pack.fence import Unfinished, fenced, locked, panic
from moert.pack.messages import in_one_line
from moert.pack.reader import Pack
from moert.pack.tensors import COVERED_BYTES, TEXT_BYTES, TOKENIZER
from moert.pack.text import BYTES, Growth, TokenizerUnfit, byte_alphabet, bytes_of, check_tokenizer

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """A converter of token ids to text: feed it ids one at a time; the pieces that it returns, with the last from
    `flush`, make up the whole text.

    The text of a token depends on the one before (spaces at word starts), so each is decoded after the last piece. All
    methods raise TokenizerMissing where the tokenizer fails.
    """

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[int] | None = None) -> None:
        """`silent`: tokens that give no text; by default all special ones."""
        self._tokenizer, self._silent = tokenizer, silent
        self._ids: list[int] = []  # the ids of the last piece, then those not yet turned into text
        self._done = 0  # how many of them belong to the last piece

    def __copy__(self) -> Detokenizer:
        twin = Detokenizer(self._tokenizer, self._silent)
        twin._ids, twin._done = list(self._ids), self._done
        return twin

    def push(self, token: int) -> str:
        """Returns the text that this token completes; empty while a character is incomplete."""
        if self._silent is not None and token in self._silent:
            return ""
        self._ids.append(token)
        fresh = self._fresh(self._ids[self._done :], special=self._silent is None)
        if not fresh or fresh.endswith(_INCOMPLETE):
            return ""
        self._ids, self._done = self._ids[self._done :], len(self._ids) - self._done
        return fresh

    def flush(self) -> str:
        """Returns the text that is left at the end, with a replacement character for each incomplete one."""
        fresh = self._fresh(self._ids[self._done :], special=self._silent is None)
        self._ids, self._done = [], 0
        return fresh

    def piece(self, token: int) -> str:
        """Returns the text of a token by itself, if it comes next: the name of a special token, a replacement character
        for half a character."""
        return self._fresh([token], special=False)

    def _fresh(self, ids: list[int], special: bool) -> str:
        """Returns the text of ids behind the last piece; `special`: without special tokens. Half a character can spoil
        the one before it, where a decoder takes bytes together: then it is the text of the ids alone."""
        decode, done = self._tokenizer.decode, self._ids[: self._done]
        try:
            before, now = decode(done, special), decode([*done, *ids], special)
            spoilt = _INCOMPLETE in now and not now.startswith(before)
            return decode(ids, special) if spoilt else now[len(before) :]
        except BaseException as error:
            if (reason := panic(error)) is None:
                raise
            raise TokenizerMissing(f"the pack's tokenizer can't make text of its tokens ({reason})") from None


Aside = Callable[[int], AbstractContextManager[object]]
"""A function that makes room for a number of bytes while a with block runs. Raises BudgetTooSmall."""

LONG_TEXT = "make tokens of so long a text"
"""The purpose of that room, in messages."""
_SLICE = 1 << 12  # letters that are normalised at a time
_EDGE = 64  # letters or pieces, more than a cut between two slices may make of what were fewer
_LEAST_S, _BYTES_PER_S = 60.0, 10_000  # the longest wait for tokens of a text: a hundredth of the usual speed

T = TypeVar("T")


def several(prompts: Iterable[T]) -> list[T]:
    """Returns the prompts as a list. Raises InputInvalid for one prompt where a list was expected, or for no list at
    all."""
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise InputInvalid(f"the prompts are {in_one_line(repr(prompts))[:60]}: give a list, even of one")
    return [*prompts]


class Encoded:
    """A text in tokens: their `ids`, the number of special ones before the text, and the places where words end."""

    def __init__(self, text: str, encoding: Encoding) -> None:
        self.ids, self._text = list(encoding.ids), text
        self._encoding = encoding

    @property
    def special_before(self) -> int:
        """Number of special tokens that the tokenizer has put before the text."""
        mask = self._encoding.special_tokens_mask
        return mask.index(0) if 0 in mask else 0

    @cached_property
    def _places(self) -> tuple[I64, I64]:
        """Places where tokens begin and end in the text, [tokens, 2], and where words end, all in letters."""
        ends = [match.end() for match in re.finditer(r"\S+", self._text)]
        return np.array(self._encoding.offsets, np.int64).reshape(-1, 2), np.array(ends, np.int64)

    def words(self, start: int, stop: int) -> int:
        """Returns how many words end in these tokens: pieces between white space."""
        offsets, ends = self._places
        first, last = offsets[start, 0], offsets[start:stop, 1].max()  # behind the text special tokens have 0
        counts = np.searchsorted(ends, [first, last], side="right")
        return int(counts[1] - counts[0])


class Text:
    """A pack's tokenizer, read at its first use: raises TokenizerMissing then, or a PackError if the file isn't as the
    manifest says."""

    def __init__(self, pack: Pack, aside: Aside = nullcontext) -> None:
        self._pack, self._aside = pack, aside
        self._growth = Growth()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, set to return every token of a text and no others: stored rules for cutting and filling to a
        length belong to training."""
        pack = self._pack
        if TOKENIZER not in pack.manifest.files:
            raise TokenizerMissing(f"the pack has no {TOKENIZER}: convert the model with its tokenizer")
        body = pack.read_file(TOKENIZER)
        try:
            self._growth = check_tokenizer(body)
            tokenizer = locked(lambda: Tokenizer.from_buffer(body))
            return_freed()  # reading it takes as much again
        except TokenizerUnfit as error:
            raise TokenizerMissing(
                f"the pack's {TOKENIZER} can't be read (it {error}): convert the model again"
            ) from None
        except Exception as error:  # the library raises plain Exception
            reason = " ".join(str(error).split())
            raise TokenizerMissing(
                f"the pack's {TOKENIZER} can't be read ({reason}): convert the model again"
            ) from None
        if not tokenizer.get_vocab_size():
            raise TokenizerMissing(f"the pack's {TOKENIZER} has no vocabulary: convert the model again")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if not _knows_all_letters(tokenizer):
            self._growth = self._growth._replace(stands=inf)
        return tokenizer

    def encode(self, prompt: str, whole: bool = False, aside: Aside | None = None) -> list[int]:
        """Returns the ids of `encoded`."""
        return self.encoded(prompt, whole, aside).ids

    def encoded(
        self, prompt: str, whole: bool = False, aside: Aside | None = None, bounded: bool = True
    ) -> Encoded:  # fmt: skip
        """Returns the tokens of a prompt, with the special ones that the tokenizer adds unless the prompt is `whole`.
        `aside`: makes room for a caller that has the engine's turn. Raises InputInvalid, where `bounded` PromptTooLong
        for more bytes than the model's positions can stand for or for more tokens than these, or BudgetTooSmall, too.
        Ctrl-C works meanwhile."""
        try:
            nbytes = len(prompt.encode())
        except UnicodeEncodeError as error:
            raise InputInvalid(f"the prompt is not valid Unicode ({error.reason} at {error.start})") from None
        tokenizer = self.tokenizer
        if bounded:
            self._check_length(nbytes)
        most_s = _LEAST_S + nbytes / _BYTES_PER_S
        work = lambda: Encoded(prompt, tokenizer.encode_batch([prompt], add_special_tokens=not whole)[0])  # noqa: E731
        try:
            self._growth.check(nbytes)
            if TEXT_BYTES * self._growth.most(nbytes) <= COVERED_BYTES:
                return fenced(work, most_s)
            longest = self._pack.manifest.model.longest_prompt if bounded else None
            needed = TEXT_BYTES * max(nbytes, fenced(lambda: self._normalised_bytes(prompt, longest), most_s))
            with (aside or self._aside)(needed):
                try:
                    return fenced(work, most_s)
                finally:
                    return_freed()
        except (MemoryError, BudgetTooSmall, PromptTooLong):
            raise
        except (TokenizerUnfit, Unfinished) as error:
            raise InputInvalid(f"the pack's tokenizer {error}") from None
        except Exception as error:  # the library raises plain Exception
            reason = " ".join(str(error).split())
            raise InputInvalid(f"the pack's tokenizer can't take the prompt ({reason})") from None

    def ids(self, prompt: str | Sequence[int], aside: Aside | None = None) -> list[int]:
        """Returns the token ids of a prompt, which is text or a list of ids. Raises InputInvalid, too, for anything
        else."""
        return self.encode(prompt, aside=aside) if isinstance(prompt, str) else given_ids(prompt)

    def _check_length(self, nbytes: int) -> None:
        """Raises PromptTooLong for more bytes than the model's positions can stand for."""
        longest = self._pack.manifest.model.longest_prompt
        if longest is not None and nbytes > longest * self._growth.stands:
            raise PromptTooLong(
                f"the prompt has {nbytes:,} bytes, the model can take {longest} tokens of at most "
                f"{self._growth.stands:,.0f} bytes: shorten it"
            )

    def _normalised_bytes(self, prompt: str, longest: int | None) -> int:
        """Returns the bytes of the text once it is normalised, slice by slice; 0 where no slice need be looked at.
        Raises PromptTooLong as soon as the slices surely make more than the `longest` tokens."""
        normalizer, nbytes, tokens = self.tokenizer.normalizer, 0, 0.0
        if normalizer is None and (longest is None or not self._growth.counts):
            return 0
        for at in range(0, len(prompt), _SLICE):
            piece = prompt[at : at + _SLICE]
            made = piece if normalizer is None else normalizer.normalize_str(piece)
            nbytes += len(made.encode())
            if longest is not None and (tokens := tokens + self._least(made)) > longest:
                raise PromptTooLong(
                    f"the prompt has {len(prompt):,} letters, which make over {longest} tokens, and the model can take "
                    f"{longest}: shorten it"
                )
        return nbytes

    def _least(self, made: str) -> float:
        """Returns the least number of tokens that a slice adds to those of a text."""
        if self._growth.counts == "pieces":
            cut = self.tokenizer.pre_tokenizer
            pieces = [] if cut is None else cut.pre_tokenize_str(made)
            count = sum(not piece.isspace() for piece, _ in pieces)
        elif self._growth.counts == "letters":
            count = sum(number for letter, number in Counter(made).items() if self._is_token(letter))
        else:
            return 0
        return max(0, count - _EDGE) / self._growth.each

    def _is_token(self, letter: str) -> bool:
        """Returns whether a letter is a token by itself: no space, and not the token for unknown letters."""
        number, model = self.tokenizer.token_to_id(letter), self.tokenizer.model
        unknown = letter == getattr(model, "unk_token", None) or number == self._growth.unknown
        return number is not None and not (unknown or letter.isspace() or letter == "▁")

    def numbers(self, names: Iterable[str]) -> list[int]:
        """Returns the ids of the tokens with these names, but for names that the tokenizer does not have."""
        found = (self.tokenizer.token_to_id(name) for name in names)
        return [number for number in found if number is not None]

    def beginnings(self, texts: Iterable[str]) -> list[int]:
        """Returns the ids of added tokens, the longest of each, that these texts begin with."""
        added = {each.content: number for number, each in self.tokenizer.get_added_tokens_decoder().items()}
        found = (max((each for each in added if text.startswith(each)), key=len, default=None) for text in texts)
        return [added[each] for each in found if each]

    @cached_property
    def special(self) -> dict[str, int]:
        """Ids of the special tokens by their names."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        return {each.content: number for number, each in added if each.special}

    @cached_property
    def line_breaks(self) -> list[int]:
        """Ids of the tokens that are one or two line breaks and nothing else."""
        return self.numbers(("\n", "\n\n", "Ċ", "ĊĊ", "<0x0A>"))

    def token(self, name: str) -> int:
        """Returns the id of a token by its name in the tokenizer. Raises SettingInvalid, too."""
        found: int | None = self.tokenizer.token_to_id(name)
        if found is None:
            raise SettingInvalid("first_token", f"{name!r} is no token of the pack's {TOKENIZER}")
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of tokens, the names of special ones too."""
        made = Detokenizer(self.tokenizer, frozenset())
        return "".join([*map(made.push, ids), made.flush()])

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Returns the text of each token by itself, in its place."""
        made, found = Detokenizer(self.tokenizer, frozenset()), list[str]()
        for number in ids:
            found.append(made.piece(number))
            made.push(number)
        return found

    def bytes_of(self, token: int, piece: str) -> bytes:
        """Returns the bytes of a token with this text: of half a character those that its name stands for."""
        name = self.tokenizer.id_to_token(token) if _INCOMPLETE in piece else None
        if name in BYTES:
            return bytes([BYTES.index(name)])
        found = None if name is None else bytes_of(name, byte_alphabet())
        return piece.encode() if found is None else found

    def detokenizer(self) -> Detokenizer:
        """Returns a detokenizer in which special tokens give no text."""
        return Detokenizer(self.tokenizer)

    def detokenizer_with(self, marks: Collection[str]) -> Detokenizer:
        """Returns a detokenizer in which special tokens give no text, but for those that stand in one of these
        marks."""
        silent = (number for name, number in self.special.items() if not any(name in mark for mark in marks))
        return Detokenizer(self.tokenizer, frozenset(silent))


def given_ids(prompt: Sequence[int]) -> list[int]:
    """Returns the token ids of a prompt that is no text. Raises InputInvalid where it has none."""
    if not isinstance(prompt, (bytes, bytearray)):
        with suppress(TypeError):
            return [*map(index, prompt)]
    raise InputInvalid(f"the prompt is {in_one_line(repr(prompt))[:60]}: give text, or a list of token ids")


def _knows_all_letters(tokenizer: Tokenizer) -> bool:
    """Returns whether each letter of a text becomes at least one token, also a letter outside the vocabulary."""
    model = tokenizer.model
    if getattr(model, "unk_token", None) and not getattr(model, "fuse_unk", True):
        return True
    alphabets = BYTES, pre_tokenizers.ByteLevel.alphabet()
    return any(all(tokenizer.token_to_id(each) is not None for each in letters) for letters in alphabets)
