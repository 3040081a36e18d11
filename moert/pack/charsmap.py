"""How much longer text may become by a precompiled table of SentencePiece, which tokenizer.json holds in base64.

The table is a double array (Darts-clone), a trie of keys, then the texts that stand in for them, each ended by a zero.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MOST_BYTES = 1 << 22  # those of T5, XLM-R and NLLB take 0.3 MB
_DEEPEST = 8  # bytes of a key; a letter has four, and longer groups of letters than five bytes are looked up in letters

U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]


def charsmap_growth(table: Any) -> float:
    """Bytes that a byte of text becomes at most. Raises ValueError with what is wrong, in one line, for a table that
    the library can't read."""
    if not isinstance(table, str) or not table.isascii():
        raise ValueError("its precompiled_charsmap is no text")
    if len(table) > _MOST_BYTES:
        raise ValueError(f"its precompiled_charsmap has {len(table):,} letters, none is longer than {_MOST_BYTES:,}")
    body = base64.b64decode(table, validate=True)
    nbytes = int.from_bytes(body[:4], "little")
    if len(body) <= 4 or not 0 < nbytes <= len(body) - 4 or nbytes % 4:
        raise ValueError(f"its precompiled_charsmap says {nbytes:,} bytes of keys and has {max(0, len(body) - 4):,}")
    units = np.frombuffer(body, "<u4", nbytes // 4, 4)
    texts = body[4 + nbytes :]
    texts.decode("utf-8")
    return _growth(units, np.frombuffer(texts, np.uint8))


def _growth(units: U32, texts: NDArray[np.uint8]) -> float:
    ends = np.append(np.flatnonzero(texts == 0), len(texts))
    places = np.arange(len(units), dtype=np.int64)
    labels, below = (units & 0xFF).astype(np.int64), _below(units, places)
    is_node = (labels != 0) & (units >> 31 == 0)
    above = places ^ labels  # what a node that leads here points to
    reached, most = np.zeros(len(units) + 256, bool), 1.0
    leads = below[:1]
    for depth in range(1, _DEEPEST + 1):
        reached[:] = False
        reached[leads[leads < len(units)]] = True
        found = np.flatnonzero(is_node & reached[above])
        is_node[found] = False  # no later key that ends here is shorter
        leads = below[found]
        leaves = leads[(units[found] >> 8) & 1 == 1]
        most = max(most, _longest(units, texts, ends, leaves) / depth)
    return max(most, float(np.diff(ends, prepend=-1).max() - 1) / _DEEPEST)


def _below(units: U32, places: I64) -> I64:
    """Where the nodes below each unit begin."""
    shift = ((units & 0x200) >> 6).astype(np.int64)
    return places ^ ((units >> 10).astype(np.int64) << shift)


def _longest(units: U32, texts: NDArray[np.uint8], ends: I64, leaves: I64) -> int:
    """Bytes of the longest text that these leaves name."""
    starts = (units[leaves[leaves < len(units)]] & 0x7FFFFFFF).astype(np.int64)
    starts = starts[starts <= len(texts)]
    return int((ends[np.searchsorted(ends, starts)] - starts).max(initial=0))
