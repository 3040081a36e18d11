"""Case and punctuation restored: pieces of Wikipedia text, and the same in lower case without the marks around words.

A piece is as many whole sentences of one paragraph as fit into ``LONGEST`` words. Articles are those of wiki, with the
spacing of WikiText undone: calibration is WikiText-2's valid split, held-out its test split, and an article is a
document. Marks inside words (``3.5``, ``well-known``, ``it's``) stay in the input: they belong to the spelling.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from calib_data import manifest as manifests
from calib_data import wiki

SHORTEST, LONGEST = 5, 48  # words
ENDS = frozenset(".!?")
QUOTES = str.maketrans("“”„‘’`", "\"\"\"'''")
READABLE = re.compile(r"[ -~\u00a1-\u024f\u1e00-\u1eff–—…€]+")  # no other script than Latin
WHOLE = re.compile(r"[\"'(]*[A-Z0-9].*[.!?][\"')]*")
LONE = re.compile(r"(?<!\S)['\"](?!\S)")  # a quotation mark that stands for itself
SPACED = (
    (re.compile(r" @([-,.])@ "), r"\1"),
    (re.compile(r"(?<=\d) ([–:]) (?=\d)"), r"\1"),
    (re.compile(r" ([,;:.!?)\]%]|\.\.\.)(?=\s|$)"), r"\1"),
    (re.compile(r"([(\[$£€]) "), r"\1"),
    (re.compile(r"(?<=\w) '(?=(?:s|t|re|ve|ll|d|m)\b)"), "'"),
    (re.compile(r" / "), "/"),
    (re.compile(r'(?<!\S)" ([^"]+) "(?=[\s,;:.!?)]|$)'), r'"\1"'),
)


def plain(text: str) -> str:
    """What a piece looks like without case and without the marks around its words."""
    words = (re.sub(r"^[\W_]+|[\W_]+$", "", word) for word in text.lower().split())
    return " ".join(word for word in words if word)


def plain_spacing(sentence: str) -> str:
    """A sentence of WikiText as it is usually written; a quotation mark without its partner stays apart."""
    for pattern, replacement in SPACED:
        sentence = pattern.sub(replacement, sentence)
    return sentence


def sentences(line: str) -> Iterator[str]:
    """Sentences of a line of WikiText, where a mark that ends one stands apart from its words."""
    words, begin, quoted = line.split(), 0, False
    for at, word in enumerate(words):
        quoted ^= word == '"'
        follows = words[at + 1] if at + 1 < len(words) else ""
        closes = word in ('"', ")") and not quoted and at > begin and words[at - 1] in ENDS
        if closes or (word in ENDS and not quoted and follows not in (")", '"')):
            yield plain_spacing(" ".join(words[begin : at + 1]))
            begin = at + 1


def is_whole(sentence: str) -> bool:
    """Whether it is in Latin script, begins and ends as sentences do, and has both of each pair of quotation marks."""
    fits = READABLE.fullmatch(sentence) and WHOLE.fullmatch(sentence) and not LONE.search(sentence)
    return bool(fits) and sentence.count('"') % 2 == 0


def pieces(found: Iterable[str]) -> Iterator[str]:
    """Consecutive sentences of a paragraph in pieces; one that is not whole, or is too long, ends a piece."""
    held: list[str] = []
    for sentence in [*found, ""]:
        text = " ".join(sentence.translate(QUOTES).split())
        kept, words = is_whole(text), len(text.split())
        if held and (not kept or sum(len(part.split()) for part in held) + words > LONGEST):
            yield " ".join(held)
            held = []
        if kept and words <= LONGEST:
            held.append(text)


def rows(title: str, paragraphs: Iterable[Iterable[str]]) -> Iterator[manifests.Row]:
    """Pairs of one article, given as sentences of paragraphs."""
    for paragraph in paragraphs:
        for target in pieces(paragraph):
            source = plain(target)
            if len(source.split()) >= SHORTEST:
                yield {"input": source, "target": target, "document": title}


def article(text: str) -> list[manifests.Row]:
    """Pairs of one WikiText article; headings are left out."""
    lines = [line for line in text.splitlines() if line.strip()]
    title = plain_spacing(lines[0].strip(" ="))
    return list(rows(title, (sentences(line) for line in lines if not line.startswith(" = "))))


def make(manifest: dict[str, Any], splits: list[str]) -> dict[str, list[manifests.Row]]:
    """Rows of the named splits; only ``train`` needs the second source."""
    cut = wiki.wikitext(manifest, splits)
    made = {name: [row for text in cut[name] for row in article(text)] for name in splits}
    if "train" in splits:
        for title, paragraph in wiki.distinct(*wiki.hotpot(manifest, cut)):
            made["train"] += rows(title, [paragraph])
    return made


if __name__ == "__main__":
    raise SystemExit(manifests.main("marks", make))
