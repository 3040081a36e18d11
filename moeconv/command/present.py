"""Results of commands for a person: tables and lines, with all figures from the artefacts."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from moeconv.artifacts import SAVED, ConversionReport, CurvePoint, Residence, Target
from moeconv.conversion.additions import HashFigures, NeuronFigures
from moeconv.conversion.planning import Planned
from moeconv.dense import width_text
from moeconv.packing.packed import Verified
from moeconv.packing.paths import PathFigures
from moeconv.report.page import size
from moert.pack.learnt import PredictedLoss, RoutedLoss
from moert.pack.manifest import LossEstimate, in_words
from moert.pack.text import CHAT


def conversion_table(report: ConversionReport, out: str) -> str:
    """Returns the result of `moeconv quantize` as text."""
    sizes = report.expert_bytes
    lines = [f"{out}: {report.model}, quantizer {report.quantizer}", ""]
    if report.calibration is None:
        lines += ["  no text was given: what this pack loses was not measured", ""]
    if report.calibration and report.heldout:
        lines += [
            f"  loss is how much worse {in_words(report.metric)} is than the unquantized model's, relative to it; "
            f"target {target_text(report.target)}",
            f"  {'':12} {'reference':>10} {'pack':>10} {'loss':>8}   95% interval        samples",
            *_measured_lines("calibration", report.calibration),
            *_measured_lines("held-out", report.heldout),
            *_promise(report),
            "",
        ]
    widths = ", ".join(f"{count} at {bits}" for bits, count in report.bits_histogram.items())
    lines += [
        f"  expert matrices by width: {widths}; {report.effective_bits:.2f} bits a weight with scales",
        f"  expert bytes: {sizes['pack']:,} = {_share(sizes, 'fp16')} of FP16, {_share(sizes, 'int8')} of uniform "
        f"INT8, {_share(sizes, 'int4')} of uniform INT4",
        *_dense(report),
        *_route(report),
        *_scales(report),
        *_neurons(report),
        *_residences(report.residences, report.confidence),
        *_sweep(report),
        _took(report),
    ]
    return "\n".join(lines)


def target_text(target: Target) -> str:
    """Returns the target of a conversion as text."""
    if target.kind == "loss":
        return f"{target.value:.2%}"
    return size(target.value) if target.kind == "size" else f"{target.value:g} bits a weight"


def next_steps(report: ConversionReport, out: Path, profiled: bool) -> str:
    """Returns the commands that a user may run after `moeconv quantize`; profile and report need the calibration text.
    `profiled` is true where the pack has its paths already."""
    pack = shlex.quote(str(out))
    routed = "" if report.route is None else f" --tune routing={report.route.kind}"
    named = "" if report.neurons is None else " --tune neurons=predicted"
    steps = [(f'moert run {pack} "some text"{routed}{named}', "runs it"), (f"moert info {pack}", "says what is in it")]
    if (out / CHAT).exists():
        steps.insert(1, (f"moert chat {pack}", "holds a conversation with it"))
    if report.calibration is not None and not profiled:
        steps.append((f"moeconv profile-paths {pack}", "adds what the runtime reads ahead by"))
    if report.calibration is not None:
        steps.append((f"moeconv report {pack}", "writes a page that shows why each expert got its bits"))
    widest = max(len(command) for command, _ in steps)
    return "\n".join(["", "  next:", *(f"    {command:{widest}}   {purpose}" for command, purpose in steps)])


def verified(found: Verified, pack: Path, source: str | None) -> str:
    """Returns the result of `moeconv verify` as text, for a pack that passed the check."""
    if found.worst is None:
        return f"{pack} is whole: {found.files} files with {found.experts} experts are as its manifest says"
    return (
        f"{pack} is whole, and was made from {source}: {found.files} files with {found.experts} experts; the largest "
        f"error is {found.worst:.0%} of what its width allows"
    )


def plan_table(planned: Planned, target: Target, whole_curve: bool) -> str:
    """Returns the result of `moeconv plan` as text: the plan for the target, and with `whole_curve` all others."""
    chosen = planned.chosen
    loss = "" if chosen.predicted_loss is None else f", loss predicted {chosen.predicted_loss:.2%}"
    if chosen.loss is not None:
        loss += f", measured {chosen.loss:.2%}" if loss else f", loss measured {chosen.loss:.2%}"
    aim = "a loss of at most" if target.kind == "loss" else "at most"
    bits, share = 8 * planned.expert_bytes / planned.weights, planned.expert_bytes / planned.int4_bytes
    dense = f", with dense matrices at {width_text(planned.dense)}" if planned.dense else ""
    experts = f"{size(planned.expert_bytes)}, {bits:.2f} bits a weight, {share:.1%} of uniform INT4"
    lines = [f"{planned.model}, quantizer {planned.quantizer}, from what was measured{dense}"]
    wanted = f"  for {aim} {target_text(target)}: "
    if planned.units:
        lines.append(f"{wanted}{size(chosen.nbytes)} {SAVED[planned.purpose]}{loss}")
        lines += [f"  experts: {experts}", *_units(planned.units)]
    else:
        lines.append(f"{wanted}{experts}{loss}")
    if whole_curve:
        reads = ["", read_table(planned.residences)] if planned.residences else []
        weights = 0 if planned.units else planned.weights
        return "\n".join([*lines, "", curve_table(planned.points, weights, planned.int4_bytes), *reads])
    return "\n".join([*lines, f"  --curve shows all {len(planned.points)} plans, size against loss"])


def _units(widths: Mapping[str, int]) -> Iterator[str]:
    """Yields a line for each width of matrices outside the experts, the widest first."""
    for bits in sorted(set(widths.values()), reverse=True):
        named = ", ".join(unit for unit, width in widths.items() if width == bits)
        yield f"  at {bits} bits: {named}"


def curve_table(points: Sequence[CurvePoint], weights: int, int4_bytes: int) -> str:
    """Returns the table of all plans; `weights` is the number of weights in all experts, `int4_bytes` their bytes at
    uniform INT4. 0 weights: sizes are not of the experts alone."""
    promised = any(point.upper is not None for point in points)
    shares = f" {'bits':>6} {'of INT4':>8}" if weights else ""
    lines = [f"  {'size':>10}{shares} {'predicted':>10} {'measured':>9}" + (f" {'upper':>8}" if promised else "")]
    for point in points:
        upper = f" {_percent(point.upper, 2):>8}" if promised else ""
        shares = f" {8 * point.nbytes / weights:>6.2f} {point.nbytes / int4_bytes:>8.1%}" if weights else ""
        lines.append(
            f"  {size(point.nbytes):>10}{shares} "
            f"{_percent(point.predicted_loss, 2):>10} {_percent(point.loss, 2):>9}{upper}"
            + ("  chosen" if point.chosen else "")
        )
    return "\n".join(lines)


def _promise(report: ConversionReport) -> list[str]:
    notes = [f"  note: {line}" for line in (report.standing.notes if report.standing else ())]
    bound = report.upper_bound
    if bound is None or not math.isfinite(bound):
        return notes
    if report.confidence is None:
        return [f"  no promise: more text of the same documents was to lose less than {bound:.2%}", *notes]
    return [f"  at {report.confidence:.0%} the held-out loss was to stay under {bound:.2%}", *notes]


def _dense(report: ConversionReport) -> list[str]:
    dense = report.dense
    if dense is None:
        return []
    lost, alone = dense.alone, ""
    if lost is not None:
        alone = f"; by themselves they lose {_interval(lost)}"
    own = f", and {len(dense.matrices)} matrices with other widths" if dense.matrices else ""
    return [
        f"  dense matrices: {width_text(dense.bits)}{own}{alone}",
        f"  bytes beside the experts: {dense.nbytes:,} = {dense.nbytes / dense.source_nbytes:.1%} of the source's",
    ]


def _scales(report: ConversionReport) -> list[str]:
    found = report.scales
    if found is None:
        return []
    return [
        f"  scales of {found.matrices:,} matrices and {found.norms} norms were trained: {found.nbytes / 1e6:,.2f} MB "
        f"lose {found.after:.2%} with them, {found.before:.2%} without"
    ]


def _route(report: ConversionReport) -> list[str]:
    route = report.route
    if route is None:
        return []
    return [
        f"  routed by a hash function, which by itself loses {_interval(route.alone)}",
        f"  with its own routers the pack loses {_interval(route.routers)} of the held-out text",
    ]


def _neurons(report: ConversionReport) -> list[str]:
    found = report.neurons
    if found is None:
        return []
    return [
        f"  only named neurons are computed, which by itself loses {_interval(found.alone)}",
        f"  named are {found.firing:.1%} of what fires, {found.neurons:.1%} of neurons, {found.blocks:.1%} of blocks "
        f"of {found.per_block}",
        f"  with all neurons the pack loses {_interval(found.exact)} of the held-out text",
    ]


def _interval(found: LossEstimate | RoutedLoss | PredictedLoss) -> str:
    return f"{found.loss:.2%} (95% interval {found.low:+.2%} to {found.high:+.2%})"


def _residences(found: Sequence[Residence], confidence: float | None) -> list[str]:
    lines = []
    for one in found:
        bound = one.upper_bound
        under = "" if bound is None or not math.isfinite(bound) else f", to stay under {bound:.2%}"
        stated = f" at {confidence:.0%}" if under and confidence is not None else ""
        lines.append(
            f"  with {one.share:.0%} of the experts in memory: {one.bytes / 1e3:,.1f} kB a token in place of "
            f"{one.exact_bytes / 1e3:,.1f}; widths and routing lose {one.heldout.loss:.2%} (95% interval "
            f"{one.heldout.low:+.2%} to {one.heldout.high:+.2%}){under}{stated}"
        )
    return lines


def read_table(found: Sequence[Residence]) -> str:
    """Returns the table of bytes that a token reads against the loss, of widths alone and with routing."""
    lines = []
    for one in found:
        lines += [f"  {one.share:.0%} in memory: kB a token, loss, upper bound"]
        for what, points in (("widths alone", one.alone), ("widths and routing", one.together)):
            for point in sorted(points, key=lambda point: point.bytes):
                upper = _percent(point.upper, 2)
                lines.append(f"    {what:18} {point.bytes / 1e3:>10,.1f} {point.loss:>8.2%} {upper:>8}")
    return "\n".join(lines)


def _sweep(report: ConversionReport) -> list[str]:
    cost = report.sweep_cost
    if cost is None or cost.probes == 0:
        return []
    stopped = "" if cost.measured_share == 1 else f", {cost.measured_share:.0%} of the measurements"
    ties = f", {cost.near_ties} outputs hung on a tie" if cost.near_ties else ""
    return [
        f"  sweep: {cost.probes} probes in {cost.seconds:.0f} s{stopped}, {cost.flops / cost.naive_flops:.0%} of the "
        f"operations in experts of full evaluations{ties}"
    ]


def _took(report: ConversionReport) -> str:
    if report.calibration is None:
        return f"  this run {report.seconds:.0f} s until the pack was written"
    return (
        f"  {report.evaluations} plans measured, {report.evaluation_seconds:.0f} s; this run {report.seconds:.0f} s"
        f"{_reused(report)}"
    )


def _reused(report: ConversionReport) -> str:
    seconds = sum(step.reused_seconds for step in report.steps)
    return f", with measurements of earlier runs that had taken {seconds:.0f} s" if seconds else ""


def missed_target(report: ConversionReport) -> str | None:
    """Returns a line if the held-out loss is above the target; else None."""
    if report.heldout is None or report.target.kind != "loss" or report.heldout.loss <= report.target.value:
        return None
    return (
        f"the held-out loss is {report.heldout.loss:.2%}, above the target of {report.target.value:.2%}: the pack "
        "meets the target on its calibration text only; give more of that text, a --confidence or a --tune margin"
    )


def path_table(found: PathFigures, nbytes: int) -> str:
    """Returns the result of `moeconv profile-paths` as text."""
    coverage = ", ".join(f"{stack} {share:.1%}" for stack, share in found.coverage20.items())
    lines = [
        f"{found.tokens:,} tokens profiled, tables and trace of {nbytes:,} bytes",
        f"  the 20% most frequent paths cover: {coverage}",
        f"  held-out tokens that take the likeliest next expert, two layers known: {_percent(found.best_next)}",
        "  share of held-out choices predicted:   top-1    top-2    top-3",
    ]
    for known, row in enumerate(found.accuracy):
        values = [None] * 3 if row is None else row
        name = "1 layer known" if known == 1 else f"{known} layers known"
        lines.append(f"    {name:31}" + "  ".join(f"{_percent(v):>7}" for v in values))
    return "\n".join(lines)


def hash_table(found: HashFigures) -> str:
    """Returns the result of `moeconv train-hash` as text."""
    lines = [
        f"hash function of width {found.width} from {found.tokens:,} tokens, {found.nbytes:,} bytes: {found.share:.1%} "
        "of the pack",
        f"  share of held-out choices (of {found.heldout_tokens:,} tokens) that it names among its",
        f"    {'':12}{f'first {found.top_k}':>10}{f'first {3 * found.top_k}':>10}",
    ]
    if found.routed is not None:
        lines.insert(1, f"  in the routers' place it loses {_interval(found.routed)}")
    lines += [f"    {at!s:12}{first:>10.1%}{more:>10.1%}" for at, (first, more) in found.hits.items()]
    return "\n".join(lines)


def hash_json(found: HashFigures) -> dict[str, object]:
    """Returns the result of `moeconv train-hash` as values of JSON, with layers by their names."""
    hits = {str(at): list(shares) for at, shares in found.hits.items()}
    return {**asdict(replace(found, hits={})), "hits": hits}


def neurons_table(found: NeuronFigures) -> str:
    """Returns the result of `moeconv train-neurons` as text."""
    lines = [
        f"predictor of rank {found.rank} from {found.tokens:,} tokens, {found.nbytes:,} bytes: {found.share:.1%} of "
        "the pack",
        f"  of {found.heldout_tokens:,} held-out tokens it names these shares of firing neurons, of all neurons, and",
        f"  of blocks of {found.per_block} neurons, which are read where one is named",
        f"    {'':12}{'firing':>10}{'neurons':>10}{'blocks':>10}",
    ]
    if found.loss is not None:
        lines.insert(1, f"  computing only these loses {_interval(found.loss)}")
    lines += [
        f"    {at!s:12}{kept.firing:>10.1%}{kept.neurons:>10.1%}{kept.blocks:>10.1%}" for at, kept in found.kept.items()
    ]
    return "\n".join(lines)


def neurons_json(found: NeuronFigures) -> dict[str, object]:
    """Returns the result of `moeconv train-neurons` as values of JSON, with layers by their names."""
    return {**asdict(replace(found, kept={})), "kept": {str(at): kept._asdict() for at, kept in found.kept.items()}}


def _percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}%}"


def _measured_lines(name: str, measured: LossEstimate) -> list[str]:
    interval, tokens = f"{measured.low:+.2%} to {measured.high:+.2%}", measured.per_token()
    return [
        f"  {name:12} {measured.reference:>10.4f} {measured.value:>10.4f} {measured.loss:>8.2%}   {interval:18}  "
        f"{measured.samples}",
        *([] if tokens is None else [f"  {'  per token':12} {tokens[0]:>10.4f} {tokens[1]:>10.4f}"]),
    ]


def _share(sizes: Mapping[str, int], name: str) -> str:
    return f"{sizes['pack'] / sizes[name]:.1%}"
