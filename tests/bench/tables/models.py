"""`make report`: the reference models beside their baselines, and how they route."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench.result import Result
from tests.bench.tables import Line, Part


def parts(result: Result) -> Sequence[Part]:
    lines: list[Line] = [
        ("", "task", "held-out", "baseline", "next expert guessed, two layers known"),
        (
            "g2p",
            "spelling → phonemes, CMUdict",
            "ROUGE-2 {g2p: model rouge2|.3f}, {g2p: model exact|.1%} of words exact",
            "nearest training word: {g2p: nearest neighbour, 400 words rouge2|.3f}, "
            "{g2p: nearest neighbour, 400 words exact|.1%}",
            "encoder {g2p: encoder next_given_2|%}, decoder {g2p: decoder next_given_2|%}",
        ),
        (
            "wiki",
            "Wikipedia text, WikiText-2",
            "word perplexity {wiki: model word perplexity|.0f}",
            "5-gram, Kneser–Ney: {wiki: kneser-ney 5-gram word perplexity|.0f}",
            "{wiki: decoder next_given_2|%}",
        ),
        (
            "docline",
            "docstring → summary line",
            "ROUGE-2 {docline: model rouge2|.3f}",
            "first sentence: {docline: lead sentence rouge2|.3f}",
            "encoder {docline: encoder next_given_2|%}, decoder {docline: decoder next_given_2|%}",
        ),
    ]
    paths = (
        "The 20% most frequent paths carry {g2p: encoder top20_share|%} of the tokens in g2p's encoder and "
        "{g2p: decoder top20_share|%} in its decoder, {docline: encoder top20_share|%} and "
        "{docline: decoder top20_share|%} in docline's, {wiki: decoder top20_share|%} in wiki."
    )
    return [lines, paths]
