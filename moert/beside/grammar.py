"""Grammars of answers by llguidance: the tokens of a vocabulary that may come next."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FoundLate
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from moert.engine.constraint import JSON_SPACES, Bools, Grammar, Room
from moert.errors import SettingInvalid
from moert.machine import limits_processes, return_freed, used_up_time
from moert.pack.fence import Broken, Unfinished, fenced, unbroken
from moert.pack.text import BYTES, byte_alphabet, bytes_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

T = TypeVar("T")
_PURPOSE = "arrange the vocabulary for grammars"
_LONGEST_S = 20.0  # until the tokens that may begin an answer are known
_REASON = 240  # letters of a reason
_TOKEN_BYTES = 800  # of memory for each token while the vocabulary is arranged
_LIMITS: Mapping[str, Any] = {
    "max_lexer_states": 50_000,  # of 1 to 2 KB
    "max_grammar_size": 16_000,  # symbols; of a step of so many a second at most
    "verbose_errors": False,
}
_THREADS = 4  # in which answers go on in their grammars
_CPU_S = 2
_APART_BYTES, _APART_EACH = 40 << 20, 400  # of memory for a process that compiles, and for each byte of a grammar more
_PROCESS = Path(__file__).with_name("compiling.py")
_ANY_OBJECT = '{"type": "object"}'
_UNLIMITED = "this system can't limit the process that compiles it"
_WHOLE = {"ByteLevel", "ByteFallback", "Metaspace", "Replace", "Fuse", "Strip"}
"""Decoders that change no text but its beginning, so that an answer is the bytes of its tokens."""


def check_grammar(grammar: Grammar) -> None:
    """Raises SettingInvalid for a grammar that can't be, whatever the tokenizer, or where llguidance is missing."""
    _check_installed(grammar)
    from llguidance import LLMatcher

    source = _source(grammar)
    failed, notes = _within_time(grammar, lambda: LLMatcher.validate_grammar_with_warnings(source, limits=_limits()))
    if failed:
        raise SettingInvalid(grammar.setting, _refusal(grammar, " ".join(notes)))


def apart_bytes(grammar: Grammar) -> int:
    """Returns the memory of the process that compiles a grammar [bytes]."""
    return _APART_BYTES + _APART_EACH * len(grammar.text)


def check_apart(grammar: Grammar) -> None:
    """Compiles a stranger's grammar in a process of its own. Raises SettingInvalid for one that can't be, that takes
    long or much memory, or that ends this process; and where llguidance is missing."""
    _check_installed(grammar)
    if not limits_processes():
        raise SettingInvalid(grammar.setting, _refusal(grammar, _UNLIMITED))
    found = find_spec("llguidance")
    assert found is not None
    assert found.origin is not None
    bounds = {"cpu_s": _CPU_S, "data_bytes": apart_bytes(grammar)}
    request = {**bounds, "source": _source(grammar), "limits": _LIMITS}
    command = [sys.executable, "-I", "-S", "-B", str(_PROCESS), str(Path(found.origin).parents[1])]
    try:
        done = subprocess.run(
            command, input=json.dumps(request).encode(), capture_output=True, check=False, timeout=_LONGEST_S
        )
    except subprocess.TimeoutExpired:
        reason = f"is not done after {_LONGEST_S:.0f} s"
    except OSError as error:
        reason = f"no process can be started to compile it: {error.strerror}"
    else:
        reason = _too_costly(done.returncode) if done.returncode else json.loads(done.stdout)
    if reason:
        raise SettingInvalid(grammar.setting, _refusal(grammar, reason))


def _too_costly(status: int) -> str:
    if status > 0:
        return f"the process that compiles it ended with status {status}"
    return f"compiling it takes {f'more than {_CPU_S} s' if used_up_time(status) else 'too much memory'}"


