"""A conversion of whose pack only those neurons are computed that a predictor names, trained on what fires in the
unquantised model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moeconv.artifacts import NeuronsReport
from moeconv.conversion.account import Account
from moeconv.conversion.bench import Bench
from moeconv.conversion.neuron_lessons import (
    guessed_block,
    neuron_course_of,
    neuron_lesson_bytes,
    neuron_lesson_of,
    neurons_decided_by,
    samples_wanted,
)
from moeconv.conversion.taught import School, Taught
from moeconv.foresight.naming import PredictedNeurons
from moeconv.foresight.neurons import kept_text, trained_neurons
from moeconv.measure.scorers.build import volume
from moeconv.measure.workdir import WorkDir
from moert.pack.manifest import LossEstimate
from moert.pack.neurons import PREDICTOR, Kept, NeuronOrder, NeuronPredictor, PredictedLoss


def taught_neurons(bench: Bench, work: WorkDir, account: Account, order: NeuronOrder | None) -> Taught:
    """What says which neurons are computed, and with them those of their blocks, in which they will lie in this order.
    It is trained in the checkpoint's own. Raises ConversionError."""
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
        school = School(bench, work, account, "neurons", neurons_decided_by(about, course), needed, limits)
        predictor = school.learnt(NeuronPredictor.from_bytes, NeuronPredictor.to_bytes, train)
    kept = Kept(*np.mean([layer.kept for layer in predictor.layers.values()], axis=0).tolist())
    account.say(f"predictor of neurons: of rank {course.rank}, {kept_text(kept)} of {block}")

    def body(found: LossEstimate) -> bytes:
        loss = PredictedLoss(found.loss, found.low, found.high)
        return replace(placed(predictor, order), loss=loss).to_bytes()

    def report(alone: LossEstimate, exact: LossEstimate) -> NeuronsReport:
        return NeuronsReport(course.rank, course.missed, *kept, block, alone, exact)

    does, instead = "computing only named neurons", PredictedNeurons(predictor, neurons, order)
    return Taught("predictor of neurons", does, "--neurons", instead, PREDICTOR, body, report)


def placed(predictor: NeuronPredictor, order: NeuronOrder | None) -> NeuronPredictor:
    """The same of neurons in this order; None: as they are."""
    if order is None:
        return predictor
    layers = {}
    for place, layer in predictor.layers.items():
        rows = order.layers[place].astype(np.int64)
        heads = np.take_along_axis(layer.heads, rows[:, :, None], axis=1)
        layers[place] = replace(layer, heads=heads, bias=np.take_along_axis(layer.bias, rows, axis=1))
    return replace(predictor, layers=layers)
