"""The rows of a layer that a changed expert moves, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moeconv.artifacts import Probe
from moeconv.measure.trial import Trial
from moeconv.source.experts import Call


@dataclass(frozen=True)
class Change:
    """Probe number `probe` adds `delta` [rows, d_model] to the layer's output at (sequence, position) of each row;
    rows are sorted by sequence. `sequences` are those with any such row, `first` the first changed position in each."""

    probe: int
    sequence: Tensor  # [rows]
    position: Tensor  # [rows]
    delta: Tensor  # [rows, d_model]
    sequences: Tensor  # [changed]
    first: Tensor  # [changed]

    def rows_in(self, sequence: int) -> slice:
        start, stop = torch.searchsorted(self.sequence, torch.tensor([sequence, sequence + 1])).tolist()
        return slice(start, stop)


def changes(trial: Trial, call: Call, width: int, probes: Sequence[Probe]) -> list[Change]:
    """`call` is what the base asked of the layer, over sequences of `width` tokens each."""
    base_outputs: dict[int, Tensor] = {}
    add = trial.spec.stacks[probes[0].key.stack][probes[0].key.layer].ffn_join.add
    found = []
    for number, probe in enumerate(probes):
        rows, slot = (call.chosen == probe.key.expert).nonzero(as_tuple=True)
        x = call.x[rows]
        if probe.key.expert not in base_outputs:
            base_outputs[probe.key.expert] = trial.calls.ffn(probe.key, x, trial.calls.weights(probe.key))
        delta = trial.calls.ffn(probe.key, x, trial.weights(probe.key, probe.bits)) - base_outputs[probe.key.expert]
        sequence, position = rows // width, rows % width
        sequences, counts = torch.unique_consecutive(sequence, return_counts=True)
        first = position[counts.cumsum(0) - counts]
        found.append(
            Change(number, sequence, position, delta * (add * call.weights[rows, slot, None]), sequences, first)
        )  # fmt: skip
    return found


@dataclass(frozen=True)
class Pairs:
    """A batch of (probe, sequence) pairs and the first changed position of each. All [pairs]."""

    probe: Tensor
    sequence: Tensor
    first: Tensor

    def __len__(self) -> int:
        return len(self.probe)

    def listed(self) -> Iterator[tuple[int, int]]:
        """(probe, sequence) of each."""
        return zip(self.probe.tolist(), self.sequence.tolist(), strict=True)


def pairs_of(found: Sequence[Change], most: int) -> list[Pairs]:
    """Every (probe, sequence) pair in batches of at most `most`, pairs of one sequence beside each other."""
    if not any(len(change.sequences) for change in found):
        return []
    probe = torch.cat([torch.full_like(change.sequences, change.probe) for change in found])
    sequence = torch.cat([change.sequences for change in found])
    first = torch.cat([change.first for change in found])
    order = sequence.argsort(stable=True)
    return [Pairs(probe[part], sequence[part], first[part]) for part in torch.split(order, max(1, most))]


def entering(after: Tensor, pairs: Pairs, found: Sequence[Change]) -> Tensor:
    """Hidden states that leave the changed layer. `after` [sequences, tokens, d_model] → [pairs, tokens, d_model]."""
    hidden = after[pairs.sequence]
    for row, (probe, sequence) in enumerate(pairs.listed()):
        rows = found[probe].rows_in(sequence)
        hidden[row].index_add_(0, found[probe].position[rows], found[probe].delta[rows])
    return hidden


def changed_rows(pairs: Pairs, found: Sequence[Change], width: int) -> Tensor:
    """Which rows the changed expert moves itself. [pairs, tokens]"""
    changed = torch.zeros((len(pairs), width), dtype=torch.bool)
    for row, (probe, sequence) in enumerate(pairs.listed()):
        changed[row, found[probe].position[found[probe].rows_in(sequence)]] = True
    return changed