class Matchers:
    """A maker of matchers for one tokenizer, whose vocabulary is arranged at the first use."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab_size: int, ends: Collection[int]) -> None:
        """`vocab_size`: of the model; `ends`: its end tokens."""
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, frozenset(ends)
        self._steps: Steps | None = None

    def of(self, grammar: Grammar, room: Room) -> TokenMatcher:
        """Returns the matcher of a grammar at its beginning. `room`: makes room for the arranged vocabulary.

        Raises SettingInvalid for a grammar that llguidance can't do or that the vocabulary has no tokens for, and
        TokenizerMissing or BudgetTooSmall.
        """
        _check_installed(grammar)
        if self._steps is None:
            tokenizer = self._tokenizer()
            with room(_TOKEN_BYTES * self._vocab_size, _PURPOSE):
                self._steps = self._steps or Steps(self._vocabulary(grammar, tokenizer))
        steps, source = self._steps, _source(grammar)

        def begun() -> TokenMatcher:
            from llguidance import LLMatcher

            matcher = LLMatcher(steps.arranged, source, log_level=0, limits=_limits())
            return TokenMatcher(matcher, self._vocab_size, steps)

        made = _within_time(grammar, begun)
        if made.error:
            raise SettingInvalid(grammar.setting, _refusal(grammar, made.error))
        if not made.accepting and not made.allowed.any():
            raise SettingInvalid(grammar.setting, "can't be written with the tokens that the pack's tokenizer has")
        return made

    def _vocabulary(self, grammar: Grammar, tokenizer: Tokenizer) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        kinds = decoders_of(tokenizer)
        if not kinds or kinds - _WHOLE:
            named = ", ".join(sorted(kinds)) or "none"
            raise SettingInvalid(grammar.setting, f"does not go with the pack's tokenizer, whose decoder is {named}")
        listed = Listed(tokenizer, self._vocab_size, self._ends)
        made = _within_time(grammar, lambda: LLTokenizer(TokenizerWrapper(listed), eos_token=[listed.eos_token_id]))
        return_freed()
        return made


class Steps:
    """Threads in which answers go on in their grammars, by the tokens of the `arranged` vocabulary."""

    def __init__(self, arranged: LLTokenizer) -> None:
        from llguidance import LLExecutor, LLMatcher

        self.arranged, self.threads = arranged, ThreadPoolExecutor(_THREADS, "moert-grammar")
        self._together, self._ended = LLExecutor(_THREADS), LLMatcher(arranged, "", log_level=0)

    def consume(self, matcher: LLMatcher, token: int) -> bool:
        """Goes on by a token, and returns whether that could be. One matcher alone would hold Python's lock meanwhile,
        so a second one that has ended comes along."""
        pair = [(matcher, token), (self._ended.deep_copy(), self.arranged.eos_token)]
        return self._together.consume_token_par(pair)[0]


class TokenMatcher:
    """The place of one answer in its grammar, which goes on by `steps`. A copy goes on by itself."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, steps: Steps) -> None:
        self._matcher, self._vocab_size, self._steps = matcher, vocab_size, steps
        self._coming: Future[None] | None = None
        self._error = ""
        self._look()

    @property
    def allowed(self) -> Bools:
        """Tokens [vocab] that may come next; end tokens are the caller's."""
        self.ready()
        return self._allowed

    @property
    def accepting(self) -> bool:
        """Whether the answer may end here."""
        self.ready()
        return self._accepting

    @property
    def error(self) -> str:
        """The reason why the grammar can't go on, in one line; empty while it can."""
        self.ready()
        return self._error

    def ready(self, within_s: float | None = None) -> bool:
        """Returns whether the tokens that may come next are known `within_s` seconds; None: waits for them."""
        if self._coming is not None:
            try:
                self._coming.result(within_s)
            except FoundLate:
                return False
            self._coming = None
        return True

    def __copy__(self) -> TokenMatcher:
        self.ready()
        twin = object.__new__(TokenMatcher)
        twin.__dict__ |= {**self.__dict__, "_matcher": self._matcher.deep_copy()}
        return twin

    def take(self, token: int) -> None:
        """Goes on by an allowed token."""
        self._go_on([token])

    def take_text(self, text: str) -> None:
        """Goes on by a text; where the grammar does not allow it, no token is allowed any more."""
        self._go_on(self._steps.arranged.greedy_tokenize(text))

    def _go_on(self, tokens: Sequence[int]) -> None:
        self.ready()
        self._coming = self._steps.threads.submit(self._consume, tokens)

    def _consume(self, tokens: Sequence[int]) -> None:
        try:
            if not unbroken(lambda: all(self._steps.consume(self._matcher, token) for token in tokens)):
                self._error = _in_line(self._matcher.get_error()) or "the text goes another way"
        except Broken as error:
            self._error = str(error)
        self._look()

    def _look(self) -> None:
        """Finds the tokens that may come next."""
        if not self._error:
            try:
                bits = unbroken(self._matcher.compute_bitmask)
                self._error = _in_line(self._matcher.get_error())
            except Broken as error:
                self._error = str(error)
        if self._error:
            self._allowed, self._accepting = np.zeros(self._vocab_size, np.bool_), False
            return
        found = np.unpackbits(np.frombuffer(bits, np.uint8), count=self._vocab_size, bitorder="little")
        self._allowed = found.view(np.bool_)
        self._accepting = self._matcher.is_accepting()
        if (end := self._steps.arranged.eos_token) < self._vocab_size:
            self._allowed[end] = False
        if np.count_nonzero(self._allowed) == 1:  # it names a token even where none is allowed
            alone = int(self._allowed.argmax())
            self._allowed[alone] = self._matcher.validate_tokens([alone]) == 1


def decoders_of(tokenizer: Tokenizer) -> set[str]:
    """Returns the kinds of a tokenizer's decoders; none where it has no decoder."""

    def kinds(part: Any) -> Iterator[str]:
        if isinstance(part, dict) and part.get("type") == "Sequence":
            for each in part["decoders"]:
                yield from kinds(each)
        elif isinstance(part, dict):
            yield str(part.get("type"))

    return set() if tokenizer.decoder is None else set(kinds(json.loads(tokenizer.decoder.__getstate__())))


