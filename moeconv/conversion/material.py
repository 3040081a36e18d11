"""The material of a conversion: checkpoint and quantizer, text, tokenizer, metric."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moeconv.calibration import RANKING_SHARE, Sample, Splits, divide, load_splits, samples_digest
from moeconv.conversion.settings import (
    DEFAULT_CONTEXT,
    DEFAULT_MEMORY,
    DEFAULT_QUANTIZER,
    Settings,
    neurons_of,
)
from moeconv.dense import dense_of, usual_widths, weighed
from moeconv.errors import CalibrationError, ConversionError, SettingsError
from moeconv.measure.metrics import Metric, default_metric, find_metric, is_module
from moeconv.measure.scorers import Scorer, Subject, Tokenizer
from moeconv.measure.scoring import Extent, Volume, build_scorer, check_fit, load_tokenizer, volume
from moeconv.packing.emit import chat_of
from moeconv.plan.problem import Storage
from moeconv.plan.search import check_budget
from moeconv.quantizers import GROUP_SIZES, QUANTIZERS, Quantizer
from moeconv.quantizers.coder import DenseCoder, ExpertCoder
from moeconv.quantizers.moments import Moments, moments_bytes
from moeconv.quantizers.source import codes_of_source
from moeconv.report.writer import read_report
from moeconv.source.checkpoint import Checkpoint
from moeconv.source.outline import json_object
from moeconv.tuned import said
from moert.pack.layout import Neurons
from moert.pack.manifest import Dense
from moert.pack.model_spec import ModelSpec
from moert.pack.reader import Pack
from moert.pack.tensors import TOKENIZER

# The coding of a checkpoint's weights: its quantizer, and the widths of the matrices outside its experts.


@dataclass(frozen=True)
class Coding:
    checkpoint: Checkpoint
    quantizer: Quantizer
    dense: DenseCoder
    neurons: Neurons | None = None
    """How experts lie in blocks of neurons; None where they do not."""

    @classmethod
    def open(cls, settings: Settings) -> Coding:
        """Opens the checkpoint for coding. Raises CheckpointError, UnsupportedModel or SettingsError."""
        return cls.of(Checkpoint.open(settings.model), settings)

    @classmethod
    def of(cls, checkpoint: Checkpoint, settings: Settings) -> Coding:
        """Returns the coding of a checkpoint. Raises UnsupportedModel or SettingsError."""
        chat_of(checkpoint.path)  # so that a template that can't be used is not found after hours
        quantizer = QUANTIZERS[settings.coded_by](settings.group_size)
        mxfp4, piece_bytes = checkpoint.description.mxfp4, settings.piece_bytes
        plain = quantizer.codes == "plain"  # others do not lie in blocks of neurons
        neurons = neurons_of(settings.laid_out, checkpoint.spec, mxfp4, piece_bytes) if plain else None
        if neurons is not None and settings.predicts:
            neurons = replace(neurons, together=False)  # of rows, too, only some are read
        wanted = usual_widths(checkpoint.spec) if settings.usual_dense else settings.dense_bits
        dense = DenseCoder(checkpoint, dense_of(checkpoint.spec, wanted), settings.chooses_dense)
        return cls(checkpoint, quantizer, dense, neurons)

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    @property
    def storage(self) -> Storage:
        return Storage(self.quantizer.group_size, self.checkpoint.description.mxfp4, self.neurons, self.quantizer.codes)

    @property
    def dense_widths(self) -> Dense | None:
        """None where nothing outside the experts is quantized."""
        return self.dense.dense

    @property
    def weighed(self) -> list[str]:
        """The matrices outside the experts whose errors are weighed by their inputs."""
        return weighed(self.spec) if self.dense.chooses and self.quantizer.wants == "products" else []

    def check(self, settings: Settings, layered: bool = False) -> None:
        """Raises TargetMissed for a size that no plan has, SettingsError where the moments that the quantizer needs do
        not fit in --memory."""
        check_budget(settings.target, self.spec, min(settings.bits), self.storage)
        wants = self.quantizer.wants
        needed = 0 if wants == "nothing" or layered else moments_bytes(self.spec, wants, self.weighed)
        if needed > (settings.memory_bytes or DEFAULT_MEMORY):
            raise SettingsError(
                f"--quantizer {self.quantizer.name} collects {needed / 1e6:,.0f} MB about the inputs of this model's "
                f"experts: give --memory {math.ceil(needed / 1e6):,}MB or more, or take --quantizer group"
            )

    def moments_in(self, folder: Path) -> Path | None:
        """Returns the file with the moments of the experts' inputs; None where the quantizer needs none."""
        wants = self.quantizer.wants
        return None if wants == "nothing" else folder / f"moments-{wants}.safetensors"

    def beside_in(self, folder: Path, layered: bool) -> Path | None:
        """Returns the file with the moments of `weighed`, which has no others where the model goes through memory layer
        by layer; None where no errors are weighed."""
        if not self.weighed:
            return None
        return folder / "moments-beside.safetensors" if layered else self.moments_in(folder)

    def weighing(self, moments: Path | None) -> Coding:
        """Returns this coding with the errors of matrices outside the experts weighed by the moments in a file."""
        return replace(self, dense=self.dense.weighing(moments))

    def experts(self, moments: Path | None) -> ExpertCoder:
        known = None if moments is None else Moments.load(moments)
        return ExpertCoder(self.checkpoint, self.quantizer, known, neurons=self.neurons)


