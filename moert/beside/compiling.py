"""The process in which a stranger's grammar is compiled first, within bounds: started by moert.beside.grammar.

A few hundred bytes of a grammar can keep llguidance busy for hours, or overflow its stack, and no limit of its own is
against either. The process imports nothing of moert, reads one line of JSON and answers with one. Its vocabulary is the
bytes alone: a grammar is compiled without looking at tokens.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

_STACK_BYTES = 4 << 20  # half of the stack that the threads of moert have


class _Bytes:
    """A vocabulary of all bytes and an end token, as llguidance takes it."""

    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]  # noqa: RUF012
    special_token_ids = [256]  # noqa: RUF012
    bos_token_id, eos_token_id = None, 256

    def __call__(self, body: bytes) -> list[int]:
        return [*body]


def main() -> None:
    """Compiles the grammar in the request, as far as its first token, and prints llguidance's error."""
    asked: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    arranged = LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=[256])
    for kind, most in (
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_STACK, _STACK_BYTES), (resource.RLIMIT_DATA, asked["data_bytes"]),
        (resource.RLIMIT_CPU, asked["cpu_s"]),
    ):  # fmt: skip
        resource.setrlimit(kind, (most, most + 1))  # beyond the second one, there would be no signal that says which
    matcher = LLMatcher(arranged, asked["source"], log_level=0, limits=LLParserLimits(**asked["limits"]))
    if not matcher.get_error():
        matcher.compute_bitmask()
    sys.stdout.write(json.dumps(matcher.get_error()))


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    main()