class Listed:
    """A vocabulary as llguidance takes it: the bytes of each token, and a function from bytes to tokens."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Collection[int]) -> None:
        added = tokenizer.get_added_tokens_decoder()
        special = {number for number, each in added.items() if each.special} | {*ends}
        special |= {number for name in _unknown(tokenizer) if (number := tokenizer.token_to_id(name)) is not None}
        self.tokens = token_bytes(tokenizer, vocab_size)
        self.special_token_ids = sorted(each for each in special if each < vocab_size)
        # llguidance wants an end token; where the model has none, an id behind its vocabulary.
        if not (own := sorted(each for each in ends if each < vocab_size)):
            self.tokens.append(b"<end>")
            self.special_token_ids.append(vocab_size)
        self.eos_token_id = own[0] if own else vocab_size
        self._encode = tokenizer if "ByteLevel" in decoders_of(tokenizer) else None
        plain = {body: number for number, body in enumerate(self.tokens) if body and number not in special}
        self._ids, self._longest = plain, max(map(len, plain), default=1)

    def __call__(self, body: bytes) -> list[int]:
        """Returns tokens whose bytes are these, as the tokenizer has them if it keeps bytes, else the longest ones from
        the left."""
        if self._encode is not None:
            text = body.decode("utf-8", "replace")
            found: list[int] = self._encode.encode(text, add_special_tokens=False).ids
            if max(found, default=0) < len(self.tokens) and b"".join(self.tokens[each] for each in found) == body:
                return found
        return [*self._greedy(body)]

    def _greedy(self, body: bytes) -> Iterator[int]:
        place = 0
        while place < len(body):
            lengths = range(min(self._longest, len(body) - place), 0, -1)
            length = next((each for each in lengths if body[place : place + each] in self._ids), 0)
            if not length:
                return
            yield self._ids[body[place : place + length]]
            place += length


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Returns the bytes that each token adds to a text [vocab]; none for ids that the tokenizer lacks."""
    added = {number: each.content for number, each in tokenizer.get_added_tokens_decoder().items()}
    names = [tokenizer.id_to_token(number) for number in range(vocab_size)]
    if "ByteLevel" in decoders_of(tokenizer):
        alphabet = byte_alphabet()
        made = [bytes_of(name or "", alphabet) or b"" for name in names]
    else:
        made = _of_decoder(tokenizer, [*map(bool, names)])
        if "ByteFallback" in decoders_of(tokenizer):
            numbers = {name: byte for byte, name in enumerate(BYTES)}
            made = [bytes([numbers[name]]) if name in numbers else body for name, body in zip(names, made, strict=True)]
    return [added[number].encode() if number in added else body for number, body in enumerate(made)]


def _of_decoder(tokenizer: Tokenizer, there: Sequence[bool]) -> list[bytes]:
    """Returns the bytes that each token adds behind another one; none where it has no text of its own."""
    anchor = next((number for letter in "abcdefghijklmnop" if (number := tokenizer.token_to_id(letter)) is not None), 0)
    before = tokenizer.decode([anchor], skip_special_tokens=False)
    numbers = [number for number, each in enumerate(there) if each]
    texts = tokenizer.decode_batch([[anchor, number] for number in numbers], skip_special_tokens=False)
    made = [b""] * len(there)
    for number, text in zip(numbers, texts, strict=True):
        if text.startswith(before) and "\ufffd" not in text:
            made[number] = text[len(before) :].encode()
    return made


def _unknown(tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the name of the token for unknown text."""
    name = getattr(tokenizer.model, "unk_token", None)
    if isinstance(name, str):
        yield name


def _source(grammar: Grammar) -> str:
    """Returns a grammar as llguidance takes it. Raises SettingInvalid."""
    from llguidance import LLMatcher

    try:
        if grammar.kind in ("json_schema", "json_object"):
            schema = _ANY_OBJECT if grammar.kind == "json_object" else "{}" if grammar.text == "true" else grammar.text
            ways: Any = {"whitespace_pattern": JSON_SPACES} if schema.startswith("{") else None
            made: str = LLMatcher.grammar_from_json_schema(schema, overrides=ways)
        elif grammar.kind == "regex":
            made = LLMatcher.grammar_from_regex(grammar.text)
        else:
            made = LLMatcher.grammar_from_lark(grammar.text)
    except (ValueError, RecursionError) as error:
        raise SettingInvalid(grammar.setting, _refusal(grammar, str(error))) from None
    return made


def _check_installed(grammar: Grammar) -> None:
    if find_spec("llguidance") is None:
        raise SettingInvalid(
            grammar.setting, "needs the package llguidance: pip install 'moert[serve]', or leave it out"
        )


def _limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(**_LIMITS)


def _within_time(grammar: Grammar, work: Callable[[], T]) -> T:
    """Returns the result of llguidance's work. Raises SettingInvalid where it takes too long or breaks off."""
    try:
        return fenced(work, _LONGEST_S)
    except (Broken, Unfinished, ValueError) as error:
        raise SettingInvalid(grammar.setting, _refusal(grammar, str(error))) from None


def _refusal(grammar: Grammar, reason: str) -> str:
    names = {"json_schema": "schema", "regex": "expression"}
    return f"has a {names.get(grammar.kind, 'grammar')} that can't be followed ({_in_line(reason)}): change it"


def _in_line(reason: str) -> str:
    return " ".join(reason.split())[:_REASON]
