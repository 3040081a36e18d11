"""`moert bench --drive`: how fast the drives of packs are, by the size of a read and the number of simultaneous
reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from moert.bench.curve import IN_FLIGHT, Curve, best_piece, curve_of
from moert.engine.budget import room_within
from moert.pack.layout import DOWN, columns_bytes
from moert.pack.manifest import BACKBONE
from moert.pack.messages import shown
from moert.pack.reader import Pack
from moert.stats import size

Points = Sequence[tuple[str, float]]
Kind = Literal["lines", "counts", "bars", "shares", "states"]
FIRING = (0.03, 0.1, 0.4)
"""Shares of a layer's neurons that may fire for a token: of OPT-6.7B, of a model trained for it, of any other."""


class Neurons(NamedTuple):
    """`n` neurons that a token may ask for at once, with columns of `nbytes` each."""

    n: int
    nbytes: int


def piece_times(curve: Curve, neurons: Neurons, share: float) -> dict[int, float]:
    """By the bytes of a piece, the time in which all that have a neuron that fires come, s, if `share` of them fire,
    each for itself. Without pieces that no neuron fits in, or that hold more than there are."""
    times = dict[int, float]()
    for chunk in curve.chunks:
        each = chunk // neurons.nbytes
        if 1 <= each <= neurons.n:
            asked = neurons.n / each * (1 - (1 - share) ** each)
            times[chunk] = curve.read_s(chunk, asked)
    return times


@dataclass(frozen=True)
class Figure:
    """A chart: series of (place, value), all with the same places where they have any; `places` and `values` name the
    two.

    Lines have percentages for places, on the x axis, or whole numbers ("counts"); bars have names. Where places are
    shares of all values ("shares"), values lie along the x axis and shares grow upwards. Series may be rows of cells
    ("states"), whose values are states that `values` names, from 0 on and divided by commas. `caption`: names the
    subject, the packs and the machine.
    """

    name: str
    title: str
    places: str
    values: str
    kind: Kind
    series: Mapping[str, Points]
    caption: str = ""

    def table(self) -> str:
        """Returns a line for each place."""
        places = list(dict.fromkeys(place for points in self.series.values() for place, _ in points))
        values = {name: dict(points) for name, points in self.series.items()}
        rows = [(self.places, *values)]
        for place in places:
            rows.append((place, *(f"{one[place]:.4g}" if place in one else "" for one in values.values())))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        return "\n".join([f"{self.title} ({self.values})", *lines, *filter(None, [self.caption])])


@dataclass(frozen=True)
class DriveRun:
    """The measurement of a pack's drive. `pieces`: share of the neurons that fire → bytes of a piece of columns →
    seconds in which a token's pieces come; empty for experts whose neurons are never exactly zero."""

    label: str
    curve: Curve
    pieces: Mapping[float, Mapping[int, float]]


def measure_drive(path: Path) -> DriveRun:
    """Measures the drive under a pack. Raises PackError, DriveUnmeasurable."""
    pack = Pack.open(path, room_within(None))
    paths = dict.fromkeys([BACKBONE, *(entry.path for entry in pack.manifest.experts)])
    curve = curve_of([pack.file(name) for name in paths])
    neurons = _neurons(pack)
    times = {share: piece_times(curve, neurons, share) for share in FIRING} if neurons else {}
    return DriveRun(pack.root.resolve().name, curve, {share: found for share, found in times.items() if found})


def _neurons(pack: Pack) -> Neurons | None:
    """Returns the neurons that a token may need of a layer, on average over the experts' widths; None where no neuron
    is ever exactly zero."""
    spec, how = pack.manifest.model, pack.manifest.quantization
    moe = spec.moe
    if not moe.ffn.act.exact_zeros or how.mxfp4:
        return None
    each = [columns_bytes(one.bits[DOWN], spec.expert_width, how.coding) for one in pack.manifest.experts]
    return Neurons(moe.router.top_k * moe.ffn.d_ff, round(sum(each) / len(each)))


def show(found: DriveRun, as_json: bool) -> None:
    """Prints a table and a JSON line, or that line alone."""
    if not as_json:
        print(shown("\n".join([figure(found).table(), *_advice(found)])), end="\n\n")
    print(json.dumps(facts(found)), flush=True)


def facts(found: DriveRun) -> dict[str, Any]:
    """Returns the plain values of the JSON line."""
    return {
        "pack": found.label,
        "spread_bytes": found.curve.spread_bytes,
        "speeds": [
            {"chunk_bytes": chunk, "in_flight": count, "bytes_per_s": speed}
            for (chunk, count), speed in found.curve.speeds.items()
        ],
        "pieces": [
            {"firing": share, "best_bytes": best_piece(times), "seconds": {str(at): s for at, s in times.items()}}
            for share, times in found.pieces.items()
        ],
    }


def figure(found: DriveRun) -> Figure:
    """Returns throughput over the size of a read (Alizadeh et al. 2023, Fig. 2b)."""
    curve = found.curve
    series = {
        f"{count} at once": [(str(chunk), curve.speeds[chunk, count] / 1e6) for chunk in curve.chunks]
        for count in IN_FLIGHT
    }
    caption = (
        f"Direct reads at random places of the files of {found.label}, {size(curve.spread_bytes)} in all, so many "
        "asked for in one call and waited for."
    )
    name, title = f"drive-{found.label}", f"Reading from the drive of {found.label}"
    return Figure(name, title, "bytes of a read", "MB/s", "counts", series, caption)


def _advice(found: DriveRun) -> list[str]:
    if not found.pieces:
        return []
    each = (
        f"{best_piece(times)} if {100 * share:.0f}% fire ({1e3 * times[best_piece(times)]:.2f} ms a layer)"
        for share, times in found.pieces.items()
    )
    return [
        f"fastest --tune piece-bytes (moeconv quantize --layout columns) while none stay in memory: {', '.join(each)}"
    ]


def bench_drives(packs: Sequence[Path], as_json: bool) -> Iterator[DriveRun]:
    """Measures the drive of each pack, prints the measurement and yields it. Raises PackError, RunError."""
    for path in packs:
        Pack.open(path)
    for path in packs:
        found = measure_drive(path)
        show(found, as_json)
        yield found
