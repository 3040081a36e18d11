"""docs/speed-by-memory.svg: tokens/s against memory on imitated small devices, ours and llama.cpp's, from docs/results.

Plain text, the same for the same result. `make tables` writes it; a test compares. A point whose part of the bench
failed is named as failed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from recipes.bench.result import Result
from recipes.bench.tables.speed import BESIDE_LLAMA, DEVICES, LARGE, ROOMS

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "speed-by-memory.svg"
SOURCE = "stream"
ALL = "all in memory"
MOERT, LLAMA = "moert", "llama.cpp Q2_K"
SPEED, MEMORY = "decode", "peak memory of the process"
WIDTH, HEIGHT, TOP, BOTTOM, LEFT, GAP, PANEL, TALL = 960, 470, 112, 340, 56, 38, 262, 228
STYLE = (
    "svg{--ink:#1b1f24;--soft:#59636e;--grid:#d8dee4;--blue:#0072b2;--orange:#d55e00;--paper:#fff}"
    "@media(prefers-color-scheme:dark){svg{--ink:#e6e8eb;--soft:#a3acb6;--grid:#39414a;--blue:#5ab4e5;"
    "--orange:#f0a24a;--paper:#14181d}}"
    "text{font:13px system-ui,sans-serif;fill:var(--ink)}.soft{fill:var(--soft)}.title{font-weight:600}"
    ".mid{text-anchor:middle}.end{text-anchor:end}.ours{fill:var(--blue)}.theirs{fill:var(--orange)}"
    ".grid{stroke:var(--grid)}.line{stroke:var(--blue);stroke-width:2;fill:none}"
    ".apart{stroke:var(--soft);stroke-dasharray:2 3}"
    ".mark{stroke:var(--blue);stroke-width:2;fill:var(--blue)}"
    ".mark.theirs{stroke:var(--orange);fill:var(--orange)}.paper{fill:var(--paper)}"
)


@dataclass(frozen=True)
class Point:
    """One process."""

    label: str
    mb: float
    speed: float


@dataclass(frozen=True)
class Panel:
    """One drive: a line over budgets with the routing of a trained model; and beside llama.cpp, both going where random
    routers say."""

    title: str
    line: list[Point]
    ours: Point | None
    theirs: Point | None
    failed: list[str]


@dataclass(frozen=True)
class Scales:
    """Where memory and speed lie in a panel that begins at x = 0."""

    least_mb: float
    most_mb: float
    least: int  # powers of ten of tokens/s
    most: int

    @classmethod
    def of(cls, points: list[Point]) -> Scales:
        mb, speeds = [point.mb for point in points], [point.speed for point in points]
        return cls(
            200 * math.floor(min(mb) / 200 - 0.2), 200 * math.ceil(max(mb) / 200 + 0.2),
            math.floor(math.log10(min(speeds))), math.ceil(math.log10(max(speeds))),
        )  # fmt: skip

    def x(self, mb: float) -> float:
        return PANEL * (mb - self.least_mb) / (self.most_mb - self.least_mb)

    def y(self, speed: float) -> float:
        return BOTTOM - TALL * (math.log10(speed) - self.least) / (self.most - self.least)


def needed(result: Result) -> set[str]:
    """The rows that the picture shows."""
    sides = [f"{where}: {side}" for device in DEVICES for where, side in _sides(device, result)]
    return {f"{side}: {figure}" for side in sides for figure in (SPEED, MEMORY)} & set(result.by_name)


def drawn(results: Mapping[str, Result]) -> str | None:
    """The picture as text; None if its result is not kept."""
    if SOURCE not in results:
        return None
    result = results[SOURCE]
    panels = [_panel(device, result) for device in DEVICES]
    points = [point for panel in panels for point in (*panel.line, panel.ours, panel.theirs) if point is not None]
    scales = Scales.of(points)
    where = result.context
    machine = where["hardware"]
    under = (
        "A model of OLMoE's shape, 6 layers, random weights. Circles are routed as a trained model was; squares and "
        "diamonds by the",
        "random routers, which llama.cpp can't do without.",
        f"Commit {where['commit'][:7]}, {where['date'][:10]}, "
        f"{machine['processor']}, {machine['cores']} cores, {machine['isa']}: make bench-stream",
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-label="Tokens per second against memory of the process, moert and llama.cpp">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        _text(16, 28, "Tokens/s against memory of the whole process, for three speeds of the drive", "title"),
        *_legend(),
        *(line for at, panel in enumerate(panels) for line in _drawn_panel(at, panel, scales)),
        _text(LEFT + (3 * PANEL + 2 * GAP) / 2, BOTTOM + 42, "memory of the process, MB", "mid"),
        *(_text(16, BOTTOM + 74 + 20 * at, line, "soft") for at, line in enumerate(under)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _sides(device: str, result: Result) -> Iterator[tuple[str, str]]:
    """(where, who) of every process in a panel."""
    for side in (*(f"moert {share}%" for share in ROOMS), f"moert, {ALL}"):
        yield f"{LARGE}, {device}", side
    for match in filter(None, map(BESIDE_LLAMA.fullmatch, result.by_name)):
        if match["device"] == device:
            yield from ((match["where"], side) for side in (MOERT, LLAMA))


def _panel(device: str, result: Result) -> Panel:
    line, beside, failed = list[Point](), dict[str, Point](), list[str]()
    for where, side in _sides(device, result):
        rows = [result.by_name.get(f"{where}: {side}: {figure}") for figure in (SPEED, MEMORY)]
        speed, memory = rows
        if speed is None or memory is None:
            failed.append(side)
            continue
        label = side.removeprefix("moert").strip(" ,").replace(ALL, "all")
        point = Point(label, memory.value, speed.value)
        if where == f"{LARGE}, {device}":
            line.append(point)
        else:
            beside[side] = point
    failed += [LLAMA] if LLAMA not in {*beside, *failed} else []
    return Panel(DEVICES[device], line, beside.get(MOERT), beside.get(LLAMA), failed)


def _legend() -> list[str]:
    return [
        _circle(24, 52), _text(36, 56, "moert; labels: share of the experts that has room"),
        _square(400, 52), _text(412, 56, "moert beside llama.cpp, the same memory"),
        _diamond(712, 52), _text(724, 56, f"{LLAMA}, mapped"),
    ]  # fmt: skip


def _drawn_panel(at: int, panel: Panel, scales: Scales) -> Iterator[str]:
    yield f'<g transform="translate({LEFT + at * (PANEL + GAP)} 0)">'
    yield _text(0, TOP - 18, f"drive: {panel.title}", "title")
    for power in range(scales.least, scales.most + 1):
        y = scales.y(10.0**power)
        yield f'<path class="grid" d="M0 {y:.1f}H{PANEL}"/>'
        if at == 0:
            yield _text(-8, y + 4, f"{10.0**power:g}", "end soft")
    for mb in range(int(scales.least_mb), int(scales.most_mb) + 1, 200):
        yield f'<path class="grid" d="M{scales.x(mb):.1f} {BOTTOM}v5"/>'
        yield _text(scales.x(mb), BOTTOM + 20, str(mb), "mid soft")
    places = [(scales.x(point.mb), scales.y(point.speed)) for point in panel.line]
    if places:
        yield f'<path class="line" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>'
    if panel.ours is not None and panel.theirs is not None:
        x, above, below = scales.x(panel.theirs.mb), scales.y(panel.ours.speed), scales.y(panel.theirs.speed)
        yield f'<path class="apart" d="M{x:.1f} {above:.1f}V{below:.1f}"/>'
    if panel.ours is not None:
        yield _square(scales.x(panel.ours.mb), scales.y(panel.ours.speed))
    for point, (x, y) in zip(panel.line, places, strict=True):
        yield _circle(x, y)
        yield _text(x - 2, y - 10, point.label, "end ours")
    if panel.theirs is not None:
        x, y = scales.x(panel.theirs.mb), scales.y(panel.theirs.speed)
        yield _diamond(x, y)
        yield _text(x + 10, y + 5, f"{panel.theirs.speed:.2g}", "theirs")
        if panel.ours is not None:
            yield _text(x + 12, scales.y(panel.ours.speed) + 16, f"{panel.ours.speed:.2g}", "ours")
    for number, side in enumerate(panel.failed):
        yield _text(0, BOTTOM - 8 - 16 * number, f"{side}: failed", "soft")
    yield "</g>"


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{of_kind}>{escape(text)}</text>'


def _circle(x: float, y: float) -> str:
    return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'


def _square(x: float, y: float) -> str:
    return f'<rect class="mark" x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10"/>'


def _diamond(x: float, y: float) -> str:
    return f'<path class="mark theirs" d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"/>'
