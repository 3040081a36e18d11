"""What is measured before the sweep: the matrices outside the experts alone, and all experts at one width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeconv.artifacts import uniform
from moeconv.conversion.account import Account
from moeconv.conversion.bench import Bench
from moeconv.errors import TargetMissed
from moeconv.measure.evaluation import Evaluation
from moeconv.promise.judging import Judge, estimate
from moeconv.promise.standing import needed_text
from moeconv.quantizers.coder import ORIGINAL
from moeconv.quantizers.dense_bits import width_text
from moert.pack.manifest import LossEstimate


@dataclass(frozen=True)
class Widths:
    """`probed` are those that single experts may get, `tried` the evaluations of all experts at one width."""

    probed: Sequence[int]
    tried: Mapping[int, Evaluation]


def dense_alone(bench: Bench, judge: Judge, account: Account) -> LossEstimate | None:
    """What quantising the matrices outside the experts loses by itself; None without --dense-bits. Raises TargetMissed
    where that alone misses the target."""
    if bench.coding.dense_widths is None:
        return None
    settings, widths = bench.settings, width_text(bench.coding.dense_widths.bits)
    with account.step("dense matrices", bench.journal):
        evaluation = judge.measure(uniform(bench.spec, ORIGINAL), "dense matrices alone")
        found = estimate(judge.measure, evaluation, judge.used.acceptance, settings.seed)
    account.say(
        f"dense matrices at {widths}, experts unquantised: loss {found.loss:.2%} (95% interval {found.low:+.2%} to "
        f"{found.high:+.2%})"
    )
    if settings.target.kind == "loss" and not judge.holds(evaluation):
        raise TargetMissed(
            f"with unquantised experts and the dense matrices at {widths}: {judge.text(evaluation)}; the target of "
            f"{judge.planned_loss:.2%} is missed before any expert is quantised: "
            f"{_advice(judge, evaluation, 'give wider --dense-bits')}, or a larger --loss"
        )
    return found


def widths_worth_probing(bench: Bench, judge: Judge, account: Account) -> Widths:
    """Those up to the first at which all experts together meet the target, and one more. An unreachable target, or too
    little text for the promise, is said here, before the long sweep. Raises TargetMissed."""
    widths, tried = sorted(bench.settings.bits), dict[int, Evaluation]()
    if bench.settings.target.kind != "loss":
        return Widths(widths, tried)
    with account.step("uniform widths", bench.journal):
        for width in widths:
            last = tried[width] = judge.measure(uniform(bench.spec, width), f"all at {width}")
            account.say(f"all experts at {width:2d} bits: {judge.text(last)}")
            if judge.holds(last):
                break
    account.note(judge.counted_text())
    if judge.holds(last) and len(tried) == 1:
        return Widths(widths[:1], tried)  # nothing can be smaller
    _say_if_too_little(judge, list(tried.values()), bench.material.judged_share, account)
    if not judge.holds(last):
        advice = _advice(judge, last, "allow wider experts with --bits")
        raise TargetMissed(
            f"with all experts at {widths[-1]} bits: {judge.text(last)}; the target of "
            f"{judge.planned_loss:.2%} is missed: {advice}, or a larger --loss"
        )
    return Widths(widths[: len(tried) + 1], tried)  # single experts may still want more than all together


def _say_if_too_little(judge: Judge, tried: Sequence[Evaluation], share: float, account: Account) -> None:
    needed, stated = judge.needed(tried), judge.stated
    if needed is not None and stated is not None:
        promised = f"{judge.planned_loss:.2%} at {stated:.0%}"
        account.say(f"note: {needed_text(needed, judge.counted, promised, share)}")


def _advice(judge: Judge, missed: Evaluation, wider: str) -> str:
    """Advice where this evaluation misses the target: more text if only its bound does, else `wider`."""
    only_bound = judge.loss(missed) <= judge.planned_loss
    return "give more text, or ask for less --confidence" if only_bound else wider
