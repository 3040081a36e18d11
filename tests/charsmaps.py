"""Precompiled tables of SentencePiece, as tokenizer.json has them, made of a few keys."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping

_LEAF, _VALUE = 1 << 8, 1 << 31


def charsmap(texts: Mapping[bytes, bytes]) -> str:
    """In base64: a trie in which each of the keys stands for a text. One block of 256 units for every node."""
    nodes, units = {b"": 0}, [0]
    for key in texts:
        for length in range(1, len(key) + 1):
            nodes.setdefault(key[:length], 0)
    for number, node in enumerate(nodes):
        nodes[node] = 256 * (1 + number)  # where those below it begin
    units += [0] * (256 * (1 + len(nodes)))
    blob = b""
    for node, below in nodes.items():
        at = 0 if not node else nodes[node[:-1]] ^ node[-1]
        units[at] = (at ^ below) << 10 | (node[-1] if node else 0) | (_LEAF if node in texts else 0)
        if node in texts:
            units[below] = _VALUE | len(blob)
            blob += texts[node] + b"\0"
    body = struct.pack(f"<{len(units)}I", *units)
    return base64.b64encode(struct.pack("<I", len(body)) + body + blob).decode()