# The text of a conversion in its parts, with tokenizer and metric, checked before anything is measured.

LEARNING_SHARE = 0.5
"""Share of the calibration text that trains a hash function or a predictor of neurons, where there is one."""
NOTHING = Volume(0, 0, 0, np.zeros(0, np.int64), 0.0)


@dataclass(frozen=True)
class Material:
    """The text that a conversion measures on. `ranking` and `acceptance` are the two parts of the calibration text;
    route=hash and neurons=predicted add a third, `learning`, which only their training sees. `judged` and `heldout`
    are the volumes that plans are judged on and that the result is measured on."""

    settings: Settings
    splits: Splits
    metric: Metric
    metric_name: str
    tokenizer: Tokenizer
    ranking: tuple[Sample, ...]
    acceptance: tuple[Sample, ...]
    learning: tuple[Sample, ...]
    learned: Volume
    ranked: Volume
    judged: Volume
    heldout: Volume

    @classmethod
    def read(cls, settings: Settings, checkpoint: Checkpoint) -> Material:
        """Reads and checks the text of a conversion. Raises CalibrationError or SettingsError."""
        assert settings.calib is not None
        splits = load_splits(
            settings.calib, settings.heldout, seed=settings.seed, fields=settings.fields, tokenizer=checkpoint.path
        )
        if settings.metric is None and splits.metric is not None and is_module(splits.metric):
            raise SettingsError(f"{splits.name} asks for the metric {splits.metric}, a module: name it with --metric")
        named = _absolute(settings.metric or splits.metric or default_metric(splits.seq2seq, splits.choices))
        metric = find_metric(named)
        check_fit(checkpoint.spec, splits, metric, settings.max_new_tokens)
        tokenizer = load_tokenizer(checkpoint.path / TOKENIZER, checkpoint.spelled)
        learning: tuple[Sample, ...] = ()
        rest = splits.calibration
        if settings.learns:
            learning, rest = divide(rest, splits.seq2seq, LEARNING_SHARE, settings.seed)
        ranking, acceptance = divide(rest, splits.seq2seq, RANKING_SHARE, settings.seed)

        def size(samples: Sequence[Sample], limit: int | None) -> Volume:
            return volume(checkpoint.spec, tokenizer, samples, _extent(settings, limit))

        return cls(
            settings, splits, metric, named, tokenizer, ranking, acceptance, learning,
            size(learning, None) if learning else NOTHING,
            size(ranking, settings.sweep_samples), size(acceptance, settings.samples),
            size(splits.heldout, settings.heldout_samples),
        )  # fmt: skip

    @property
    def judged_share(self) -> float:
        """The share of the calibration text that plans are judged on."""
        return (1 - RANKING_SHARE) * (1 - LEARNING_SHARE if self.learning else 1)

    @property
    def metric_file(self) -> list[Path]:
        """The module of a metric of the user's own; empty for others."""
        file, module, _ = self.metric_name.partition(".py")
        return [Path(file + module)] if module else []

    @property
    def metric_sha256(self) -> str | None:
        return next((hashlib.sha256(path.read_bytes()).hexdigest() for path in self.metric_file), None)

    @property
    def documents_sha256(self) -> str:
        """The sha256 of the samples' documents, which decide how text is divided and cut into windows."""
        names = [[sample.document for sample in part] for part in (self.splits.calibration, self.splits.heldout)]
        return hashlib.sha256(json.dumps(names).encode()).hexdigest()

    @property
    def judged_texts(self) -> tuple[str, ...]:
        """Digests of the judged texts: the acceptance text, the held-out text, and all text together, sorted, since
        another seed may divide it in another way."""
        splits = self.splits
        every = sorted((*splits.calibration, *splits.heldout), key=lambda sample: (*sample.key, sample.choices))
        return tuple(map(samples_digest, (self.acceptance, splits.heldout, every)))

    def extent(self, limit: int | None) -> Extent:
        """Returns the extent of at most `limit` samples of a text."""
        return _extent(self.settings, limit)

    def scorer(self, subject: Subject, samples: Sequence[Sample], limit: int | None) -> Scorer:
        return build_scorer(subject, self.tokenizer, samples, self.metric, self.extent(limit))


