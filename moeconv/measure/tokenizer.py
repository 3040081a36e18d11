"""The model's tokenizer, which may come from anyone: checked before it is read, left behind where it takes for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from moeconv.errors import CalibrationError, SettingsError
from moeconv.strict_json import bounded
from moert.pack.fence import Broken, Unfinished, fenced, locked
from moert.pack.tensors import TOKENIZER, bound_of
from moert.pack.text import Growth, TokenizerUnfit, check_tokenizer

T = TypeVar("T")
_LEAST_S, _BYTES_PER_S = 60.0, 10_000  # that text is waited for: a hundredth of what is usual


class Tokenizer:
    """As that of the library, of which it has what conversions use; cuts and fills up nothing, whatever its file says.

    All but `get_vocab` raise CalibrationError where the tokenizer breaks at a text, makes too much of it or is not done
    in time. Ctrl-C is heard meanwhile.
    """

    def __init__(self, made: tokenizers.Tokenizer, growth: Growth | None = None) -> None:
        self._made, self._growth = made, growth or Growth()
        made.no_truncation()
        made.no_padding()

    @classmethod
    def read(cls, path: Path, spelled: str | None = None) -> Tokenizer:
        """Of the file, or of what stands for it. Raises SettingsError."""
        if not path.is_file() and spelled is None:
            raise SettingsError(f"{path} is not there: save the model's fast tokenizer beside it")
        try:
            body = bounded(path, bound_of(TOKENIZER).most_bytes) if spelled is None else spelled.encode()
            growth = check_tokenizer(body)
            return cls(locked(lambda: tokenizers.Tokenizer.from_buffer(body)), growth)
        except TokenizerUnfit as error:
            raise SettingsError(f"{path} can't be used as a tokenizer, it {error}") from None
        except Exception as error:  # the library raises nothing more precise
            raise SettingsError(f"{path} can't be used as a tokenizer ({str(error)[:100]})") from None

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        found: dict[str, int] = self._made.get_vocab(with_added_tokens=with_added_tokens)
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Any]:
        sizes = [len(text.encode("utf-8", "surrogatepass")) for text in texts]
        try:
            self._growth.check(max(sizes, default=0))
        except TokenizerUnfit as error:
            raise CalibrationError(f"the model's tokenizer {error}") from None
        work = lambda: self._made.encode_batch(list(texts), add_special_tokens=add_special_tokens)  # noqa: E731
        return self._waited(work, sum(sizes))

    def decode_batch(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        work = lambda: self._made.decode_batch(list(ids), skip_special_tokens=skip_special_tokens)  # noqa: E731
        return self._waited(work, sum(map(len, ids)))

    def _waited(self, work: Callable[[], T], nbytes: int) -> T:
        try:
            return fenced(work, _LEAST_S + nbytes / _BYTES_PER_S)
        except Broken as error:
            raise CalibrationError(
                f"the model's tokenizer breaks at the text ({error}): is it the model's own?"
            ) from None
        except Unfinished as error:
            raise CalibrationError(f"the model's tokenizer {error} with the text: is it the model's own?") from None
