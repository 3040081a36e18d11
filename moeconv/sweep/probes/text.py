"""Probes on running text and on choices, for decoder-only models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from moeconv.artifacts import Probe
from moeconv.measure.scorers import Scores
from moeconv.measure.scorers.text import TextScorer
from moeconv.measure.trial import Trial
from moeconv.source.experts import Call, Substitute
from moeconv.sweep.probes import Found
from moeconv.sweep.probes.changes import Change, Pairs, changed_rows, changes, entering, pairs_of
from moert.pack.model_spec import LayerKey

BATCH_TOKENS = 8192
Leaving = Callable[[Tensor, Pairs], Tensor]
"""(what leaves the changed layer in the base, pairs) → what leaves it in each pair. [pairs, tokens, d_model]"""


class TextProber:
    """Positions are compared with `first`: nothing before the first changed row of a window can differ."""

    def __init__(self, trial: Trial, scorer: TextScorer) -> None:
        self.trial = trial
        self.scorer = scorer
        self.texts = scorer.texts
        self.n_layers = scorer.stack.n_layers
        flat = torch.cumsum(self.texts.scored.flatten(), 0).view(self.texts.scored.shape) - 1
        self._reference_row = flat  # where a scored place's row is in the scorer's reference

    @torch.inference_mode()
    def prepare(self) -> Scores:
        self.after: list[Tensor] = []
        self.calls: dict[LayerKey, Call] = {}
        outputs: list[list[Tensor]] = [[] for _ in range(self.n_layers)]
        parts, finals = [], []
        for batch in self.scorer.batches():
            with self.trial.calls.recording() as seen:
                final = self.scorer.run(batch, lambda layer, hidden: outputs[layer].append(hidden))
            finals.append(final[self.texts.scored[batch]])
            parts.append(seen)
        # what is joined is let go of, layer by layer: all of it twice would be twice what `kept_bytes` says
        while outputs:
            self.after.append(torch.cat(outputs.pop(0)))
        for place in list(parts[0]):
            self.calls[place] = _joined([part.pop(place) for part in parts])
        scored = self.texts.scored
        nats, kls = self._judge(torch.cat(finals), *scored.nonzero(as_tuple=True))
        self.nats, self.kls = torch.zeros((2, *scored.shape), dtype=torch.float64)
        self.nats[scored], self.kls[scored] = nats, kls
        return self.scorer.scores_of(self.nats.sum(dim=1), self.kls.sum(dim=1))

    def rows_of(self) -> dict[LayerKey, list[int]]:
        return {place: call.rows(self.trial.spec.moe.n).tolist() for place, call in self.calls.items()}

    @torch.inference_mode()
    def probe(self, probes: Sequence[Probe]) -> list[Found]:
        rows_before = self.trial.calls.rows
        key = probes[0].key
        adds = self.trial.spec.decoder[key.layer].adds_experts
        found = changes(self.trial, self.calls[key.at], self.texts.ids.shape[1], probes)
        nats = self.nats.sum(dim=1).repeat(len(probes), 1)  # [probes, windows]
        kls = self.kls.sum(dim=1).repeat(len(probes), 1)
        for pairs in pairs_of(found, BATCH_TOKENS // self.texts.ids.shape[1]):
            leaving = partial(entering, found=found) if adds else partial(self._leaving, key.at, probes)
            self._measure(key.layer, pairs, found, leaving, nats, kls)
        flops = self.trial.calls.flops(self.trial.calls.rows - rows_before) // len(probes)
        return [
            Found(probe, self.scorer.scores_of(nats[number], kls[number]), flops, 0)
            for number, probe in enumerate(probes)
        ]

    def _leaving(self, at: LayerKey, probes: Sequence[Probe], after: Tensor, pairs: Pairs) -> Tensor:
        """What leaves a layer that does more with its experts' outputs than to add them: run anew."""
        weights = [self.trial.weights(probe.key, probe.bits) for probe in probes]
        experts = torch.tensor([probe.key.expert for probe in probes])
        left: list[Tensor] = []

        def stop(layer: int, hidden: Tensor) -> None:
            if layer == at.layer:
                left.append(hidden)

        inputs = {"input_ids": self.texts.ids[pairs.sequence]}
        if at.layer:
            inputs = {"inputs_embeds": self.after[at.layer - 1][pairs.sequence]}
        with self.trial.calls.only(None, Substitute(at, pairs.probe, experts, weights)):
            self.scorer.stack.run(inputs, at.layer, stop)
        changed = torch.arange(left[0].shape[1]) >= pairs.first[:, None]
        return torch.where(changed[:, :, None], left[0], after[pairs.sequence])

    def _measure(
        self, layer: int, pairs: Pairs, found: list[Change], leaving: Leaving, nats: Tensor, kls: Tensor
    ) -> None:
        positions = torch.arange(self.texts.ids.shape[1])
        active = (positions >= pairs.first[:, None]) & self.texts.real[pairs.sequence]

        def keep_the_rest(at: int, hidden: Tensor) -> Tensor:
            return torch.where(active[:, :, None], hidden, self.after[at][pairs.sequence])

        hidden = leaving(self.after[layer], pairs)
        with self.trial.calls.only(active):
            final = self.scorer.stack.run({"inputs_embeds": hidden}, layer + 1, keep_the_rest)
        # nothing attends to what leaves the last layer: there, only the changed rows themselves differ
        where = changed_rows(pairs, found, active.shape[1]) if layer == self.n_layers - 1 else active
        self._replace(pairs, where & self.texts.scored[pairs.sequence], final, nats, kls)

    def _replace(self, pairs: Pairs, where: Tensor, final: Tensor, nats: Tensor, kls: Tensor) -> None:
        """Puts what is computed anew at `where` [pairs, tokens] in the place of the base's, in sums over windows."""
        row, position = where.nonzero(as_tuple=True)
        new_nats, new_kls = self._judge(final[where], pairs.sequence[row], position)
        for sums, base, new in ((nats, self.nats, new_nats), (kls, self.kls, new_kls)):
            values = base[pairs.sequence]
            values[where] = new
            sums[pairs.probe, pairs.sequence] = values.sum(dim=1)

    def _judge(self, hidden: Tensor, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Nats and divergences [rows] of final states [rows, d_model] at these places."""
        reference = self.scorer.reference
        here = None if reference is None else reference[self._reference_row[sequence, position]]
        nats, kls = self.scorer.head.judge(hidden, self.texts.ids[sequence, position + 1], here)
        return nats.double(), kls.double()


def _joined(calls: list[Call]) -> Call:
    """The calls of all batches as one."""
    return Call(*(torch.cat([getattr(call, name) for call in calls]) for name in Call.__annotations__))
