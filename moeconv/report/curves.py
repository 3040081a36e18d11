"""Curves: size against loss, how tokens share the paths, and how well the next expert is guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moeconv.artifacts import ConversionReport, CurvePoint, Residence, Target
from moeconv.report.chart import BLUE, INK, ORANGE, SOFT, Chart, draw
from moeconv.report.routing import F64

_SIZE = (6.0, 3.8)
_FARTHEST = 1e6
"""Drawn for anything beyond: no axis shows more, and drawing counts with squares."""


def loss_curve(name: str, report: ConversionReport, target_bytes: float | None) -> Chart:
    """Predicted loss as a line, measured plans as points with their bounds; the target; the plan that was chosen."""
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
        axes.set_xlabel("size of all experts, MB")
        axes.set_ylabel("loss")
        axes.grid(axis="y", linewidth=0.8)
        if report.expert_bytes.get("fp16"):
            whole = report.expert_bytes["fp16"] / 1e6
            top = axes.secondary_xaxis("top", functions=(lambda size: size / whole, lambda share: share * whole))
            top.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
            top.xaxis.set_major_formatter(PercentFormatter(1.0))
            top.set_xlabel("share of FP16", color=SOFT)
            top.spines["top"].set_visible(False)
        axes.legend(loc="upper right")

    return draw(name, *_SIZE, paint)


def read_curve(name: str, found: Residence, target: Target) -> Chart:
    """Measured plans, bytes that a token reads against loss with its bound: widths alone, and with routing."""

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
    """The value, or the farthest one that is drawn."""
    return min(max(value, -farthest), farthest)


def _measured(axes: Any, points: Sequence[CurvePoint], colour: str) -> None:
    """The mark at the top of a bar is the upper bound."""
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
    """Around what was measured and asked for; where only predictions are known, around the smallest of them."""
    values = [value for point in points for value in (point.loss, point.upper) if value is not None]
    values += [report.target.value] if report.target.kind == "loss" else []
    values += [report.heldout.low, report.heldout.high] if report.heldout else []
    if not any(point.loss is not None for point in points):
        values += [point.predicted_loss for point in points if point.predicted_loss is not None]
    values = [drawn(value) for value in values] or [0.0, 0.05]
    low, high = min(0.0, *values), max(0.01, *values)
    return low - 0.06 * (high - low), high + 0.12 * (high - low)


def path_curve(name: str, shares: Mapping[str, tuple[F64, F64]]) -> Chart:
    """Share of tokens against share of paths, one line for each stack (EdgeMoE Fig. 4)."""

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

    return draw(name, *_SIZE, paint)


def prediction_bars(name: str, accuracy: Sequence[tuple[float, float, float]]) -> Chart:
    """Top-1, top-2 and top-3 accuracy by the number of layers known (EdgeMoE Fig. 8)."""

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

    return draw(name, *_SIZE, paint)
