"""A pack's tokenizer: ids of a prompt, and text of ids."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from operator import index
from typing import TypeVar

from tokenizers import Tokenizer

from moert.errors import InputInvalid, SettingInvalid, TokenizerMissing
from moert.generation.detokenize import Detokenizer
from moert.machine.memory import return_freed
from moert.pack.fence import Unfinished, fenced, locked
from moert.pack.reader import Pack
from moert.pack.shown import in_one_line
from moert.pack.tokenizer import TOKENIZER, Growth, TokenizerUnfit, check_tokenizer

_LEAST_S, _BYTES_PER_S = 60.0, 10_000  # that turning a text into tokens is waited for: a hundredth of what is usual

T = TypeVar("T")


def several(prompts: Iterable[T]) -> list[T]:
    """Raises InputInvalid for one prompt where a list of them was expected, or for none at all."""
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise InputInvalid(f"the prompts are {in_one_line(repr(prompts))[:60]}: give a list, even of one")
    return [*prompts]


class Text:
    """Reads the tokenizer when it is first asked for; raises TokenizerMissing then, or a PackError if the file isn't
    what the manifest says."""

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self._growth = Growth()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Set to give every token of a text and no others: what was stored of cutting and filling to a length belongs
        to training."""
        pack = self._pack
        if TOKENIZER not in pack.manifest.files:
            raise TokenizerMissing(f"the pack at {pack.root} has no {TOKENIZER}: convert the model with its tokenizer")
        body = pack.read_file(TOKENIZER)
        try:
            self._growth = check_tokenizer(body)
            tokenizer = locked(lambda: Tokenizer.from_buffer(body))
            return_freed()  # reading it takes as much again
        except TokenizerUnfit as error:
            raise TokenizerMissing(
                f"{TOKENIZER} in {pack.root} can't be read (it {error}): convert the model again"
            ) from None
        except Exception as error:  # the library raises plain Exception
            reason = " ".join(str(error).split())
            raise TokenizerMissing(
                f"{TOKENIZER} in {pack.root} can't be read ({reason}): convert the model again"
            ) from None
        if not tokenizer.get_vocab_size():
            raise TokenizerMissing(f"{TOKENIZER} in {pack.root} has no vocabulary: convert the model again")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def encode(self, prompt: str, whole: bool = False) -> list[int]:
        """Token ids, with the special tokens that the tokenizer adds unless the prompt is `whole`. Raises InputInvalid,
        too. Ctrl-C is heard meanwhile."""
        try:
            nbytes = len(prompt.encode())
        except UnicodeEncodeError as error:
            raise InputInvalid(f"the prompt is not valid Unicode ({error.reason} at {error.start})") from None
        tokenizer = self.tokenizer
        try:
            self._growth.check(nbytes)
            most_s = _LEAST_S + nbytes / _BYTES_PER_S
            found = fenced(lambda: tokenizer.encode_batch([prompt], add_special_tokens=not whole), most_s)
            return list(found[0].ids)
        except MemoryError:
            raise
        except (TokenizerUnfit, Unfinished) as error:
            raise InputInvalid(f"the pack's tokenizer {error}") from None
        except Exception as error:  # the library raises plain Exception
            reason = " ".join(str(error).split())
            raise InputInvalid(f"the pack's tokenizer can't take the prompt ({reason})") from None

    def ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt, which is text or has them. Raises InputInvalid, too, for what is neither."""
        if isinstance(prompt, str):
            return self.encode(prompt)
        if not isinstance(prompt, (bytes, bytearray)):
            with suppress(TypeError):
                return [*map(index, prompt)]
        raise InputInvalid(f"the prompt is {in_one_line(repr(prompt))[:60]}: give text, or a list of token ids")

    def token(self, name: str) -> int:
        """The id of a token by what the tokenizer calls it. Raises SettingInvalid, too."""
        found: int | None = self.tokenizer.token_to_id(name)
        if found is None:
            raise SettingInvalid("first_token", f"{name!r} is no token of the pack's {TOKENIZER}")
        return found

    def detokenizer(self) -> Detokenizer:
        """Special tokens give no text."""
        return Detokenizer(self.tokenizer)

    def detokenizer_with(self, marks: Collection[str]) -> Detokenizer:
        """Special tokens give no text, but for those that are in one of these."""
        special = {
            number: each.content for number, each in self.tokenizer.get_added_tokens_decoder().items() if each.special
        }
        silent = (number for number, content in special.items() if not any(content in mark for mark in marks))
        return Detokenizer(self.tokenizer, frozenset(silent))
