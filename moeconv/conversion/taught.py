"""Stages with results that are part of every measured plan: hash function, predictor and order of neurons."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from moeconv.artifacts import NeuronsReport, RouteReport, uniform
from moeconv.conversion.measuring import Account, Bench, References
from moeconv.conversion.room import check_room, whole_bytes, within
from moeconv.conversion.settings import Settings
from moeconv.errors import ConversionError, SettingsError, TargetMissed
from moeconv.foresight.examples import (
    Examples,
    Firings,
    collected,
    firing_bytes,
    firings,
    stacks_of,
    token_bytes,
)
from moeconv.foresight.network import HashRouting, Shape, refusal
from moeconv.foresight.neurons import (
    NeuronCourse,
    NeuronLesson,
    PredictedNeurons,
    kept_text,
    per_block,
    trained_neurons,
)
from moeconv.foresight.training import Course, Lesson, trained
from moeconv.measure.firing import Reads
from moeconv.measure.scorers import Subject
from moeconv.measure.scoring import Volume, build_scorer, volume
from moeconv.measure.trial import Instead
from moeconv.measure.workdir import WorkDir
from moeconv.order import NeuronOrder
from moeconv.plan.problem import Plan
from moeconv.plan.search import uniform_bytes
from moeconv.progress import Progress
from moeconv.promise.judging import estimate
from moeconv.quantizers.coder import ORIGINAL
from moeconv.report.page import size
from moeconv.source.archs.config import transformers_model
from moeconv.source.archs.description import Description
from moeconv.source.archs.weights import parameter
from moeconv.source.experts import Biases, Weights
from moeconv.tuned import said
from moert.pack.errors import PackError
from moert.pack.layout import Coding, Neurons
from moert.pack.learnt import HASH, PREDICTOR, HashFunction, Kept, NeuronPredictor, PredictedLoss, RoutedLoss
from moert.pack.manifest import LossEstimate
from moert.pack.model_spec import ExpertKey, LayerKey, ModelSpec

# The lesson of a hash function: routing of text as examples on disk, its width, and the bytes of both.

HELD_TOKENS = 32768
"""Tokens of held-out text that each epoch is judged on, unless the user gives a number of samples."""
MOST_SHARE = 0.02
"""Largest share of a pack that a hash function takes, unless it needs more for LEAST_WIDTH."""
USUAL_WIDTH, LEAST_WIDTH = 256, 128
_STEP = 32
_GUESSED_BITS = 4  # for the size of a pack before there is one
_COPIES = 4  # of all numbers, in a checkpoint: the current ones, two of the optimizer's, and the best ones


def usual_width(spec: ModelSpec, pack_bytes: int) -> int:
    """Returns the usual width of a hash function, for a pack that takes `pack_bytes` without it."""
    widest = max(2, min(USUAL_WIDTH, spec.d_model) // 2 * 2)
    fitting = (
        width
        for width in range(widest, LEAST_WIDTH - 1, -_STEP)
        if 2 * _numbers(spec, width) <= MOST_SHARE * pack_bytes
    )
    return next(fitting, min(widest, LEAST_WIDTH))


def _numbers(spec: ModelSpec, width: int) -> int:
    return sum(Shape.of(spec, stack, width).numbers for stack in stacks_of(spec))


def held_samples(there: Volume) -> int:
    """Returns the number of held-out samples that have about HELD_TOKENS."""
    return samples_of(there, HELD_TOKENS)


def samples_of(there: Volume, tokens: int) -> int:
    """Returns the number of samples of a text that have about `tokens` tokens."""
    whole = max(there.encoder_tokens, there.decoder_tokens)
    return max(1, min(there.samples, tokens * there.samples // whole))


def lesson_bytes(spec: ModelSpec, texts: Sequence[Volume], course: Course) -> int:
    """Returns the most bytes that examples and checkpoints take on the disk."""
    tokens = sum(text.tokens for text in texts)
    return tokens * token_bytes(spec) + _COPIES * 4 * _numbers(spec, course.width)


def check_memory(spec: ModelSpec, what: str, models: int) -> None:
    """Raises SettingsError where the free memory does not hold this number of `models` of this shape; `what` names the
    network that is trained on one of them."""
    limit, whole = within(None), models * whole_bytes(spec)
    if limit is not None and whole > limit:
        raise SettingsError(
            f"{what} is trained on a model in memory, which takes {size(whole)}, and {size(limit)} are free: "
            "train it on a larger machine"
        )


def lesson_of(
    subject: Subject, description: Description, scorers: tuple[Reads, Reads], course: Course, folder: Path,
    about: Mapping[str, Any], show: Progress,
) -> Lesson:  # fmt: skip
    """Returns a lesson with examples, in a folder, of the routing of `subject` on the text of both scorers, to train on
    and held out; `about` holds all values that decide the examples. Examples that the folder has are used again.
    Raises ConversionError."""
    told = digest_of(about)

    def examples(name: str, scorer: Reads) -> Examples:
        with show(f"routing {name}", scorer.n_samples, "sample") as bar:
            return collected(folder / name.replace(" ", "-"), told, subject, description, scorer, bar)

    train, heldout = examples("to learn", scorers[0]), examples("to judge by", scorers[1])
    embedding = parameter(subject.model, description, "embed.weight").float()
    return Lesson(description.spec, embedding, train, heldout, decided_by(about, course), folder / "checkpoint.pt")


def course_of(settings: Settings, spec: ModelSpec) -> Course:
    """Returns the course that a conversion trains its hash function with."""
    return Course(usual_width(spec, uniform_bytes(spec, _GUESSED_BITS)), seed=settings.seed)


def decided_by(about: Mapping[str, Any], course: Course | NeuronCourse) -> str:
    """Returns the digest of all values that decide a trained network; see lesson_of and neuron_lesson_of."""
    return digest_of({"examples": digest_of(about), **asdict(course)})


def digest_of(about: Mapping[str, Any]) -> str:
    """Returns the sha256 of JSON values."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


