"""`make bench-peers`: moert beside llama.cpp and transformers."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench.result import Result
from tests.bench.tables import Line, Part


def parts(result: Result) -> Sequence[Part]:
    lines: list[Line] = [
        ("", "moert", "the other", "ratio"),
        duel("4.5 bits, tokens/s; llama.cpp with Q4_K_M", "4.5 bits: decode", "Q4_K_M"),
        duel("the same beside one busy process", "4.5 bits: decode with one busy process", "Q4_K_M"),
        duel("prompt of 512 tokens, tokens/s", "4.5 bits: prefill of 512", "Q4_K_M"),
        duel("2.6-bit experts, tokens/s; llama.cpp with Q2_K", "2.6 bits: decode", "Q2_K"),
        duel("start to first token, s (4.5 bits, 16 tokens of prompt)", "4.5 bits: start to first token", "Q4_K_M"),
        duel("g2p, tokens/s; transformers", "g2p: 24 tokens after a prompt", "transformers"),
        duel("wiki, tokens/s; transformers", "wiki: 32 tokens after a prompt", "transformers"),
    ]
    traffic = (
        "For each token ours reads {4.5 bits: read for each token: moert|.0f} MB where Q4_K_M reads "
        "{4.5 bits: read for each token: Q4_K_M|.0f}, and {2.6 bits: read for each token: moert|.0f} where Q2_K reads "
        "{2.6 bits: read for each token: Q2_K|.0f}. Told not to lay weights out anew when it loads them, llama.cpp "
        "starts in {4.5 bits: start to first token: Q4_K_M, not repacked|.1f} s, reads prompts at "
        "{4.5 bits: prefill of 512: Q4_K_M, not repacked} tokens/s and writes at "
        "{4.5 bits: decode: Q4_K_M, not repacked}."
    )
    return [lines, traffic]


def duel(said: str, row: str, peer: str) -> Line:
    return said, f"{{{row}: moert}}", f"{{{row}: {peer}}}", f"{{{row}: ratio|.2f}}"
