"""The sensitivity of each expert from gradients: every expert at every width in a few passes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from moeconv.artifacts import Bits, uniform
from moeconv.measure.passes import LayeredModel, Leaving, Passage, token_bytes
from moeconv.measure.scorers import Head
from moeconv.measure.scoring import Bucket, GeneratedScorer, Seq2Seq, Texts, spread
from moeconv.measure.trial import Trial
from moeconv.measure.workdir import Journal, identity
from moeconv.progress import Bar
from moeconv.quantizers.coder import ORIGINAL, ExpertCoder, batches
from moeconv.source.archs import Family
from moeconv.source.archs.config import transformers_model
from moeconv.source.experts import Call, ExpertCalls, Weights, expert_ffn
from moeconv.source.skeleton import by_layers
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec

# The measured cost of all experts of a layer together at a width: it sets the scale of their costs by gradients.
# From the states that enter a layer on, some windows go through the rest of the model once for each width, the
# variants of all layers side by side, so that every layer is read once.

WINDOWS = 8


@dataclass(frozen=True)
class Measured:
    """The nats of each layer with experts and each pattern, summed over the windows; and the operations in expert rows
    and the time that they took."""

    nats: Mapping[LayerKey, tuple[float, ...]]
    flops: int
    seconds: float


class LayerScales:
    """The measurement of whole layers; `patterns` are the widths that all experts of a layer get at once."""

    def __init__(self, model: LayeredModel, texts: Texts, patterns: Sequence[Bits], windows: int = WINDOWS) -> None:
        self.model, self.patterns = model, patterns
        self.places = torch.tensor(spread(len(texts.ids), windows))
        self.texts, self.all_ids = texts.select(self.places.tolist()), texts.ids
        self.n_layers = len(model.skeleton.layers)
        self.at_work = model.spec.moe_layers("decoder")
        self._places = [model.family.place(one.layer) for one in self.at_work]

    def run(self, journal: Journal, about: str, bar: Bar) -> Measured:
        """Returns the measured costs of layers; a pass of all of the text must have kept its states. Raises
        ConversionError."""
        name = identity(about, "scales", self.places.tolist(), [list(bits) for bits in self.patterns])

        def measured() -> dict[str, Any]:
            calls, started = self.model.calls, time.perf_counter()
            rows = calls.rows
            nats = self._measured(name, bar)
            return {"nats": nats, "flops": calls.flops(calls.rows - rows), "seconds": time.perf_counter() - started}

        entry = journal.remember(name, measured)
        with journal.believed():
            nats = dict(zip(self.at_work, map(tuple, entry["nats"]), strict=True))
            return Measured(nats, entry["flops"], entry["seconds"])

    @torch.inference_mode()
    def _measured(self, name: str, bar: Bar) -> list[list[float]]:
        model, many = self.model, len(self.places)
        model.original_experts()
        states = model.passage(self.all_ids, keeps=True)
        count = len(self.at_work) * len(self.patterns)
        folder = model.room.folder / "scales" / name[:16]
        moving = Passage(folder, (count * many, *states.shape[1:]), other=states.other)
        bar.update(moving.reached)
        for at in range(moving.reached, self.n_layers):
            with moving.leaving(at + 1) as left:
                if at:
                    self._go_on(moving, at, left)
                self._set_out(states, at, left)
            bar.update(1)
        found = self._judged(states, moving)
        moving.remove()
        return found

    def _variants(self, at: int) -> list[int]:
        """Returns the first rows of the variants that set out at a layer."""
        before = sum(place < at for place in self._places) * len(self.patterns)
        here = len(self.patterns) if at in self._places else 0
        return [(before + number) * len(self.places) for number in range(here)]

    def _go_on(self, moving: Passage, at: int, left: Leaving) -> None:
        """Sends the variants that set out at earlier layers through this one, with unquantized experts."""
        rows = sum(place < at for place in self._places) * len(self.patterns) * len(self.places)
        if not rows:
            return
        self.model.original_experts()
        ids, real = (part.repeat(rows // len(self.places), 1) for part in (self.texts.ids, self.texts.real))
        with self.model.ready(at):
            for batch in self.model.batches(ids):
                hidden, final = self.model.step(moving, at, ids, real, batch)
                left[batch] = final if at + 1 == self.n_layers else hidden

    def _set_out(self, states: Passage, at: int, left: Leaving) -> None:
        """Sends the windows through the layer with all of its experts at each pattern of widths."""
        for start, bits in zip(self._variants(at), self.patterns, strict=False):
            widths = uniform(self.model.spec, ORIGINAL) | {
                key: bits
                for key in self.model.spec.expert_keys()
                if key.stack == "decoder" and self.model.family.place(key.layer) == at
            }
            self.model.assign(widths)
            with self.model.ready(at):
                for batch in self.model.batches(self.texts.ids):
                    entering = states.entering(at)[self.places[batch]] if at else None
                    hidden, final = self.model.step(states, at, self.texts.ids, self.texts.real, batch, entering)
                    left[start + batch] = final if at + 1 == self.n_layers else hidden

    def _judged(self, states: Passage, moving: Passage) -> list[list[float]]:
        scored, targets = self.texts.scored, self.texts.targets()[self.texts.scored]
        ends, many = moving.entering(self.n_layers), len(self.places)
        with self.model.head() as head:
            reference = head.reference(states.entering(self.n_layers)[self.places][scored])
            nats = [
                float(head.judge(ends[start : start + many][scored], targets, reference)[1].double().sum())
                for start in range(0, len(ends), many)
            ]
        width = len(self.patterns)
        return [nats[start : start + width] for start in range(0, len(nats), width)]


# The cost of each expert at every width, from one forward and a few backward passes: the Fisher form of the
# divergence.
# For a small change d_t of an expert's output for token t, the divergence of all later predictions is 1/2
# E[(sum_t G_t . d_t)^2], with G the gradient of sum_s log p(y_s) at the output of that layer's experts, and y drawn
# from the model's own distribution. Here d_t = p_t (FFN_q(x_t) - FFN(x_t)), p the router's weight. Sums go over the
# tokens of one text (a window, or a target and the input to it); texts add up. No gradient sees that routers of later
# layers would choose other experts: LayerScales measures that. `Gradients` goes through a model layer by layer,
# `PairGradients` through models that read one text and write another.

DRAWS = 16
_STATES_A_DRAW = (
    6  # gradients of all streams' numbers, alive at once for a token and a draw while a layer is gone back through
)


def have_gradients(family: Family, spec: ModelSpec) -> bool:
    """Returns whether gradients can go back through a model: by its layers, or in memory through both of its
    stacks."""
    return spec.encoder is not None or by_layers(family, spec)


@dataclass(frozen=True)
class LayerCosts:
    """The costs of one layer's experts: tokens that each expert saw [experts], and nats above the base, summed over all
    texts, for each pattern of widths [patterns][experts]."""

    rows: tuple[int, ...]
    costs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Costs:
    """The costs of all layers with experts, and the operations in expert rows and the time that they took."""

    layers: Mapping[LayerKey, LayerCosts]
    flops: int
    seconds: float


class Totals:
    """The costs of the experts of one layer, added up. `patterns` are the widths that each expert is tried at, alone;
    costs count from the first one, the base. `rows` [experts], `nats` [patterns, experts]."""

    def __init__(self, calls: ExpertCalls, coder: ExpertCoder, patterns: Sequence[Bits]) -> None:
        self.calls, self.coder, self.patterns = calls, coder, patterns
        self.rows = torch.zeros(calls.spec.moe.n, dtype=torch.long)
        self.nats = torch.zeros(len(patterns), calls.spec.moe.n, dtype=torch.float64)

    def code(self, at: LayerKey) -> None:
        """Codes all experts of the layer together, which takes less time than one by one, unless kept codes exist."""
        if self.coder.kept is not None:
            return
        keys = [at.expert(number) for number in range(len(self.rows))]
        for bits in self.patterns:
            for batch in batches(self.calls.spec, ((key, bits) for key in keys)):
                self.coder.prepare(batch)

    @torch.no_grad()
    def add(self, key: ExpertKey, x: Tensor, given: Tensor, at_given: Tensor, text: Tensor) -> None:
        """Adds the costs of an expert, by its inputs [rows, d_model], its outputs `given` [rows, d_model], the
        gradients of each draw at them [draws, rows, d_model], and the number of each row's text [rows]."""
        texts, base = int(text.max()) + 1, torch.zeros(())
        self.rows[key.expert] += len(x)
        for number, bits in enumerate(self.patterns):
            changed = self.calls.ffn(key, x, self._coded(key, bits)) - given
            effect = (at_given * changed).sum(-1).double()  # [draws, rows]
            sums = torch.zeros(len(effect), texts, dtype=torch.float64).index_add_(1, text, effect)
            if number == 0:
                base = sums
            self.nats[number, key.expert] += self._rise(bits, sums, base)

    def found(self) -> dict[str, Any]:
        return {"rows": self.rows.tolist(), "costs": self.nats.tolist()}

    def _rise(self, bits: Bits, sums: Tensor, base: Tensor) -> float:
        """Returns nats above the base, by the sums [draws, texts] of an expert's effect at the base and at these
        widths. For narrower widths the change from one to the other counts: it ranks better than the difference of
        their squares (0.78 on wiki at 3 bits), and the measured cost of the whole layer sets its size."""
        if max(bits) > max(self.patterns[0]):
            return float(0.5 * (sums.square() - base.square()).sum(1).mean())
        return float(0.5 * (sums - base).square().sum(1).mean())

    def _coded(self, key: ExpertKey, bits: Bits) -> Weights:
        found = self.coder.weights(key, bits)
        return tuple(torch.from_numpy(found[name]) for name in self.calls.spec.moe.ffn.projections)


