"""Scales of experts' codes and weights of norms, trained so that the quantized model answers as the original one does.

The second phase of EfficientQAT (Chen et al. 2024, arXiv 2407.11062): codes stay, and a few real numbers learn end to
end from the unquantized model's distributions. They take no byte more: a gain of each row goes into the row's scale,
and a norm's weight scales one feature of all matrices that read it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from moeconv.artifacts import TrainedReport
from moeconv.conversion.choosing import Choice
from moeconv.conversion.measuring import Account, Bench
from moeconv.errors import ConversionError, TargetMissed
from moeconv.foresight.examples import load_checkpoint, save_checkpoint
from moeconv.measure.metrics import METRICS
from moeconv.measure.passes import token_bytes
from moeconv.measure.scorers import Head, ReferenceRows
from moeconv.measure.scoring import GeneratedScorer, TextScorer, build_scorer, dealt, volume
from moeconv.measure.trial import Trial
from moeconv.measure.workdir import WorkDir, identity
from moeconv.plan.problem import Plan
from moeconv.progress import Bar
from moeconv.quantizers.trained import MOST_GAIN, NOTHING, Trained, norms_of
from moeconv.source.archs.config import transformers_model
from moeconv.source.archs.weights import parameter
from moeconv.source.experts import Call, expert_ffn, linear
from moeconv.sweep.fisher import Part, parts_of
from moeconv.tuned import said
from moert.pack.model_spec import ExpertKey, LayerKey

STEPS = 64
BATCH_TOKENS = 2048
JUDGED = 3
"""Training runs at most this many times the text that judges a plan through the model, so that it takes about as long
as the search."""
LEAST_TOKENS = 8192
"""From less text, its accidents are learnt."""
RATE = 0.01
"""The first steps change a number by about this share of its size; later ones by less and less."""
WARM = 5
"""Steps in which the rate rises."""
BEYOND = 1.3
"""Numbers are trained for a plan that loses this many times as much as the chosen one: about the one that holds with
them."""
KEPT_SECONDS = 30.0
"""Seconds between two states that a file keeps of a training."""
_LOGITS = 3
"""Arrays of logits that a token takes."""
COARSE = 0.03
"""Share of its bytes that the search leaves open whose plan numbers are trained for."""


def _hindrance(bench: Bench) -> str | None:
    """Returns why scales stay as fitted; None where they are trained."""
    settings, material, spec = bench.settings, bench.material, bench.spec
    if settings.scales != "trained":
        return said("scales", settings.scales)
    if settings.learns or settings.resident:
        return "something else is fitted on the text"
    if settings.coded_by == "source":
        return "the source's own codes are kept"
    if bench.memory.layered:
        return "the model goes through memory layer by layer"
    seen = volume(spec, material.tokenizer, material.ranking, material.extent(_samples(bench)))
    if seen.tokens < LEAST_TOKENS:
        return f"they would learn from {seen.tokens:,} tokens, which are fewer than {LEAST_TOKENS:,}"
    at_once = 1 if spec.encoder is not None else material.extent(None).window(spec)
    return "a step takes more memory than the sweep may" if _fitting_tokens(bench) < at_once else None


def _batch_tokens(bench: Bench) -> int:
    """Returns the tokens of a step."""
    return max(1, min(BATCH_TOKENS, JUDGED * bench.material.judged.tokens // STEPS))


def _fitting_tokens(bench: Bench) -> int:
    """Returns the tokens that go through the model together: their states and logits stay until gradients went back."""
    spec = bench.spec
    inside = 4 * spec.moe.router.top_k * len(spec.moe.ffn.projections) * max(spec.moe.ffn.d_ff, spec.d_model)
    layers = sum(map(len, spec.stacks.values()))
    return bench.memory.sweep_bytes // 2 // (layers * (token_bytes(spec) + 2 * inside) + 4 * _LOGITS * spec.vocab_size)


def _samples(bench: Bench) -> int:
    """Returns the number of samples of the ranking text that are learnt from: each is seen twice, where there are as
    many."""
    ranked = bench.material.ranked
    return math.ceil(ranked.samples * STEPS * _batch_tokens(bench) / 2 / max(1, ranked.tokens))


def chosen(bench: Bench, choice: Choice, work: WorkDir, account: Account) -> tuple[Plan, TrainedReport | None]:
    """Returns the chosen plan: with trained numbers, which the pack has from then on, where they help. Raises
    TargetMissed or ConversionError."""
    if (reason := _hindrance(bench)) is not None:
        account.say(f"scales stay as fitted: {reason}")
        return choice.plan(), None
    plan = choice.plan(COARSE)
    if all(bits == 16 for widths in plan.assignment.values() for bits in widths):
        return choice.plan(), None
    before, apart = choice.measured(plan), choice.divergence(plan)
    with account.step("scales", bench.journal):
        aim = choice.beyond(plan, BEYOND) if bench.settings.target.kind == "loss" else plan
        bench.coding.dense.choose(aim.dense)
        found = _kept(bench, aim, work, account)
        _use(bench, found)
        after = choice.again(plan, before)
        better = after.decisive < before.decisive and choice.divergence(plan) < apart
        account.say(f"the same widths with trained scales: loss {before.loss:.2%} → {after.loss:.2%}")
    if better:
        with suppress(TargetMissed):
            smaller = choice.plan()
            report = TrainedReport(len(found.norms), len(found.gains), before.loss, after.loss, plan.nbytes)
            return smaller, report
    account.note("training scales did not help: they stay as they were")
    _use(bench, NOTHING)
    choice.back()
    return choice.plan(), None


def _use(bench: Bench, found: Trained) -> None:
    """Gives the model that plans are tried on, and the pack, these numbers."""
    bench.restore()  # so that every expert is written anew
    bench.coding.dense.trained = bench.coder.trained = found


def _kept(bench: Bench, plan: Plan, work: WorkDir, account: Account) -> Trained:
    """Returns the numbers for a plan, which the work directory keeps."""
    widths = [[str(key), list(bits)] for key, bits in sorted(plan.assignment.items())]
    units = [[*unit, bits] for unit, bits in plan.dense.items()]
    name = identity("scales", widths, units, _samples(bench), STEPS, _batch_tokens(bench), RATE, bench.settings.seed)
    path = work.path / f"scales-{name[:12]}.safetensors"
    if bench.journal.sealed(path):
        try:
            return Trained.from_bytes(path.read_bytes())
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ConversionError(f"{path} can't be read ({error}): delete it, and it is made again") from None
    with account.progress("training scales", STEPS, "step") as bar:
        found = _train(bench, plan, bar, path.with_suffix(".part"))
    work.save_bytes(path.name, found.to_bytes(), bench.journal)
    path.with_suffix(".part").unlink(missing_ok=True)
    return found


def _train(bench: Bench, plan: Plan, bar: Bar, kept: Path) -> Trained:
    """Returns the numbers for a plan. `kept`: the file with the state of a training that was interrupted."""
    trial, material = bench.trial, bench.material
    likelihood = METRICS["token_perplexity"]  # so that nothing is written
    scorer = build_scorer(trial, material.tokenizer, material.ranking, likelihood, material.extent(_samples(bench)))
    trial.restore()
    with transformers_model(trial.checkpoint.path):
        scorer.refer()
    trial.assign(plan.assignment)
    batch, piece = _batch_tokens(bench), min(_batch_tokens(bench), _fitting_tokens(bench))
    pieces = max(1, round(batch / piece))  # of a step
    dense, description = bench.coding.dense, trial.checkpoint.description
    names, gains = norms_of(description), _Gains(bench, plan)
    with _learning(trial, names) as norms:
        groups = [{"params": [weight], "lr": RATE * rms} for weight, rms in norms]
        optimizer = torch.optim.Adam([*groups, {"params": gains.learning, "lr": RATE}], betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _share_of_rate)
        with (
            torch.enable_grad(),
            transformers_model(trial.checkpoint.path),
            trial.calls.during(answer=gains.answer if gains.learning else None),
        ):
            course = _Course([*(weight for weight, _ in norms), *gains.learning], optimizer, schedule, kept)
            bar.update(done := course.resumed())
            turns = _in_turn(_batches(scorer, piece), STEPS * pieces, bench.settings.seed)
            for number, part in enumerate(islice(turns, done * pieces, None), 1):
                (part.divergence() / pieces).backward()  # type: ignore[no-untyped-call]
                if number % pieces == 0:
                    course.step()
                    bar.update(1)
        found = {
            name: parameter(trial.model, description, name).to(dense.source(name).dtype, copy=True) for name in names
        }
    return Trained(found, gains.found())


@contextmanager
def _learning(trial: Trial, names: Sequence[str]) -> Iterator[list[tuple[torch.nn.Parameter, float]]]:
    """Gives the weights of these norms, which collect gradients inside a with block and are the old ones behind it,
    each with the root mean square of its canonical values, which some models store less 1."""
    description = trial.checkpoint.description
    places = {description.parameters[name].name: name for name in names}
    rms = [parameter(trial.model, description, name).float().square().mean().sqrt() for name in places.values()]
    norms = [trial.model.get_parameter(place).requires_grad_() for place in places]
    before = [each.detach().clone() for each in norms]
    try:
        yield list(zip(norms, map(float, rms), strict=True))
    finally:
        with torch.no_grad():
            for each, was in zip(norms, before, strict=True):
                each.requires_grad_(False).copy_(was)
                each.grad = None


class _Course:
    """The steps of a training, whose state a file keeps every KEPT_SECONDS."""

    def __init__(
        self, learning: list[Tensor], optimizer: torch.optim.Adam, schedule: torch.optim.lr_scheduler.LambdaLR,
        kept: Path,
    ) -> None:  # fmt: skip
        self.learning, self.optimizer, self.schedule, self.kept = learning, optimizer, schedule, kept
        self._saved = time.monotonic()

    def resumed(self) -> int:
        """Returns the number of steps that were done before, whose state is taken. Raises ConversionError for a file
        that can't be read."""
        if (found := load_checkpoint(self.kept, self.kept.name)) is None:
            return 0
        with torch.no_grad():
            for mine, theirs in zip(self.learning, found["learning"], strict=True):
                mine.copy_(theirs)
        self.optimizer.load_state_dict(found["optimizer"])
        self.schedule.load_state_dict(found["schedule"])
        return self.schedule.last_epoch

    def step(self) -> None:
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        if time.monotonic() - self._saved >= KEPT_SECONDS:
            state = {"learning": [each.detach() for each in self.learning], "schedule": self.schedule.state_dict(),
                     "optimizer": self.optimizer.state_dict()}  # fmt: skip
            save_checkpoint(self.kept, self.kept.name, state)
            self._saved = time.monotonic()