def _extent(settings: Settings, limit: int | None) -> Extent:
    return Extent(limit, settings.context, settings.max_new_tokens)


def _absolute(metric: str) -> str:
    """Returns the name of a metric; the path of a module becomes absolute, since a sweep's worker may be started
    anywhere."""
    return str(Path(metric).absolute()) if ".py" in metric else metric


# Notes on options that ask for more text than there is or have no effect, and on a tokenizer that does not go with its
# model.

_MOST_TOKENS = 0.9  # of a vocabulary: its last rows are often only padding


def as_stored(settings: Settings, checkpoint: Checkpoint) -> tuple[Settings, str | None]:
    """Returns the settings with a quantizer that keeps the checkpoint's codes of four or eight bits, and the note on
    it, where that width alone is asked for and no quantizer is named; else the settings and None."""
    scheme = checkpoint.description.scheme
    group = None if scheme is None else scheme.group
    named = (settings.quantizer, settings.group_size, settings.plain_for) != (None, None, None)
    if settings.bits not in ((4,), (8,)) or named or group not in GROUP_SIZES:
        return settings, None
    (bits,), first = settings.bits, checkpoint.expert(checkpoint.spec.expert_keys()[0])
    if any(codes_of_source(weights, group, int(bits)) is None for weights in first.values()):
        return settings, None
    note = f"experts have {bits} bits in groups of {group} in the checkpoint: they are stored as they are, without loss"
    return replace(settings, quantizer="source", group_size=group), f"note: {note} (any that do not are coded by group)"


def plain_note(settings: Settings) -> str | None:
    """Returns the note that the default quantizer gives way to one of plain codes; None where it does not."""
    if settings.quantizer is not None or settings.plain_for is None:
        return None
    return (
        f"note: {settings.plain_for} needs plain codes: --quantizer {settings.coded_by} in place of {DEFAULT_QUANTIZER}"
    )


def samples_note(name: str, asked: int | None, there: int, what: str) -> str | None:
    """Returns the note that a text has fewer samples (`there`) than the user asked for; None where it has enough.
    `what` names the samples."""
    if asked is None or there >= asked:
        return None
    return f"note: {said(name, f'{asked:,}')}: there are only {there:,} {what}, all of them are used"


def module_note(metric: str | None) -> str | None:
    """Returns the warning before a metric runs that is the path of a module; None for other metrics."""
    if metric is None or not is_module(metric):
        return None
    return (
        f"note: --metric {metric} is a program: it runs now, here, and may do everything that you may; take only one "
        "that you trust"
    )


def context_note(context: int | None, spec: ModelSpec) -> str | None:
    """Returns the note that `--context` has no effect or is cut; None without the option, or where windows are as long
    as it says."""
    limit = spec.max_positions
    if context is None:
        return None
    if spec.encoder is not None:
        return f"note: --context {context:,} has no effect: an encoder-decoder model takes each input whole"
    if limit is None or context <= limit:
        return None
    return (
        f"note: --context {context:,}: the model takes at most {limit:,} tokens (its config.json), windows have as many"
    )


