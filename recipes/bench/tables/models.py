"""`make report`: the reference models beside their baselines, and how they route."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Line, Part


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
            "perplexity per word {wiki: model word perplexity|.0f}",
            "5-gram, Kneser–Ney: {wiki: kneser-ney 5-gram word perplexity|.0f}",
            "{wiki: decoder next_given_2|%}",
        ),
        (
            "marks",
            "case and punctuation restored, WikiText-2",
            "F1 of marked words {marks: model f1|.3f}, {marks: model exact|.1%} of pieces exact",
            "first letter and full stop: {marks: first letter and full stop f1|.2f}; "
            "commonest form of each word: {marks: commonest forms f1|.2f}",
            "encoder {marks: encoder next_given_2|%}, decoder {marks: decoder next_given_2|%}",
        ),
        (
            "wikids",
            "as wiki",
            "perplexity per word {wikids: model word perplexity|.0f}",
            "as wiki",
            "{wikids: decoder next_given_2|%}",
        ),
    ]
    paths = (
        "The 20% most frequent paths carry {g2p: encoder top20_share|%} of the tokens in g2p's encoder and "
        "{g2p: decoder top20_share|%} in its decoder, {marks: encoder top20_share|%} and "
        "{marks: decoder top20_share|%} in those of marks, {wiki: decoder top20_share|%} in wiki and "
        "{wikids: decoder top20_share|%} in wikids."
    )
    return [lines, paths]
