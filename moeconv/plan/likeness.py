"""How often experts are found in memory, by the reference model that a model is most like. Pure but for reading
hit_rates.json, which `python -m recipes.bench.hit_rates` makes of the traces of recipes/models, by moert's own
replay."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import log
from typing import Any, Literal

from moert.pack.model_spec import ModelSpec

DATA = "hit_rates.json"
Kind = Literal["encoder-decoder", "decoder"]


@dataclass(frozen=True)
class Reference:
    """A model whose routing was recorded. `rates`: (share of the experts' bytes that has room, hit rate under the
    eviction that `auto` takes there), by rising share; none where a token takes all experts of a layer, of which those
    are found that have room."""

    name: str
    kind: Kind
    experts: int
    top_k: int
    layers: int
    rates: tuple[tuple[float, float], ...]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Reference:
        rates = tuple((float(share), float(rate)) for share, rate in values["rates"])
        return cls(values["name"], values["kind"], values["experts"], values["top_k"], values["layers"], rates)

    def hit_rate(self, share: float) -> float:
        """Between the measured shares as on a straight line; none where nothing has room, 1 where all has."""
        points = [(0.0, 0.0), *self.rates, (1.0, 1.0)]
        if share >= 1:
            return 1.0
        place = max(1, bisect_left(points, (max(share, 0.0), 0.0)))
        (left, low), (right, high) = points[place - 1], points[place]
        return low + (high - low) * (max(share, 0.0) - left) / (right - left)


@cache
def references() -> tuple[Reference, ...]:
    """All that were recorded."""
    text = (files("moeconv.plan") / DATA).read_text(encoding="utf-8")
    return tuple(map(Reference.from_json, json.loads(text)["models"]))


def kind_of(spec: ModelSpec) -> Kind:
    return "encoder-decoder" if spec.encoder is not None else "decoder"


def nearest(spec: ModelSpec, known: Sequence[Reference]) -> Reference:
    """Of the same kind where there is one; then the most like in experts of a layer and experts of a token, by the
    ratios of these numbers. One that chooses nothing is like itself alone."""
    if not spec.moe.chooses:
        return Reference(spec.family, kind_of(spec), spec.moe.n, spec.moe.router.top_k, len(spec.experts), ())

    def distance(one: Reference) -> tuple[bool, float]:
        moe = spec.moe
        ratios = abs(log(one.experts / moe.n)) + abs(log(one.top_k / moe.router.top_k))
        return one.kind != kind_of(spec), ratios

    return min(known, key=distance)