class _Gained(torch.autograd.Function):
    """x Wᵀ [rows, out] times gains [out], with gradients of x and gains, and no copy of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gain: Tensor) -> Tensor:
        product = linear(x, weight)
        ctx.save_for_backward(weight, gain, product)
        return product * gain

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, None, Tensor]:
        weight, gain, product = ctx.saved_tensors
        return (above[0] * gain) @ weight, None, (above[0] * product).sum(0)


class _Gains:
    """Gains of the rows of all experts' codes, near 1, and the experts with them. None where experts lie in blocks of
    neurons, whose down matrix has scales of inputs."""

    def __init__(self, bench: Bench, plan: Plan) -> None:
        self._calls, self._plan, self.spec = bench.trial.calls, plan, bench.spec
        keys = [] if bench.coding.neurons is not None else list(plan.assignment)
        self._gains = {
            key: [torch.zeros(len(weight), requires_grad=bits < 16)
                  for weight, bits in zip(self._calls.weights(key), plan.assignment[key], strict=True)]
            for key in keys
        }  # fmt: skip
        self._of_weight = {
            id(weight): gain
            for key, gains in self._gains.items()
            for weight, gain in zip(self._calls.weights(key), gains, strict=True)
        }

    @property
    def learning(self) -> list[Tensor]:
        return [gain for gains in self._gains.values() for gain in gains if gain.requires_grad]

    def answer(self, at: LayerKey, call: Call) -> Tensor:
        """Returns the output of a layer's experts [tokens, d_model], through which gradients go back to gains."""
        out = torch.zeros_like(call.x)
        for key in map(at.expert, range(self.spec.moe.n)):
            tokens, choices = (call.chosen == key.expert).nonzero(as_tuple=True)
            if len(tokens):
                ffn, biases = self.spec.experts[at].ffn, self._calls.supply.biases(key)
                given = expert_ffn(call.x[tokens], self._calls.weights(key), ffn, biases, self._product)
                out = out.index_add(0, tokens, given * call.weights[tokens, choices, None])
        return out

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the product with a matrix of an expert, whose rows have gains."""
        found: Tensor = _Gained.apply(x, weight, 1 + self._of_weight[id(weight)])  # type: ignore[no-untyped-call]
        return found if bias is None else found + bias

    def found(self) -> dict[tuple[ExpertKey, str, float], np.ndarray]:
        """Returns the gains by expert, projection and width."""
        names = self.spec.moe.ffn.projections
        return {
            (key, name, bits): (1 + gain.detach()).clamp(1 / MOST_GAIN, MOST_GAIN).numpy()
            for key, gains in self._gains.items()
            for name, bits, gain in zip(names, self._plan.assignment[key], gains, strict=True)
            if gain.requires_grad
        }


def _share_of_rate(step: int) -> float:
    return min(1.0, (step + 1) / WARM) * 0.5 * (1 + math.cos(math.pi * step / STEPS))


@dataclass(frozen=True)
class _Batch:
    """Text that goes through the model together: `states` returns the final states of its scored places [places,
    d_model], with gradients, `reference` has the unquantized model's figures there."""

    head: Head
    states: Callable[[], Tensor]
    reference: ReferenceRows

    def divergence(self) -> Tensor:
        """Returns the mean divergence from the unquantized model, in nats a token."""
        return self.head.divergence(self.states(), self.reference).mean()


