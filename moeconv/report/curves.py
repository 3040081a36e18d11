"""Charts of a report: curves of size and loss, maps of experts, routing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moeconv.artifacts import SAVED, ConversionReport, CurvePoint, Residence, Target
from moeconv.report.page import BLUE, GRID, INK, ORANGE, SOFT, Chart, draw
from moert.pack.codec import Width
from moert.pack.manifest import ExpertEntry
from moert.pack.model_spec import STACKS, ExpertKey, ModelSpec, StackName
from moert.pack.paths import ContextCounts, LayerPaths, TransitionTable

# Figures from the counts of paths.safetensors: how few paths most tokens take, and how well the next expert is
# guessed.

F64 = npt.NDArray[np.float64]


def path_shares(table: TransitionTable, stack: StackName) -> tuple[F64, F64] | None:
    """Returns (share of paths, share of tokens), both from 0 to 1, the most frequent paths first (EdgeMoE Fig. 4).

    The table counts paths through three successive layers with experts; the counts of all of them go in. None where
    the stack has fewer layers or nothing was counted.
    """
    counts = [layer.two_before.counts for layer in table.of_stack(stack) if len(layer.two_before.counts)]
    if not counts:
        return None
    ordered = np.sort(np.concatenate(counts).astype(np.float64))[::-1]
    tokens = np.concatenate([[0.0], np.cumsum(ordered)]) / ordered.sum()
    return np.arange(len(tokens)) / (len(tokens) - 1), tokens


def top_share(shares: tuple[F64, F64], share: float = 0.2) -> float:
    """Returns the share of tokens that take one of the `share` most frequent paths."""
    return float(np.interp(share, *shares))


def prediction(table: TransitionTable, top_k: int) -> list[tuple[float, float, float]] | None:
    """Returns top-1, top-2 and top-3 accuracy with the experts of 0, 1 and 2 layers before known (EdgeMoE Fig. 8).

    Top-n: the expert is among the n * top_k most counted ones. Each choice is judged by the counts of all the others,
    its own left out, so a context seen once predicts nothing. With top_k > 1 one expert of each layer is taken as
    known. Only layers that have two before them count; None without one.
    """
    judged = [layer for stack in STACKS for layer in table.of_stack(stack)[2:]]
    results: list[tuple[float, float, float]] = []
    for known in range(3):
        hits, total = np.zeros(3), 0.0
        for layer in judged:
            for counts in _contexts(layer, known):
                hits += [_hits(counts, n * top_k) for n in (1, 2, 3)]
                total += counts.sum()
        if not total:
            return None
        first, second, third = (hits / total).tolist()
        results.append((first, second, third))
    return results


def _contexts(layer: LayerPaths, known: int) -> Iterator[F64]:
    """Yields the counts of the experts seen in each context, in order of the experts."""
    if known == 0:
        yield layer.frequency.astype(np.float64)
        return
    table: ContextCounts = layer.one_before if known == 1 else layer.two_before
    for start, stop in zip(table.rows[:-1].tolist(), table.rows[1:].tolist(), strict=True):
        yield table.counts[start:stop].astype(np.float64)


def _hits(counts: F64, n: int) -> float:
    """Returns the number of counted choices that are still among the n most counted when they themselves are taken
    away."""
    ordered = np.sort(counts)[::-1]
    bar = max(1.0, ordered[n]) if len(ordered) > n else 1.0
    return float(counts[counts - 1 >= bar].sum())


# Curves: size against loss, how tokens share the paths, and how well the next expert is guessed.

_SIZE = (6.0, 3.8)
_FARTHEST = 1e6
"""The largest value that is drawn: no axis shows more, and drawing computes squares."""


def loss_curve(report: ConversionReport, target_bytes: float | None) -> Chart:
    """Returns the chart of size and loss: predicted loss as a line, measured plans as points with their bounds, the
    target, the chosen plan."""
    points = sorted(report.curve, key=lambda point: point.nbytes)
    predicted = [
        (point.nbytes / 1e6, drawn(point.predicted_loss)) for point in points if point.predicted_loss is not None
    ]
    measured = [point for point in points if point.loss is not None]

    def paint(figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        axes = figure.subplots()
        if predicted:
            axes.plot(*zip(*predicted, strict=True), color=BLUE, label="predicted")
        if measured:
            _measured(axes, measured, ORANGE)
        for point in points:
            if point.chosen:
                _chosen(axes, point, report)
        if report.target.kind == "loss":
            axes.axhline(drawn(report.target.value), color=INK, linestyle="--", linewidth=1, label="target")
        elif target_bytes is not None:
            axes.axvline(drawn(target_bytes / 1e6, 1e12), color=INK, linestyle="--", linewidth=1, label="target")
        low, high = _range(points, report)
        axes.set_ylim(low, high)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        purpose = None if report.dense is None else report.dense.purpose
        axes.set_xlabel("size of all experts, MB" if purpose is None else f"MB {SAVED[purpose]}")
        axes.set_ylabel("loss")
        axes.grid(axis="y", linewidth=0.8)
        if purpose is None and report.expert_bytes.get("fp16"):
            whole = report.expert_bytes["fp16"] / 1e6
            top = axes.secondary_xaxis("top", functions=(lambda size: size / whole, lambda share: share * whole))
            top.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
            top.xaxis.set_major_formatter(PercentFormatter(1.0))
            top.set_xlabel("share of FP16", color=SOFT)
            top.spines["top"].set_visible(False)
        axes.legend(loc="upper right")

    return draw("size-loss", *_SIZE, paint)


def read_curve(name: str, found: Residence, target: Target) -> Chart:
    """Returns the chart of measured plans, bytes that a token reads against loss with its bound: of widths alone, and
    with routing."""

    def paint(figure: Any) -> None:
        from matplotlib.ticker import PercentFormatter

        axes = figure.subplots()
        for points, colour, mark, label in (
            (found.alone, BLUE, "s", "widths alone"), (found.together, ORANGE, "o", "widths and routing"),
        ):  # fmt: skip
            losses = [drawn(one.loss) for one in points]
            above = [
                0.0 if one.upper is None else max(0.0, drawn(one.upper) - loss)
                for one, loss in zip(points, losses, strict=True)
            ]
            axes.errorbar(
                [drawn(one.bytes / 1e3, 1e12) for one in points], losses, yerr=[[0.0] * len(points), above],
                fmt=mark, markersize=5, color=colour, elinewidth=1.2, capsize=4, label=label,
            )  # fmt: skip
        if target.kind == "loss":
            axes.axhline(drawn(target.value), color=INK, linestyle="--", linewidth=1, label="target")
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.set_xlim(left=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set(xlabel="read for a token, kB", ylabel="loss, with upper bound")
        axes.grid(axis="y", linewidth=0.8)
        axes.legend(loc="upper right")

    return draw(name, *_SIZE, paint)


def drawn(value: float, farthest: float = _FARTHEST) -> float:
    """Returns the value, or the farthest one that is drawn."""
    return min(max(value, -farthest), farthest)


def _measured(axes: Any, points: Sequence[CurvePoint], colour: str) -> None:
    """Draws measured plans; the mark at the top of a bar is the upper bound."""
    losses = [drawn(point.loss or 0.0) for point in points]
    above = [max(0.0, (drawn(point.upper) if point.upper is not None else loss) - loss) for point, loss in
             zip(points, losses, strict=True)]  # fmt: skip
    axes.errorbar(
        [point.nbytes / 1e6 for point in points], losses, yerr=[[0.0] * len(points), above], fmt="o", markersize=5,
        color=colour, elinewidth=1.2, capsize=4, label="measured, with upper bound",
    )  # fmt: skip


def _chosen(axes: Any, point: CurvePoint, report: ConversionReport) -> None:
    loss = point.loss if point.loss is not None else point.predicted_loss
    if loss is None:
        return
    at = point.nbytes / 1e6
    axes.plot([at], [drawn(loss)], "o", markersize=13, fillstyle="none", markeredgewidth=1.8, color=INK, label="chosen")
    if report.heldout is not None:
        low, loss, high = (drawn(value) for value in (report.heldout.low, report.heldout.loss, report.heldout.high))
        axes.errorbar(
            [at], [loss], yerr=[[max(0.0, loss - low)], [max(0.0, high - loss)]],
            fmt="D", markersize=5, color=SOFT, elinewidth=1, capsize=3, label="held-out, 95% interval",
        )  # fmt: skip


def _range(points: Sequence[CurvePoint], report: ConversionReport) -> tuple[float, float]:
    """Returns the range of the axis around measured losses and target; if only predictions are known, around these."""
    values = [value for point in points for value in (point.loss, point.upper) if value is not None]
    values += [report.target.value] if report.target.kind == "loss" else []
    values += [report.heldout.low, report.heldout.high] if report.heldout else []
    if not any(point.loss is not None for point in points):
        values += [point.predicted_loss for point in points if point.predicted_loss is not None]
    values = [drawn(value) for value in values] or [0.0, 0.05]
    low, high = min(0.0, *values), max(0.01, *values)
    return low - 0.06 * (high - low), high + 0.12 * (high - low)


def path_curve(shares: Mapping[str, tuple[F64, F64]]) -> Chart:
    """Returns the chart of the share of tokens against the share of paths, a line for each stack (EdgeMoE Fig. 4)."""

    def paint(figure: Any) -> None:
        from matplotlib.ticker import PercentFormatter

        axes = figure.subplots()
        for (stack, (paths, tokens)), colour, line in zip(shares.items(), (BLUE, ORANGE), ("-", "--"), strict=False):
            step = max(1, len(paths) // 400)
            axes.plot([*paths[::step], 1.0], [*tokens[::step], 1.0], line, color=colour, label=stack)
        axes.plot([0, 1], [0, 1], color=SOFT, linewidth=1, linestyle=":", label="all paths alike")
        axes.axvline(0.2, color=SOFT, linewidth=0.8)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(1.0))
        axes.set(xlabel="share of paths, most frequent first", ylabel="share of tokens", xlim=(0, 1), ylim=(0, 1.02))
        axes.grid(linewidth=0.8)
        axes.legend(loc="lower right")

    return draw("paths-share", *_SIZE, paint)


def prediction_bars(accuracy: Sequence[tuple[float, float, float]]) -> Chart:
    """Returns the chart of top-1, top-2 and top-3 accuracy by the number of known layers (EdgeMoE Fig. 8)."""

    def paint(figure: Any) -> None:
        from matplotlib.ticker import PercentFormatter

        axes = figure.subplots()
        for n, (colour, hatch) in enumerate(((BLUE, ""), (ORANGE, "//"), (SOFT, ".."))):
            bars = axes.bar(
                [known + (n - 1) * 0.27 for known in range(len(accuracy))], [row[n] for row in accuracy], 0.25,
                color=colour, hatch=hatch, edgecolor=INK, linewidth=0.6, label=f"top-{n + 1}",
            )  # fmt: skip
            axes.bar_label(bars, [f"{row[n]:.0%}" for row in accuracy], fontsize=8, padding=2)
        axes.set_xticks(range(len(accuracy)), ["none", "one layer", "two layers"][: len(accuracy)])
        axes.tick_params(axis="x", length=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set(
            xlabel="layers before that are known", ylabel="guessed right", ylim=(0, 1.2), yticks=[0, 0.25, 0.5, 0.75, 1]
        )
        axes.legend(loc="upper center", ncols=3)

    return draw("paths-prediction", *_SIZE, paint)


# Maps of layers by experts: one number, or one width, for each expert.

WIDTH_COLOURS: Mapping[Width, str] = {
    1: "#2b0a3d", 1.5: "#440f54", 2: "#46327e", 2.5: "#365c8d", 3: "#277f8e", 4: "#4ac16d", 8: "#bddf26", 16: "#f7e8a0",
}  # fmt: skip
"""From few bits (dark) to many (light): told apart by lightness alone, so also by the colour-blind and in print."""
_PAPER_INK = "#101418"
_DARK = 3  # bits, up to which a cell's number is white
_WIDTH_IN = 6.4
_NUMBERED = 300  # cells; more numbers than that make a heavy page and say little
_FARTHEST_CELL = 1e18  # drawn for anything beyond


def number_map(name: str, label: str, values: Mapping[ExpertKey, float], spec: ModelSpec, counts: bool) -> Chart:
    """Returns a heat map; experts without a value are grey. `counts`: values are tokens, on a logarithmic scale."""
    cells = grid(values, spec)

    def paint(figure: Any) -> None:
        from matplotlib.colors import LogNorm, Normalize
        from matplotlib.ticker import FuncFormatter, PercentFormatter

        axes = figure.subplots()
        known = cells[np.isfinite(cells)] if np.isfinite(cells).any() else np.zeros(1)
        if counts:
            norm: Any = LogNorm(vmin=1, vmax=max(2.0, known.max()))
            shown = np.where(cells > 0, cells, np.nan)
            extend = "neither"
            form: Any = FuncFormatter(lambda value, _: f"{value:,.0f}")
        else:
            low, high = float(known.min()), float(np.percentile(known, 98))
            norm, shown = Normalize(low, max(high, low + 1e-9)), cells
            extend = "max" if known.max() > norm.vmax else "neither"
            form = PercentFormatter(1.0) if name.endswith("metric") else FuncFormatter(lambda value, _: f"{value:.3g}")
        image = _image(axes, shown, spec, cmap="viridis", norm=norm)
        axes.set_xlabel("expert")
        bar = figure.colorbar(
            image, ax=axes, orientation="horizontal", extend=extend, format=form, label=label, fraction=0.08, aspect=40
        )
        bar.outline.set_visible(False)
        bar.ax.minorticks_off()

    return draw(name, _WIDTH_IN, _height(cells, 1) + 1.1, paint)


def width_map(experts: tuple[ExpertEntry, ...], spec: ModelSpec) -> Chart:
    """Returns a map of widths with a panel for each projection; a single one where every expert has all its projections
    at the same width."""
    projections = spec.moe.ffn.projections
    alike = all(len(set(entry.bits.values())) == 1 for entry in experts)
    panels = {"all projections": projections[0]} if alike else {projection: projection for projection in projections}
    cells = {
        title: grid({entry.key: float(entry.bits[projection]) for entry in experts}, spec)
        for title, projection in panels.items()
    }
    used = [width for width in WIDTH_COLOURS if any((panel == width).any() for panel in cells.values())]

    def paint(figure: Any) -> None:
        from matplotlib.colors import BoundaryNorm, ListedColormap
        from matplotlib.patches import Patch

        edges, colours = [0, *(width + 0.25 for width in WIDTH_COLOURS)], ListedColormap(list(WIDTH_COLOURS.values()))
        rows = figure.subplots(len(cells), 1, squeeze=False)[:, 0]
        for axes, (title, panel) in zip(rows, cells.items(), strict=True):
            _image(axes, panel, spec, cmap=colours, norm=BoundaryNorm(edges, len(WIDTH_COLOURS)))
            axes.set_title(title)
            if panel.shape[1] <= 16 and sum(cell.size for cell in cells.values()) <= _NUMBERED:
                for row, column in np.ndindex(panel.shape):
                    width = float(panel[row, column])
                    colour = "#ffffff" if width <= _DARK else _PAPER_INK
                    axes.text(column, row, f"{width:g}", ha="center", va="center", color=colour, fontsize=8)
        rows[-1].set_xlabel("expert")
        handles = [Patch(facecolor=WIDTH_COLOURS[width], edgecolor=SOFT, label=f"{width} bits") for width in used]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(used), handlelength=1.2)

    return draw("widths", _WIDTH_IN, _height(next(iter(cells.values())), len(cells)) + 0.9, paint)


def grid(values: Mapping[ExpertKey, float], spec: ModelSpec) -> F64:
    """Returns values [layers with experts, experts], in the order of execution; NaN where a value is missing."""
    rows = {place: row for row, place in enumerate(spec.moe_layers())}
    cells = np.full((len(rows), spec.moe.n), np.nan)
    for key, value in values.items():
        cells[rows[key.at], key.expert] = min(max(value, -_FARTHEST_CELL), _FARTHEST_CELL) if value == value else value
    return cells


def _image(axes: Any, cells: F64, spec: ModelSpec, **colours: Any) -> Any:
    """Draws cells as pixels, which the browser enlarges without smoothing."""
    image = axes.imshow(np.ma.masked_invalid(cells), aspect="auto", interpolation="none", **colours)
    step = max(1, -(-len(cells) // 16))
    places = list(enumerate(spec.moe_layers()))[::step]
    axes.set_yticks([row for row, _ in places], [str(at) for _, at in places])
    every = max(1, -(-cells.shape[1] // 16))
    axes.set_xticks(range(0, cells.shape[1], every))
    axes.set_facecolor(GRID)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if cells.size <= 512:
        axes.set_xticks(np.arange(cells.shape[1] - 1) + 0.5, minor=True)
        axes.set_yticks(np.arange(len(cells) - 1) + 0.5, minor=True)
        axes.tick_params(which="minor", length=0)
        axes.grid(which="minor", color=GRID, linewidth=0.6)
    return image


def _height(cells: F64, panels: int) -> float:
    """Returns the height of the panels in inches."""
    return panels * (0.45 + min(4.5, max(0.7, 0.24 * len(cells))))
