"""What a person reads after a command: tables and lines, all figures from the artefacts."""

from __future__ import annotations

from collections.abc import Mapping

from moeconv.artifacts import ConversionReport
from moeconv.paths import PathFigures
from moert.pack.manifest import Measured


def conversion_table(report: ConversionReport, out: str) -> str:
    """The result of `moeconv quantize`."""
    sizes = report.expert_bytes
    lines = [f"{out}: {report.model}, quantizer {report.quantizer}", ""]
    if report.calibration and report.heldout:
        better = "drop of" if report.metric != "perplexity" else "rise of"
        lines += [
            f"  loss is the relative {better} {report.metric} against the unquantised model; "
            f"target {report.target_loss:.2%}",
            f"  {'':12} {'reference':>10} {'pack':>10} {'loss':>8}   95% interval        samples",
            _measured_line("calibration", report.calibration),
            _measured_line("held-out", report.heldout),
            "",
        ]
    widths = ", ".join(f"{count} at {bits}" for bits, count in report.bits_histogram.items())
    lines += [
        f"  expert matrices by width: {widths}; {report.effective_bits:.2f} bits a weight with scales",
        f"  expert bytes: {sizes['pack']:,} = {_share(sizes, 'fp16')} of FP16, {_share(sizes, 'int8')} of uniform "
        f"INT8, {_share(sizes, 'int4')} of uniform INT4",
        f"  {report.evaluations} evaluations, {report.evaluation_seconds:.0f} s; this run {report.seconds:.0f} s",
    ]
    return "\n".join(lines)


def missed_target(report: ConversionReport) -> str | None:
    """One line if the held-out loss is above the target."""
    if report.heldout is None or report.heldout.loss <= report.target_loss:
        return None
    return (
        f"the held-out loss is {report.heldout.loss:.2%}, above the target of {report.target_loss:.2%}: the pack meets "
        "the target on its calibration text only; give more of that text, or a --margin"
    )


def path_table(found: PathFigures, nbytes: int) -> str:
    """The result of `moeconv profile-paths`."""
    coverage = ", ".join(f"{stack} {share:.1%}" for stack, share in found.coverage20.items())
    lines = [
        f"{found.tokens:,} tokens profiled, tables of {nbytes:,} bytes",
        f"  the 20% most frequent paths cover: {coverage}",
        f"  held-out tokens that take the likeliest next expert, two layers known: {_percent(found.best_next)}",
        "  share of held-out choices predicted:   top-1    top-2    top-3",
    ]
    for known, row in enumerate(found.accuracy):
        values = [None] * 3 if row is None else row
        lines.append(f"    {known} layers known                  " + "  ".join(f"{_percent(v):>7}" for v in values))
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _measured_line(name: str, measured: Measured) -> str:
    interval = f"{measured.low:+.2%} to {measured.high:+.2%}"
    return (
        f"  {name:12} {measured.reference:>10.4f} {measured.value:>10.4f} {measured.loss:>8.2%}   {interval:18}  "
        f"{measured.samples}"
    )


def _share(sizes: Mapping[str, int], name: str) -> str:
    return f"{sizes['pack'] / sizes[name]:.1%}"
