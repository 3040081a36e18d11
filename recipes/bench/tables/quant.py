"""`make bench-quant`: our quantisers beside others at equal effective bits."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recipes.bench.result import Result
from recipes.bench.tables import Line, Part

_BITS = re.compile(r"(?P<model>.+) against (?P<peer>.+): bits of the peer")


def parts(result: Result) -> Sequence[Part]:
    """A line for each peer, in order of its bits; a column for each model."""
    found = [(match["model"], match["peer"], result.by_name[match[0]].value) for match in
             filter(None, map(_BITS.fullmatch, result.by_name))]  # fmt: skip
    models = sorted({model for model, _, _ in found})
    peers = dict(sorted(((peer, bits) for _, peer, bits in reversed(found)), key=lambda each: each[1]))
    lines: list[Line] = [("", *models)]
    lines += [(peer, *(duel(f"{model} against {peer}", result) for model in models)) for peer in peers]
    return [lines]


def duel(about: str, result: Result) -> str:
    ratio, bits = f"{{{about}, heldout: divergence|interval.2f}}", f"{about}: bits of the peer"
    if bits not in result.by_name:
        return ratio
    return f"{ratio}, {{{about}: bits of ours|.2f}} to {{{bits}|.2f}} bits"