def _in_turn(batches: Sequence[_Batch], count: int, seed: int) -> Iterator[_Batch]:
    """Yields `count` batches: all in a random order, then all in another one."""
    chance = np.random.default_rng(seed)
    order: list[int] = []
    for _ in range(count):
        order = order or chance.permutation(len(batches)).tolist()
        yield batches[order.pop()]


def _batches(scorer: TextScorer | GeneratedScorer, tokens: int) -> list[_Batch]:
    assert scorer.reference is not None  # copied: gradients can't go through what was made without them
    reference = ReferenceRows(scorer.reference.mean_row.clone(), scorer.reference.negentropy.clone())
    if isinstance(scorer, TextScorer):
        return list(_of_texts(scorer, reference, tokens))
    return list(_of_pairs(scorer, reference, tokens))


def _of_texts(scorer: TextScorer, reference: ReferenceRows, tokens: int) -> Iterator[_Batch]:
    texts = scorer.texts
    rows = torch.arange(len(texts.ids))
    of_place = rows[:, None].expand_as(texts.scored)[texts.scored]
    for some in dealt(rows.tolist(), max(1, min(len(rows), texts.ids.numel() // tokens))):
        chosen = torch.tensor(some)

        def states(chosen: Tensor = chosen) -> Tensor:
            return scorer.run(chosen)[texts.scored[chosen]]

        yield _Batch(scorer.head, states, reference[torch.isin(of_place, chosen)])


def _of_pairs(scorer: GeneratedScorer, reference: ReferenceRows, tokens: int) -> Iterator[_Batch]:
    lengths = torch.from_numpy(scorer.items.tokens).long()
    of_place = torch.arange(len(lengths)).repeat_interleave(lengths)
    for part in (part for bucket in scorer.buckets for part in parts_of(scorer, bucket, tokens)):
        chosen = torch.isin(of_place, torch.tensor(part.items))

        def states(part: Part = part) -> Tensor:
            return part.states(scorer.model)[part.real]

        yield _Batch(scorer.model.head, states, reference[chosen])