def end_note(checkpoint: Checkpoint) -> str | None:
    """Returns a line on an end token of the tokenizer at which texts of the model do not end; None without one."""
    said = (json_object(checkpoint.path / "tokenizer_config.json") or {}).get("eos_token")
    name = said.get("content") if isinstance(said, dict) else said
    if not isinstance(name, str) or not (checkpoint.spelled or (checkpoint.path / TOKENIZER).is_file()):
        return None
    try:
        number = Tokenizer.read(checkpoint.path / TOKENIZER, checkpoint.spelled).get_vocab().get(name)
    except SettingsError:  # raised again where the tokenizer is needed
        return None
    ends = checkpoint.spec.tokens.eos
    if number is None or number in ends:
        return None
    own = ", ".join(map(str, ends)) or "none"
    return (
        f"note: the tokenizer's end token is {name!r} ({number}), the model's by generation_config.json or config.json "
        f"{own}; moert chat stops at all of them, moert run at the model's alone"
    )


def vocabulary_note(tokenizer: Tokenizer, spec: ModelSpec) -> str | None:
    """Returns the note that a tokenizer has tokens beyond the model's vocabulary, or lacks many of its tokens; None
    where they go together. Text with a token beyond the vocabulary is refused; a few tokens are always missing."""
    numbers = tokenizer.get_vocab(with_added_tokens=True)
    beyond = sorted((number, name) for name, number in numbers.items() if number >= spec.vocab_size)
    if beyond:
        number, name = beyond[0]
        return (
            f"note: {len(beyond):,} token(s) of tokenizer.json have no place in the model, whose vocab_size is "
            f"{spec.vocab_size:,}: {name!r} is token {number:,}; text with them is refused"
        )
    if len(numbers) < _MOST_TOKENS * spec.vocab_size:
        return (
            f"note: tokenizer.json knows {len(numbers):,} of the model's {spec.vocab_size:,} tokens: is it the "
            "model's own"
        )
    return None


def notes(settings: Settings, spec: ModelSpec, ranked: int, judged: int, heldout: int) -> Iterator[str]:
    """Yields a note for each option of a conversion that is cut; `ranked`, `judged` and `heldout` are the numbers of
    samples that are used."""
    found = (
        context_note(None if settings.context == DEFAULT_CONTEXT else settings.context, spec),
        samples_note("samples", settings.samples, judged, "calibration samples to judge plans by"),
        samples_note("sweep_samples", settings.sweep_samples, ranked, "calibration samples to rank experts by"),
        samples_note("heldout_samples", settings.heldout_samples, heldout, "held-out samples"),
    )
    return (note for note in found if note)


# The text for work on a finished pack: the user's, or the text that the pack was converted with.


@dataclass(frozen=True)
class PackText:
    """The text for work on a finished pack. `context`: tokens in a window of running text."""

    splits: Splits
    context: int


def text_of(pack: Pack, calib: str | None, heldout: str | None, seed: int | None) -> PackText:
    """Returns the text that the user names, or the one that the pack was converted with. Raises ConversionError."""
    if calib is None and (heldout is not None or seed is not None):
        raise SettingsError("--heldout and --seed go with --calib: without it the pack's own text is used")
    try:
        report = read_report(pack)
    except ConversionError as error:
        if calib is None:
            raise SettingsError(
                f"the pack does not say what text it was converted with ({error}): give --calib"
            ) from None
        report = None
    context = DEFAULT_CONTEXT if report is None else report.context
    if calib is not None:
        return PackText(load_splits(calib, heldout, seed=seed or 0, tokenizer=pack.root), context)
    assert report is not None
    if not report.calibration_source:
        raise SettingsError("--calib is missing: the pack does not say what text it was converted with")
    try:
        splits = load_splits(
            report.calibration_source, report.heldout_source, seed=report.seed, fields=report.fields,
            tokenizer=pack.root,
        )  # fmt: skip
    except CalibrationError as error:
        raise SettingsError(f"the pack's own calibration text can't be used ({error}): give --calib") from None
    return PackText(splits, context)
