"""One sample of text, and the two lists of samples that a conversion works with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

SHORT_ROW = 80  # characters


@dataclass(frozen=True)
class Sample:
    """Running text: `source` alone. Input and target: `source` and `target`. Input and choices: `source`, the texts
    that its label may have, and in `label` the right one's place; `target` is then `choices[label]`. `document` names
    what the sample is a part of (see `calibration.documents`), empty where nothing tells; samples of equal text are
    equal whatever they are a part of."""

    source: str
    target: str = ""
    choices: tuple[str, ...] = ()
    label: int = -1
    document: str = field(default="", compare=False)

    @property
    def key(self) -> tuple[str, str]:
        """Equal for samples that differ in white space, or in the order of their choices, alone."""
        return " ".join(self.source.split()), " ".join(self.target.split())

    @property
    def is_short_row(self) -> bool:
        """True for a short row of running text: a blank line or a heading says nothing when it stands twice."""
        return not self.target and len(self.source) < SHORT_ROW


@dataclass(frozen=True)
class Splits:
    """Two disjoint lists of samples, and a hash of each. `seq2seq` is true of samples that have an input and a target
    (or choices), false of running text. `metric` is the catalogue's choice, if it has one. `why`: in words what the
    documents of the calibration text are."""

    name: str
    seq2seq: bool
    calibration: tuple[Sample, ...]
    heldout: tuple[Sample, ...]
    metric: str | None = None
    why: str = ""

    @property
    def choices(self) -> bool:
        """True when the samples have choices."""
        return bool(self.calibration and self.calibration[0].choices)

    def digest(self, split: str) -> str:
        return samples_digest(self.calibration if split == "calibration" else self.heldout)


def samples_digest(samples: Iterable[Sample]) -> str:
    """sha256 over the samples' texts in their order."""
    digest = hashlib.sha256()
    for sample in samples:
        parts = [sample.source, sample.target, *([sample.choices] if sample.choices else [])]
        digest.update(json.dumps(parts).encode() + b"\n")
    return digest.hexdigest()