# The lesson of a predictor of neurons: firings of text on disk, its rank, and the bytes of both.

HELD_NEURON_TOKENS = 16384
"""Tokens of held-out text that each epoch is judged on, unless the user gives a number of samples."""
_ROWS, _MOST_TOKENS = 32768, 131072
"""Tokens that each expert is to see, and the most tokens of text that are taken for this."""
_USUAL_SHARE, _LEAST_RANK, _MOST_RANK = 16, 8, 256


def check_neurons(spec: ModelSpec, what: str) -> None:
    """Raises SettingsError, with a message that begins with `what`, for experts with an activation that does not make
    neurons exactly zero."""
    act = spec.moe.ffn.act
    if not act.exact_zeros:
        raise SettingsError(
            f"{what}: a predictor names neurons of experts in which most are exactly zero (relu, relu2), and this "
            f"model's activation is {act.name}"
        )


def usual_rank(spec: ModelSpec) -> int:
    """Returns the usual rank: a sixteenth of the features that enter an expert, but at least 8 and at most 256 of
    them."""
    width = spec.expert_width
    return min(width, max(_LEAST_RANK, min(_MOST_RANK, width // _USUAL_SHARE)))


def samples_wanted(spec: ModelSpec, learning: Volume, heldout: Volume) -> tuple[int, int]:
    """Returns the numbers of samples of both texts, unless the user gives one."""
    tokens = min(_MOST_TOKENS, _ROWS * spec.moe.n // spec.moe.router.top_k)
    return samples_of(learning, tokens), samples_of(heldout, HELD_NEURON_TOKENS)


def neuron_lesson_bytes(spec: ModelSpec, texts: Sequence[Volume], limits: Sequence[int], course: NeuronCourse) -> int:
    """Returns the most bytes on the disk of checkpoints and of the firings of `texts`, cut to `limits` samples."""
    tokens = sum(text.tokens * limit // text.samples + 1 for text, limit in zip(texts, limits, strict=True))
    heads = spec.moe.n * spec.moe.ffn.d_ff * (course.rank + 1)
    numbers = len(spec.moe_layers()) * (heads + course.rank * spec.expert_width)
    return tokens * firing_bytes(spec) + _COPIES * 4 * numbers


def neuron_lesson_of(
    subject: Subject, scorers: tuple[Reads, Reads], block: Callable[[ExpertKey], int], course: NeuronCourse,
    folder: Path, about: Mapping[str, Any], show: Progress, order: NeuronOrder | None = None,
) -> NeuronLesson:  # fmt: skip
    """Returns a lesson with the inputs of the experts of `subject` and the neurons that fire, in a folder, on the text
    of both scorers, to train on and held out; `about` holds all values that decide them. Firings that the folder has
    are used again. `block`: the number of neurons of an expert's block, `order`: the order of neurons in the pack
    (None: the checkpoint's). Raises ConversionError."""
    spec, told = subject.spec, digest_of(about)

    def examples(name: str, scorer: Reads) -> Firings:
        with show(f"neurons {name}", scorer.n_samples, "sample") as bar:
            return firings(folder / name.replace(" ", "-"), told, subject, scorer, bar)

    def first(place: LayerKey) -> list[tuple[Weights, Biases]]:
        supply = subject.calls.supply
        return [(supply.weights(key), supply.biases(key)) for key in _experts(spec, place)]

    blocks = {place: [block(key) for key in _experts(spec, place)] for place in spec.moe_layers()}
    train, heldout = examples("to learn", scorers[0]), examples("to judge by", scorers[1])
    return NeuronLesson(train, heldout, first, blocks, decided_by(about, course), folder, order)


def _experts(spec: ModelSpec, place: LayerKey) -> list[ExpertKey]:
    return [place.expert(number) for number in range(spec.moe.n)]


def guessed_block(spec: ModelSpec, group_size: int, neurons: Neurons) -> int:
    """Returns the number of neurons of a block before widths are known."""
    return per_block(spec, (_GUESSED_BITS,) * len(spec.moe.ffn.projections), Coding(group_size, "F16"), neurons)


def neuron_course_of(settings: Settings, spec: ModelSpec) -> NeuronCourse:
    """Returns the course that a conversion trains its predictor of neurons with."""
    return NeuronCourse(usual_rank(spec), seed=settings.seed)


# The order in which the neurons of each expert lie in a pack by neurons: those that fire together on the calibration
# text lie in one block, and blocks that are asked for most often come first; or neurons lie by how often they fire.

_FEW = 0.1


def neuron_order(bench: Bench, work: WorkDir, account: Account) -> NeuronOrder | None:
    """Returns the order of neurons, which the work directory keeps; None where experts do not lie by neurons. Raises
    ConversionError."""
    if bench.coding.neurons is None:
        return None
    block = guessed_block(bench.spec, bench.coding.quantizer.group_size, bench.coding.neurons)
    about = {"subject": work.path.name, "samples": bench.moment_samples, "per_block": block}
    path = work.path / f"order-{digest_of(about)[:12]}.safetensors"
    with account.step("order of neurons", bench.journal):
        if bench.journal.sealed(path):
            try:
                found = NeuronOrder.from_bytes(path.read_bytes())
                found.check(bench.spec)
            except (OSError, PackError) as error:
                raise ConversionError(f"{path} can't be read ({error}): delete it, and it is counted again") from None
            return found
        ordered = bench.ordered_neurons(block)
        work.save_bytes(path.name, ordered.order.to_bytes(), bench.journal)
    account.say(f"the most frequent {_FEW:.0%} of an expert's neurons do {ordered.covered(_FEW):.0%} of its firing")
    if ordered.shares:
        alone, best = np.mean([(each[0], min(each)) for each in ordered.shares], axis=0)
        grouped = sum(each[1] < each[0] for each in ordered.shares)
        account.say(
            f"neurons that fire together lie in blocks of {block} in {grouped} of {len(ordered.shares)} experts: a "
            f"token asks for {best:.1%} of blocks, in place of {alone:.1%} by frequency"
        )
    return ordered.order


# Training before the measurements, once for a work directory; its result is part of every plan: a hash function in the
# routers' place, or a predictor that names the neurons to compute.

T = TypeVar("T")
Report = RouteReport | NeuronsReport


@dataclass(frozen=True)
class Taught:
    """A trained hash function or predictor. `what` names it and `does` its effect, for a person; `option` asks for it.
    `file`: its name in the pack; `body` makes the file's bytes from the pack's loss with it on held-out text. `report`
    makes its report from its loss alone and the pack's loss without it."""

    what: str
    does: str
    option: str
    instead: Instead
    file: str
    body: Callable[[LossEstimate], bytes]
    report: Callable[[LossEstimate, LossEstimate], Report]


@dataclass(frozen=True)
class School:
    """The training of a hash function or a predictor on the unquantized model, in the folder `name` of the work
    directory, which takes `needed_bytes` at most while it lasts. Its result stays in the work directory, named by the
    `digest` of all values that decide it."""

    bench: Bench
    work: WorkDir
    account: Account
    name: str
    digest: str
    needed_bytes: int
    limits: tuple[int | None, int | None] = (None, None)
    """Samples of both texts; None: all."""

    def learnt(
        self, read: Callable[[bytes], T], write: Callable[[T], bytes], train: Callable[[Path, tuple[Any, Any]], T]
    ) -> T:
        """Returns the result of an earlier training, or of `train`, which gets a folder and the scorers of the text to
        learn and the text to judge by. Raises ConversionError."""
        path, folder = self.work.path / f"{self.name}-{self.digest[:12]}.safetensors", self.work.path / self.name
        if self.bench.journal.sealed(path):
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed right after it had learnt
            try:
                return read(path.read_bytes())
            except (OSError, PackError) as error:
                raise ConversionError(f"{path} can't be read ({error}): delete it, and it is trained again") from None
        trial, material = self.bench.trial, self.bench.material
        check_room(folder, self.needed_bytes, "--work", folder)
        folder.mkdir(exist_ok=True)
        trial.restore()
        scorers = [
            build_scorer(trial, material.tokenizer, text, material.metric, material.extent(limit))
            for text, limit in zip((material.learning, material.ranking), self.limits, strict=True)
        ]
        with transformers_model(trial.checkpoint.path):
            found = train(folder, (scorers[0], scorers[1]))
        self.work.save_bytes(path.name, write(found), self.bench.journal)
        shutil.rmtree(folder, ignore_errors=True)
        return found


def loses_alone(taught: Taught, bench: Bench, references: References, account: Account) -> LossEstimate:
    """Returns the loss of a hash function or a predictor alone, with unquantized experts. Raises TargetMissed where
    that alone misses the target."""
    judge, settings = references.judge, bench.settings
    with account.step(taught.what, bench.journal):
        evaluation = judge.measure(uniform(bench.spec, ORIGINAL), f"{taught.does} alone")
        found = estimate(judge.measure, evaluation, judge.used.acceptance, settings.seed)
    beside = "" if bench.coding.dense_widths is None else " and --dense-bits"
    account.say(f"{taught.does}{beside}, experts unquantized: {judge.text(evaluation)}")
    if settings.target.kind == "loss" and not judge.holds(evaluation):
        raise TargetMissed(
            f"with unquantized experts, {taught.does}{beside}: {judge.text(evaluation)}; the target of "
            f"{judge.planned_loss:.2%} is missed before any expert is quantized: give more text to train on, leave "
            f"{taught.option} out, or take a larger --loss"
        )
    return found


def reported(taught: Taught, bench: Bench, references: References, plan: Plan, alone: LossEstimate) -> Report:
    """Returns the report of a hash function or a predictor, with the plan's loss without it."""
    heldout, used = references.heldout, references.judge.used
    own = heldout.by_itself(plan.assignment, f"the plan without {taught.option}")
    return taught.report(alone, estimate(heldout, own, used.heldout, bench.settings.seed))


# Packs that are routed by a hash function, trained on the unquantized model's own routing.


def check_route(settings: Settings, spec: ModelSpec) -> None:
    """Raises SettingsError for routers that a hash function can't replace."""
    if settings.by_hash and (why := refusal(spec.moe)) is not None:
        raise SettingsError(f"{said('route', 'hash')} {why}: leave it out")


def taught_routing(bench: Bench, work: WorkDir, account: Account) -> Taught:
    """Returns a trained hash function, which takes the routers' place. Raises ConversionError."""
    spec, material = bench.spec, bench.material
    course = course_of(bench.settings, spec)
    about = {"subject": work.path.name, "text": "learning and ranking"}
    needed = lesson_bytes(spec, [material.learned, material.ranked], course)

    def train(folder: Path, scorers: tuple[Any, Any]) -> HashFunction:
        trial = bench.trial
        description = trial.checkpoint.description
        lesson = lesson_of(trial, description, scorers, course, folder, about, account.progress)
        return trained(lesson, course, account.say, account.progress)

    with account.step("hash function", bench.journal):
        school = School(bench, work, account, "hash", decided_by(about, course), needed)
        function = school.learnt(HashFunction.from_bytes, HashFunction.to_bytes, train)
    hits = list(function.layer_hits(spec).values())
    first, more = (sum(column) / len(hits) for column in zip(*hits, strict=True))
    account.say(f"hash function: {first:.1%} of choices among the first it names, {more:.1%} among three times as many")
    top_k = spec.moe.router.top_k

    def body(found: LossEstimate) -> bytes:
        return replace(function, routed=RoutedLoss(top_k, found.loss, found.low, found.high)).to_bytes()

    def report(alone: LossEstimate, routers: LossEstimate) -> RouteReport:
        return RouteReport("hash", top_k, course.width, alone, routers)

    does = "routing by the hash function"
    return Taught("hash function", does, said("route"), HashRouting(function), HASH, body, report)


# Packs of which only the neurons are computed that a predictor names, trained on the neurons that fire in the
# unquantized model.


def taught_neurons(bench: Bench, work: WorkDir, account: Account, order: NeuronOrder | None) -> Taught:
    """Returns a trained predictor of the neurons to compute; all neurons of their blocks are computed with them. It is
    trained in the checkpoint's order of neurons; blocks are of the pack's `order`. Raises ConversionError."""
    spec, material, coding = bench.spec, bench.material, bench.coding
    assert coding.neurons is not None, "settings have seen to that"
    course, neurons = neuron_course_of(bench.settings, spec), coding.neurons
    block = guessed_block(spec, coding.quantizer.group_size, neurons)
    about = {"subject": work.path.name, "text": "learning and ranking", "per_block": block}
    about |= {} if order is None else {"order": order.digest}
    learning, ranking = (
        volume(spec, material.tokenizer, text, material.extent(None)) for text in (material.learning, material.ranking)
    )
    limits = samples_wanted(spec, learning, ranking)
    needed = neuron_lesson_bytes(spec, (learning, ranking), limits, course)

    def train(folder: Path, scorers: tuple[Any, Any]) -> NeuronPredictor:
        lesson = neuron_lesson_of(
            bench.trial, scorers, lambda key: block, course, folder, about, account.progress, order
        )  # fmt: skip
        return trained_neurons(lesson, course, account.say, account.progress)

    with account.step("predictor of neurons", bench.journal):
        school = School(bench, work, account, "neurons", decided_by(about, course), needed, limits)
        predictor = school.learnt(NeuronPredictor.from_bytes, NeuronPredictor.to_bytes, train)
    kept = Kept(*np.mean([layer.kept for layer in predictor.layers.values()], axis=0).tolist())
    account.say(f"predictor of neurons: of rank {course.rank}, {kept_text(kept)} of {block}")

    def body(found: LossEstimate) -> bytes:
        loss = PredictedLoss(found.loss, found.low, found.high)
        return replace(placed(predictor, order), loss=loss).to_bytes()

    def report(alone: LossEstimate, exact: LossEstimate) -> NeuronsReport:
        return NeuronsReport(course.rank, course.missed, *kept, block, alone, exact)

    does, instead = "computing only named neurons", PredictedNeurons(predictor, neurons, order)
    return Taught("predictor of neurons", does, said("neurons"), instead, PREDICTOR, body, report)


def placed(predictor: NeuronPredictor, order: NeuronOrder | None) -> NeuronPredictor:
    """Returns the predictor for neurons in this order; None: in the order that they have."""
    if order is None:
        return predictor
    layers = {}
    for place, layer in predictor.layers.items():
        rows = order.layers[place].astype(np.int64)
        heads = np.take_along_axis(layer.heads, rows[:, :, None], axis=1)
        layers[place] = replace(layer, heads=heads, bias=np.take_along_axis(layer.bias, rows, axis=1))
    return replace(predictor, layers=layers)
