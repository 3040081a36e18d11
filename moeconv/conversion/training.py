"""What every training on a finished pack begins and ends with: its text, and a file into the pack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from moeconv.calibration import Splits
from moeconv.conversion.fidelity import Text
from moeconv.conversion.limits import context_note, module_note, samples_note
from moeconv.conversion.pack_text import text_of
from moeconv.conversion.settings import check_counts
from moeconv.errors import ConversionError, SettingsError
from moeconv.measure.metrics import Metric, default_metric, find_metric, is_module
from moeconv.measure.scorers import Subject
from moeconv.measure.scorers.build import Extent, Volume, build_scorer, check_fit, load_tokenizer, volume
from moeconv.measure.scorers.generated import GeneratedScorer
from moeconv.measure.scorers.text import TextScorer
from moeconv.measure.tokenizer import Tokenizer
from moeconv.measure.workdir import LOCK
from moert.pack.files import beside
from moert.pack.manifest import BACKBONE, Manifest
from moert.pack.reader import Pack
from moert.pack.tensors import TOKENIZER
from moert.pack.writer import add_files, check_addable

_LEFT = (LOCK, "to-learn", "to-judge-by", "*.pt", "*.pt.*.tmp")
"""What a training that was stopped may leave in its folder."""


@dataclass(frozen=True)
class Asked:
    """What a user asks of any training; None for what is usual."""

    calib: str | None = None
    heldout: str | None = None
    seed: int | None = None
    samples: int | None = None
    context: int | None = None
    epochs: int | None = None
    work: Path | None = None
    against: str | None = None
    metric: str | None = None

    def __post_init__(self) -> None:
        check_counts(samples=self.samples, context=self.context, seed=self.seed, epochs=self.epochs)


@dataclass(frozen=True)
class TrainingText:
    """What is trained on, and judged by, with their extents and volumes."""

    splits: Splits
    tokenizer: Tokenizer
    metric: Metric
    learning: Extent
    heldout: Extent
    volumes: tuple[Volume, Volume]

    @classmethod
    def of(
        cls, pack: Pack, asked: Asked, usual: Callable[[Volume, Volume], tuple[int | None, int]],
        say: Callable[[str], None],
    ) -> TrainingText:  # fmt: skip
        """`usual` says how many samples (None: all) of both texts are taken where the user does not. Raises
        ConversionError or PackError."""
        spec = pack.manifest.model
        source = text_of(pack, asked.calib, asked.heldout, None if asked.calib is None else asked.seed)
        splits = source.splits
        if note := module_note(asked.metric):
            say(note)
        metric = find_metric(_metric_of(pack, asked, splits))
        check_fit(spec, splits, metric)
        tokenizer = load_tokenizer(pack.file(TOKENIZER))
        if note := context_note(asked.context, spec):
            say(note)
        whole = Extent(asked.samples, asked.context or source.context, None)

        def size(split: str, extent: Extent) -> Volume:
            return volume(spec, tokenizer, getattr(splits, split), extent)

        found = size("calibration", whole), size("heldout", whole)
        if note := samples_note("--samples", asked.samples, found[0].samples, "samples of the calibration text"):
            say(note)
        if asked.samples:
            return cls(splits, tokenizer, metric, whole, whole, found)
        learning, heldout = (replace(whole, limit=limit) for limit in usual(*found))
        used = size("calibration", learning), size("heldout", heldout)
        return cls(splits, tokenizer, metric, learning, heldout, used)

    def scorers(self, subject: Subject) -> tuple[TextScorer | GeneratedScorer, TextScorer | GeneratedScorer]:
        """Of the text to learn, and of that to judge by."""
        return (
            build_scorer(subject, self.tokenizer, self.splits.calibration, self.metric, self.learning),
            build_scorer(subject, self.tokenizer, self.splits.heldout, self.metric, self.heldout),
        )

    def about(self, pack: Pack) -> Mapping[str, Any]:
        """All that decides what the pack's model does with it, as JSON values."""
        return {
            "weights": _weights_of(pack.manifest), "context": self.learning.context, "samples": self.learning.limit,
            "text": [self.splits.digest("calibration"), self.splits.digest("heldout")],
        }  # fmt: skip

    def judged(self) -> Text:
        """What a loss is measured on."""
        return Text(self.tokenizer, self.splits.heldout, self.metric, self.heldout)


def add_learnt(pack: Pack, name: str, body: bytes) -> None:
    """Adds a file to the pack as it is now, which may have got other files since. Raises ConversionError."""
    now = Pack.open(pack.root).manifest
    if _weights_of(now) != _weights_of(pack.manifest):
        raise ConversionError(f"{pack.root} was replaced in the meantime: run the same command again")
    add_files(pack.root, now, {name: body})


def folder_of(pack: Pack, work: Path | None, ending: str, learnt: str) -> Path:
    """Where a training keeps what it needs until it is done, and removes it. Raises SettingsError for a folder with
    what no training has left, and WriteFailed for a pack that can't take the file that is `learnt`."""
    check_addable(pack.root, learnt)
    folder = work or beside(pack.root, ending)
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in there if not any(fnmatch(name, ours) for ours in _LEFT)]
    if there and (others or LOCK not in there):
        raise SettingsError(
            f"{folder} holds {(others or there)[0]}, which no training has left and which would be lost: give another "
            "--work"
        )
    return folder


def _metric_of(pack: Pack, asked: Asked, splits: Splits) -> str:
    """That of the conversion, where its text is used and no other is asked for. Raises SettingsError."""
    quality = pack.manifest.quality
    if asked.metric is not None:
        return asked.metric
    if asked.calib is None and quality is not None:
        if is_module(quality.metric):  # a program, which only a user may name: the pack may have brought its own
            raise SettingsError(f"the pack was judged by {quality.metric}, a module: say where it is with --metric")
        return quality.metric
    return splits.metric or default_metric(splits.seq2seq, splits.choices)


def _weights_of(manifest: Manifest) -> list[str]:
    """What decides what the pack's model says."""
    files = [manifest.files[name].sha256 for name in (BACKBONE, "config.json", TOKENIZER)]
    return [*files, *(entry.sha256 for entry in manifest.experts)]
