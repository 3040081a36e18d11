"""Lines on what a promise rests on: how much text, how often it was used, which experts it never reached."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moeconv.artifacts import LEAST_SEEN, SensitivityTable, Standing
from moeconv.calibration import RANKING_SHARE
from moeconv.promise.bound import Needed
from moeconv.promise.evidence import Evidence, least, least_heldout
from moeconv.promise.judging import Judge

NAMED = 8  # experts that a line names; the report's page has all of them


def standing(judge: Judge, looks: int, notes: Sequence[str]) -> Standing:
    """What the report keeps of this."""
    asked, evidence = judge.confidence, judge.evidence
    return Standing(
        asked, evidence.count, round(evidence.number, 2), len(set(evidence.heldout.tolist())),
        None if asked is None else least(asked), None if asked is None else least_heldout(asked), looks, tuple(notes),
    )  # fmt: skip


def looks_text(looks: int, stated: float | None) -> str | None:
    """None for the first look."""
    if looks == 1:
        return None
    text = f"conversion {looks} of this model that is judged on this text, as the work directory counts them"
    if stated is None:
        return f"{text}: the best of several looks better than it is"
    together = max(0.0, 1 - looks * (1 - stated))
    return (
        f"{text}: each promise holds at {stated:.0%} by itself, all {looks} together at {together:.0%} or more; choose "
        "among them by size and not by loss, or measure the chosen one on other text"
    )


def bound_doubt(bound: float | None, high: float) -> str | None:
    """Returns a line for a bound that is none, or a loss whose interval lies below zero up to `high`."""
    if bound is None or (math.isfinite(bound) and high >= 0):
        return None
    if not math.isfinite(bound):
        return "from so few samples no bound of the loss can be told, so nothing is promised: give more text"
    return (
        f"the loss is negative (95% interval up to {high:.2%}): the pack scores better than the unquantised model, "
        "which quantising does not explain; this text says little about the model, so measure on text that it is for"
    )


def unreached_text(table: SensitivityTable) -> str | None:
    """A line on the experts that the ranking text hardly reached."""
    unseen = table.barely_seen()
    if not unseen:
        return None
    more = f" and {len(unseen) - NAMED} more (the report names all)" if len(unseen) > NAMED else ""
    named = ", ".join(map(str, unseen[:NAMED]))
    return (
        f"{len(unseen)} of {len(table.coverage)} experts saw fewer than {LEAST_SEEN} tokens of the ranking text: "
        f"{named}{more}; they are planned as if they cost no less than the middle expert of their layer: more text "
        "would say"
    )


def needed_text(needed: Needed, used: Evidence, promised: str, share: float = 1 - RANKING_SHARE) -> str:
    """A line on text that is little for the promise. `promised` is the loss and its confidence, `share` what part of
    the calibration text plans are judged on."""
    if needed.both is None:
        more = "from so few no bound can be told"
    elif needed.acceptance is None:
        more = f"{needed.both:,} of each would do"
    else:
        more = f"{needed.acceptance:,} of the former would do"
    what = "documents" if used.is_grouped else "samples"
    return (
        f"{needed.have} calibration {what} to judge plans by ({share:.0%} of the text, at most --samples) "
        f"and {used.heldout_number:.0f} held-out ones are few to promise {promised}: {more}; with these the pack will "
        "be larger than it needs to be, or no plan is accepted"
    )