def drawn(head: Head, hidden: Tensor, draws: int, chance: torch.Generator) -> Iterator[Tensor]:
    """Yields, for each draw from the model's own distributions, the gradient of its log-likelihood at the last states
    of one text [places, d_model]."""
    hidden = hidden.detach().clone().requires_grad_()
    with torch.enable_grad():
        log_p = head.log_probabilities(hidden)
    chosen = torch.multinomial(log_p.detach().exp(), draws, replacement=True, generator=chance)
    for draw in range(draws):
        ones = torch.zeros_like(log_p).scatter_(1, chosen[:, draw : draw + 1], 1.0)
        yield torch.autograd.grad(log_p, hidden, ones, retain_graph=True)[0]


def chance_of(seed: int, text: int) -> torch.Generator:
    """Returns the generator of a text's draws, which does not depend on the rest of its batch."""
    return torch.Generator().manual_seed(seed * 1_000_003 + text)


class Gradients:
    """Costs by a pass back through the layers; `patterns` are those of Totals."""

    def __init__(self, model: LayeredModel, texts: Texts, patterns: Sequence[Bits], draws: int, seed: int) -> None:
        self.model, self.texts, self.patterns, self.draws, self.seed = model, texts, patterns, draws, seed
        self.ids, self.real = texts.ids, texts.real
        self.n_layers = len(model.skeleton.layers)

    def run(self, journal: Journal, about: str, bar: Bar) -> Costs:
        """Returns the costs, from the last layer to the first; a run that was killed goes on at its layer."""
        model = self.model
        name = identity(about, "gradients", self.draws, self.seed, [list(bits) for bits in self.patterns])
        names = {at: identity(name, str(at)) for at in model.spec.moe_layers("decoder")}
        if any(journal.get(each) is None for each in names.values()):
            self._measured(journal, name, bar)
        found = {at: cast("Mapping[str, Any]", journal.get(each)) for at, each in names.items()}
        with journal.believed():
            return Costs(
                {at: layer_costs(entry) for at, entry in found.items()},
                sum(entry["flops"] for entry in found.values()), sum(entry["seconds"] for entry in found.values()),
            )  # fmt: skip

    def _measured(self, journal: Journal, name: str, bar: Bar) -> None:
        model = self.model
        model.original_experts()
        states = model.passage(self.ids, keeps=True)
        with torch.inference_mode():
            model.through(states, self.ids, self.real, "what enters each layer")
        folder, rows = model.room.folder / "gradients" / name[:16], self.draws * len(self.ids)
        back = Passage(folder, (rows, *states.shape[1:]), other=(1, model.spec.d_model))
        if not back.reached:
            self._begin(states, back)
        bar.update(back.reached - 1)
        for at in range(self.n_layers - back.reached, -1, -1):
            with back.leaving(self.n_layers - at + 1) as fresh, model.ready(at):
                layer = _Layer(self, at)
                if layer.key is not None:
                    layer.totals.code(layer.key)
                for batch in model.batches(self.ids, _STATES_A_DRAW * self.draws * 4 * model.spec.stream_width):
                    layer.back(states, batch, self._part(back.entering(self.n_layers - at), batch), fresh)
                if layer.key is not None and journal.get(identity(name, str(layer.key))) is None:
                    journal.add(identity(name, str(layer.key)), layer.found())
            bar.update(1)
        back.remove()

    def _begin(self, states: Passage, back: Passage) -> None:
        """Writes the gradients at the model's last states, for y drawn from its own distribution at every scored
        place."""
        finals = states.entering(self.n_layers)
        with back.leaving(1) as fresh, self.model.head() as head:
            for row in range(len(self.ids)):
                scored = self.texts.scored[row]
                gradients = drawn(head, finals[row][scored], self.draws, chance_of(self.seed, row))
                for draw, gradient in enumerate(gradients):
                    left = torch.zeros(1, *finals.shape[1:])
                    left[0, scored] = gradient
                    fresh[torch.tensor([draw * len(self.ids) + row])] = left

    def _part(self, gradients: Tensor, batch: Tensor) -> Tensor:
        """Returns the gradients of a batch [draws, rows of the batch, tokens, d_model]."""
        return gradients.view(self.draws, len(self.ids), *gradients.shape[1:])[:, batch]


