"""What each expert of an encoder-decoder model costs, by gradients: `fisher` and `scales` for pairs of texts.

The decoder reads each sample's target, as it does where divergences are measured one expert at a time. Gradients go
back through the decoder, and through its attention to the input into the encoder, so that experts of both stacks are
beside each other. The model is in memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeconv.artifacts import Bits, uniform
from moeconv.measure.journal import Journal, identity
from moeconv.measure.passes import token_bytes
from moeconv.measure.scorers.generated import Bucket, GeneratedScorer
from moeconv.measure.trial import Trial
from moeconv.progress import Bar
from moeconv.quantizers.coder import ORIGINAL
from moeconv.source.archs.errors import transformers_model
from moeconv.source.experts import Call
from moeconv.sweep.fisher import Costs, LayerCosts, Totals, chance_of, drawn, layer_costs
from moeconv.sweep.scales import Measured
from moert.pack.model_spec import LayerKey, ModelSpec

SCALE_TOKENS = 2048  # of targets, that whole layers are measured on


@dataclass(frozen=True)
class Part:
    """Samples that go through the model together: their places in the scorer's items, [rows, tokens] of their inputs,
    where these are real, and of their targets, below 0 where there is none."""

    items: list[int]
    inputs: Tensor
    mask: Tensor
    targets: Tensor

    @property
    def real(self) -> Tensor:
        return self.targets >= 0


class PairGradients:
    """A pass forth and back through a model in memory, for as many samples at once as fit `batch_bytes`. `patterns` are
    those of Totals."""

    def __init__(
        self, trial: Trial, scorer: GeneratedScorer, patterns: Sequence[Bits], draws: int, seed: int, batch_bytes: int
    ) -> None:
        self.trial, self.model, self.patterns, self.draws, self.seed = trial, scorer.model, patterns, draws, seed
        most = batch_bytes // _token_bytes(trial.spec, draws)
        self.parts = [part for bucket in scorer.buckets for part in _parts(scorer, bucket, most)]

    def run(self, journal: Journal, about: str, bar: Bar) -> Costs:
        """Part by part; a run that was killed goes on with the first that it lacks."""
        name = identity(about, "gradients of pairs", self.draws, self.seed, [list(bits) for bits in self.patterns])
        found = []
        for part in self.parts:
            found.append(journal.remember(identity(name, part.items), partial(self._measured, part)))
            bar.update(1)
        with journal.believed():
            layers = {at: _sum([entry["layers"][str(at)] for entry in found]) for at in self.trial.spec.moe_layers()}
            return Costs(layers, sum(entry["flops"] for entry in found), sum(entry["seconds"] for entry in found))

    def _measured(self, part: Part) -> dict[str, Any]:
        calls, started = self.trial.calls, time.perf_counter()
        rows = calls.rows
        self.trial.original_experts()
        asked: dict[LayerKey, tuple[Call, Tensor]] = {}

        def answer(at: LayerKey, call: Call) -> Tensor:
            given = calls.given(at, call)
            mark = torch.zeros_like(given).requires_grad_()
            asked[at] = Call(call.x.detach(), call.chosen, call.weights.detach()), mark
            return given + mark

        with torch.enable_grad(), calls.answering(answer), transformers_model(self.trial.checkpoint.path):
            encoded = self.model.encode({"input_ids": part.inputs}, part.mask)
            fed = {"input_ids": self.model.fed(part.targets)}
            final = self.model.decode(fed, part.real, encoded, part.mask)
        marks = [mark for _, mark in asked.values()]
        back = [torch.autograd.grad(final, marks, above, retain_graph=True) for above in self._above(part, final)]
        calls.rows += self.draws * (calls.rows - rows)
        layers = {}
        for place, (at, (call, _)) in enumerate(asked.items()):
            layers[str(at)] = self._costs(at, call, torch.stack([each[place] for each in back]), len(part.items))
        spent = {"flops": calls.flops(calls.rows - rows), "seconds": round(time.perf_counter() - started, 4)}
        return {"layers": layers, **spent}

    def _above(self, part: Part, final: Tensor) -> Iterator[Tensor]:
        """Gradients at the last states [rows, tokens, d_model], of each draw."""
        found = torch.zeros(self.draws, *final.shape)
        for row, item in enumerate(part.items):
            real = part.real[row]
            hidden = final[row][real]
            for draw, gradient in enumerate(drawn(self.model.head, hidden, self.draws, chance_of(self.seed, item))):
                found[draw, row, real] = gradient
        return iter(found)

    def _costs(self, at: LayerKey, call: Call, gradients: Tensor, texts: int) -> dict[str, Any]:
        """Of one layer's experts; gradients [draws, tokens, d_model] at what they give."""
        calls, totals = self.trial.calls, Totals(self.trial.calls, self.trial.coder, self.patterns)
        totals.code(at)
        text = torch.arange(texts).repeat_interleave(len(call.x) // texts)
        for number in torch.unique(call.chosen[call.chosen >= 0]).tolist():
            key = at.expert(number)
            token, place = (call.chosen == number).nonzero(as_tuple=True)
            x, at_given = call.x[token], gradients[:, token] * call.weights[token, place][:, None]
            totals.add(key, x, calls.ffn(key, x, calls.weights(key)), at_given, text[token])
        return totals.found()


class PairScales:
    """What all experts of a layer cost together, measured with the samples of the scorer, whose metric must not
    generate. `patterns` are the widths that they get at once."""

    def __init__(self, trial: Trial, scorer: GeneratedScorer, patterns: Sequence[Bits]) -> None:
        self.trial, self.scorer, self.patterns = trial, scorer, patterns

    def run(self, journal: Journal, about: str, bar: Bar) -> Measured:
        """Layer by layer; a run that was killed goes on with the first that it lacks. Raises ConversionError."""
        name = identity(about, "scales of pairs", self.scorer.n_samples, [list(bits) for bits in self.patterns])
        found = {}
        for at in self.trial.spec.moe_layers():
            found[at] = journal.remember(identity(name, str(at)), partial(self._measured, at))
            bar.update(1)
        with journal.believed():
            nats = {at: tuple(entry["nats"]) for at, entry in found.items()}
            spent = [sum(entry[what] for entry in found.values()) for what in ("flops", "seconds")]
            return Measured(nats, *spent)

    def _measured(self, at: LayerKey) -> dict[str, Any]:
        calls, started = self.trial.calls, time.perf_counter()
        rows = calls.rows
        with transformers_model(self.trial.checkpoint.path):
            if self.scorer.reference is None:
                self.trial.original_experts()
                self.scorer.score(as_reference=True)
            nats = [self._together(at, bits) for bits in self.patterns]
        spent = {"flops": calls.flops(calls.rows - rows), "seconds": round(time.perf_counter() - started, 4)}
        return {"nats": nats, **spent}

    def _together(self, at: LayerKey, bits: Bits) -> float:
        spec = self.trial.spec
        here = {at.expert(number): bits for number in range(spec.moe.n)}
        self.trial.assign({**uniform(spec, ORIGINAL), **here})
        return float(self.scorer.score().kls.sum())


def narrower(patterns: Sequence[Bits]) -> list[Bits]:
    """What layers are measured at: the patterns below the base, or the base where there is none."""
    return [bits for bits in patterns[1:] if max(bits) <= max(patterns[0])] or [patterns[0]]


def scaled_as_one(
    costs: LayerCosts, patterns: Sequence[Bits], measured: Sequence[float], share: float
) -> list[list[float]]:
    """Nats above the base of each pattern and expert. `measured` is what the layer costs at each of the `narrower`
    patterns, on a `share` of the text.

    One factor for all widths of a layer, and no base taken away: on hundreds of short texts what a layer costs hangs on
    few tokens that routers behind it send elsewhere, at 4 bits hardly less than at 2. Ranks of g2p's experts at 2 and
    3 bits, beside an exact sweep of six times as many texts: a factor for each width 0.58 and 0.30, no factor 0.67 and
    0.41, this one 0.67 and 0.46.
    """
    asked = narrower(patterns)
    rows = [row for bits, row in zip(patterns, costs.costs, strict=True) if bits in asked]
    if asked == [patterns[0]]:
        rows = [tuple(-cost for cost in costs.costs[-1])]  # about what the base costs
    together = share * sum(map(sum, rows))
    factor = sum(measured) / together if together * sum(measured) > 0 else 1.0
    return [[cost * factor for cost in row] for row in costs.costs]


def _parts(scorer: GeneratedScorer, bucket: Bucket, most_tokens: int) -> Iterator[Part]:
    """A bucket's samples in parts of so many tokens, or of one sample; of choices only the right one."""
    right = torch.from_numpy(scorer.items.right[bucket.items].copy()).nonzero()[:, 0]
    width = bucket.inputs.shape[1] + bucket.targets.shape[1]
    for items in torch.split(right, max(1, most_tokens // width)):
        rows = bucket.of_row[items]
        yield Part(
            (items + bucket.items.start).tolist(), bucket.inputs[rows], bucket.mask[rows], bucket.targets[items]
        )  # fmt: skip


def _token_bytes(spec: ModelSpec, draws: int) -> int:
    """What a token takes at most until its batch has gone back: its states in every layer of a stack, and its gradients
    there, of all draws."""
    return max(map(len, spec.stacks.values())) * (token_bytes(spec) + 4 * draws * spec.d_model)


def _sum(entries: Sequence[Mapping[str, Any]]) -> LayerCosts:
    """Of all parts."""
    rows = torch.tensor([entry["rows"] for entry in entries]).sum(0)
    costs = torch.tensor([entry["costs"] for entry in entries], dtype=torch.float64).sum(0)
    return layer_costs({"rows": rows.tolist(), "costs": costs.tolist()})
