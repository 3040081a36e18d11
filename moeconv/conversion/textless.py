"""Widths without text: one for all experts, or for a size those that change the weights least. No loss is measured."""

from __future__ import annotations

from moeconv.artifacts import Assignment, uniform
from moeconv.conversion.account import Account
from moeconv.conversion.coding import Coding
from moeconv.conversion.settings import Settings
from moeconv.plan import plan_within
from moeconv.plan.problem import Option, Problem, Unit, layout_bytes, options
from moeconv.plan.question import budget_bytes, check_budget, uniform_bytes
from moeconv.quantizers.alone import squared_errors
from moeconv.source.ahead import read_ahead
from moert.pack.tensors import TOKENIZER


def textless_widths(settings: Settings, coding: Coding, account: Account) -> Assignment:
    """Raises TargetMissed for a size that no widths have; CheckpointError or WeightsUnusable."""
    path = coding.checkpoint.path
    if not (path / TOKENIZER).is_file() and coding.checkpoint.spelled is None:
        account.say(f"note: {path} has no {TOKENIZER}: the pack can't be run on text")
    if settings.bits != (16,):
        account.note("no text was given: what the pack loses was not measured, and nothing is promised")
    if settings.target.kind == "loss":
        return uniform(coding.spec, settings.bits[0])
    return _by_weights(settings, coding, account)


def _by_weights(settings: Settings, coding: Coding, account: Account) -> Assignment:
    """The least squared error of all weights in sum, in the size that was asked for."""
    spec, widths = coding.spec, sorted(settings.bits)
    check_budget(settings.target, spec, min(widths), coding.storage)
    budget = budget_bytes(settings.target, spec)
    assert budget is not None, "a loss needs text"
    names, nbytes, coder = spec.moe.ffn.projections, layout_bytes(spec, coding.storage), coding.experts(None)
    sizes = {bits: sum(nbytes(name, bits) for name in names) for bits in widths}
    units, keys = {}, spec.expert_keys()
    with account.progress("what widths do to weights", len(keys), "expert") as bar:
        for key in read_ahead(keys, coding.checkpoint.touch):
            found = squared_errors(coder, key, widths)
            units[Unit(key, tuple(range(len(names))))] = options(
                Option(bits, sizes[bits], found[bits]) for bits in widths
            )
            bar.update(1)
    largest = uniform_bytes(spec, max(widths), coding.storage)
    return plan_within(Problem(units), settings.allocation, min(budget, largest)).assignment