class _Layer:
    """One layer of a pass back."""

    def __init__(self, of: Gradients, at: int) -> None:
        self.of, self.model, self.at = of, of.model, at
        keys = {self.model.family.place(one.layer): one for one in self.model.spec.moe_layers("decoder")}
        self.key: LayerKey | None = keys.get(at)
        self.ffn = self.model.spec.moe.ffn
        joins = self.key is not None and self.model.spec.decoder[self.key.layer].adds_experts
        self.adds = joins and at + 1 < of.n_layers
        """Whether gradients do not depend on the experts' outputs: they do where the outputs go through a norm."""
        self._started, self._rows = time.perf_counter(), of.model.calls.rows
        self.totals = Totals(self.model.calls, self.model.coder, of.patterns)

    def found(self) -> dict[str, Any]:
        calls = self.model.calls
        spent = {
            "flops": calls.flops(calls.rows - self._rows),
            "seconds": round(time.perf_counter() - self._started, 4),
        }
        return {**self.totals.found(), **spent}

    def back(self, states: Passage, batch: Tensor, above: Tensor, fresh: Leaving) -> None:
        """Takes a batch back through the layer. `above` [draws, rows, tokens, d_model] are the gradients at the states
        that leave the layer; the gradients at the states that enter it go to `fresh`."""
        of, draws = self.of, self.of.draws
        asked: list[tuple[Call, Tensor]] = []

        def answer(_: LayerKey, call: Call) -> Tensor:
            held = Call(call.x.detach(), call.chosen, call.weights.detach())
            with torch.no_grad():
                given = torch.zeros_like(call.x) if self.adds else self.model.calls.given(self.key, held)
            asked.append((call, given.requires_grad_()))
            return asked[0][1]

        with torch.enable_grad(), self.model.calls.during(answer=answer):
            entering = states.entering(self.at)[batch].requires_grad_() if self.at else None
            left, final = self.model.step(states, self.at, of.ids, of.real, batch, entering)
        output = final if self.at + 1 == of.n_layers else left
        inputs = [*([entering] if entering is not None else []), *(given for _, given in asked)]
        if not inputs:
            return
        found = [torch.autograd.grad(output, inputs, above[draw], retain_graph=True) for draw in range(draws)]
        below = [] if entering is None else [(entering, each[0]) for each in found]
        if asked:
            call = asked[0][0]
            by_x, by_weights = self._experts(call, torch.stack([each[-1] for each in found]), batch)
            below = [
                (start, gradient + _through(start, [(call.x, by_x[draw]), (call.weights, by_weights[draw])]))
                for draw, (start, gradient) in enumerate(below)
            ]
        for draw, (_, gradient) in enumerate(below):
            fresh[draw * len(of.ids) + batch] = gradient.detach()

    def _experts(self, call: Call, gradients: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Adds up the cost of each expert, by gradients [draws, tokens, d_model] at the experts' outputs; returns the
        gradients at their inputs and at the router's weights."""
        assert self.key is not None
        by_x = torch.zeros_like(gradients)
        by_weights = torch.zeros(self.of.draws, *call.weights.shape)
        window = torch.arange(len(batch)).repeat_interleave(self.of.ids.shape[1])
        numbers = torch.unique(call.chosen[call.chosen >= 0]).tolist()
        keys = [self.key.expert(number) for number in numbers]
        self.model.shelf.expect(keys)
        for key in keys:
            token, place = (call.chosen == key.expert).nonzero(as_tuple=True)
            x = call.x.detach()[token].requires_grad_(self.at > 0)
            share = call.weights.detach()[token, place][:, None]
            mine, biases = self.model.shelf.weights(key), self.model.shelf.biases(key)
            with torch.enable_grad():
                given = expert_ffn(x, mine, self.ffn, biases)
            at_given = gradients[:, token] * share  # [draws, rows, d_model]
            self.model.calls.rows += len(token)
            if self.at:
                by_weights[:, token, place] = (gradients[:, token] * given.detach()).sum(-1)
                for draw in range(self.of.draws):
                    by_x[draw].index_add_(0, token, torch.autograd.grad(given, x, at_given[draw], retain_graph=True)[0])
                self.model.calls.rows += self.of.draws * len(token)
            self.totals.add(key, x.detach(), given.detach(), at_given, window[token])
        return by_x, by_weights


def _through(start: Tensor, ends: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the gradient at `start` through `ends`, results with their gradients; zeros where none depends on it."""
    made = [(end, gradient) for end, gradient in ends if end.requires_grad]
    if not made:
        return torch.zeros_like(start)
    outputs, gradients = zip(*made, strict=True)
    found = torch.autograd.grad(outputs, [start], gradients, retain_graph=True, allow_unused=True)[0]
    return torch.zeros_like(start) if found is None else found


def layer_costs(entry: Mapping[str, Any]) -> LayerCosts:
    """Returns the costs that Totals found, from an entry of the journal."""
    return LayerCosts(tuple(entry["rows"]), tuple(map(tuple, entry["costs"])))


# The cost of each expert of an encoder-decoder model by gradients, and of its whole layers: for pairs of texts.
# The decoder reads each sample's target, as it does where divergences are measured one expert at a time. Gradients
# go back through the decoder, and through its attention to the input into the encoder, so that the costs of both
# stacks' experts compare. The model is in memory.

SCALE_TOKENS = 2048  # of targets that whole layers are measured on


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

    def states(self, model: Seq2Seq) -> Tensor:
        """Returns the decoder's final states [rows, tokens, d_model], as it reads the targets."""
        encoded = model.encode({"input_ids": self.inputs}, self.mask)
        return model.decode({"input_ids": model.fed(self.targets)}, self.real, encoded, self.mask)


class PairGradients:
    """Costs by a pass forward and back through a model in memory, for as many samples at once as fit `batch_bytes`.
    `patterns` are those of Totals."""

    def __init__(
        self, trial: Trial, scorer: GeneratedScorer, patterns: Sequence[Bits], draws: int, seed: int, batch_bytes: int
    ) -> None:
        self.trial, self.model, self.patterns, self.draws, self.seed = trial, scorer.model, patterns, draws, seed
        most = batch_bytes // _token_bytes(trial.spec, draws)
        self.parts = [part for bucket in scorer.buckets for part in parts_of(scorer, bucket, most)]

    def run(self, journal: Journal, about: str, bar: Bar) -> Costs:
        """Returns the costs, part by part; a run that was killed goes on with the first part that it lacks."""
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

        with torch.enable_grad(), calls.during(answer=answer), transformers_model(self.trial.checkpoint.path):
            final = part.states(self.model)
        marks = [mark for _, mark in asked.values()]
        back = [torch.autograd.grad(final, marks, above, retain_graph=True) for above in self._above(part, final)]
        calls.rows += self.draws * (calls.rows - rows)
        layers = {}
        for place, (at, (call, _)) in enumerate(asked.items()):
            layers[str(at)] = self._costs(at, call, torch.stack([each[place] for each in back]), len(part.items))
        spent = {"flops": calls.flops(calls.rows - rows), "seconds": round(time.perf_counter() - started, 4)}
        return {"layers": layers, **spent}

    def _above(self, part: Part, final: Tensor) -> Iterator[Tensor]:
        """Returns the gradients at the last states [rows, tokens, d_model], draw by draw."""
        found = torch.zeros(self.draws, *final.shape)
        for row, item in enumerate(part.items):
            real = part.real[row]
            hidden = final[row][real]
            for draw, gradient in enumerate(drawn(self.model.head, hidden, self.draws, chance_of(self.seed, item))):
                found[draw, row, real] = gradient
        return iter(found)

    def _costs(self, at: LayerKey, call: Call, gradients: Tensor, texts: int) -> dict[str, Any]:
        """Returns the costs of one layer's experts, by gradients [draws, tokens, d_model] at their outputs."""
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
    """The measured cost of all experts of a layer together, on the samples of a scorer with a metric that does not
    generate text. `patterns` are the widths that they get at once."""

    def __init__(self, trial: Trial, scorer: GeneratedScorer, patterns: Sequence[Bits]) -> None:
        self.trial, self.scorer, self.patterns = trial, scorer, patterns

    def run(self, journal: Journal, about: str, bar: Bar) -> Measured:
        """Returns the measured costs, layer by layer; a run that was killed goes on with the first layer that it lacks.
        Raises ConversionError."""
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
    """Returns the patterns that layers are measured at: those not above the base, or the base itself without any."""
    return [bits for bits in patterns[1:] if max(bits) <= max(patterns[0])] or [patterns[0]]


def scaled_as_one(
    costs: LayerCosts, patterns: Sequence[Bits], measured: Sequence[float], share: float
) -> list[list[float]]:
    """Returns nats above the base [patterns][experts]. `measured` is the layer's cost at each of the `narrower`
    patterns, on a `share` of the text.

    One factor serves all widths of a layer, and no base is taken away: on hundreds of short texts a layer's cost
    depends on few tokens that routers behind it send elsewhere, at 4 bits hardly less than at 2. Agreement of ranks of
    g2p's experts at 2 and 3 bits with an exact sweep of six times as many texts: a factor for each width 0.58 and 0.30,
    no factor 0.67 and 0.41, this one 0.67 and 0.46.
    """
    asked = narrower(patterns)
    rows = [row for bits, row in zip(patterns, costs.costs, strict=True) if bits in asked]
    if asked == [patterns[0]]:
        rows = [tuple(-cost for cost in costs.costs[-1])]  # about the cost of the base
    together = share * sum(map(sum, rows))
    factor = sum(measured) / together if together * sum(measured) > 0 else 1.0
    return [[cost * factor for cost in row] for row in costs.costs]


def parts_of(scorer: GeneratedScorer, bucket: Bucket, most_tokens: int) -> Iterator[Part]:
    """Yields a bucket's samples in parts of at most `most_tokens`, or of one sample; of choices only the right one."""
    right = torch.from_numpy(scorer.items.right[bucket.items].copy()).nonzero()[:, 0]
    width = bucket.inputs.shape[1] + bucket.targets.shape[1]
    for items in torch.split(right, max(1, most_tokens // width)):
        rows = bucket.of_row[items]
        yield Part(
            (items + bucket.items.start).tolist(), bucket.inputs[rows], bucket.mask[rows], bucket.targets[items]
        )  # fmt: skip


def _token_bytes(spec: ModelSpec, draws: int) -> int:
    """Returns the most bytes that a token takes until its batch has gone back: for its states in every layer of a
    stack, and the gradients of all draws there."""
    return max(map(len, spec.stacks.values())) * (token_bytes(spec) + 4 * draws * spec.d_model)


def _sum(entries: Sequence[Mapping[str, Any]]) -> LayerCosts:
    """Returns the costs of a layer, summed over all parts."""
    rows = torch.tensor([entry["rows"] for entry in entries]).sum(0)
    costs = torch.tensor([entry["costs"] for entry in entries], dtype=torch.float64).sum(0)
    return layer_costs({"rows": rows.tolist(), "costs": costs.tolist()})
