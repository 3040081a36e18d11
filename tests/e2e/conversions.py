"""Conversions inside the test's own process, and what they said on the way."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from moeconv.artifacts import ConversionReport, Target
from moeconv.conversion.conversion import Conversion, directory_of, subject_of
from moeconv.conversion.material import Coding, Material
from moeconv.conversion.measuring import Bench, References
from moeconv.conversion.settings import PLAIN_QUANTIZER, TEXTLESS_QUANTIZER, Settings
from moeconv.measure.workdir import Journal
from moeconv.progress import Bar
from moeconv.promise.judging import Judge
from moert.pack.manifest import Manifest

ENCODERS = ("switch", "switch_transformers", "nllb-moe")
"""What reads an input and writes another text."""
WORDS = ["ab", "cde", "fghi", "kl", "mno", "pqrs", "tu", "vwx", "yz", "aeiou"]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def settings_for(sources: dict[str, Path], family: str, tmp_path: Path, **changes: Any) -> Settings:
    """Tiny random models are noisy, so that a bound with confidence would leave nothing to choose: none by default.
    Widths are of the experts alone unless `dense_bits` says otherwise, and plain ones unless `quantizer` does (None:
    the default), of which there are fewer.

    `loss` is short for a target of that kind.
    """
    if "loss" in changes:
        changes["target"] = Target("loss", changes.pop("loss"))
    base: dict[str, Any] = {
        "model": str(sources[family]), "out": tmp_path / "m.pack", "work": tmp_path / "work", "confidence": None,
        "calib": str(sources["pairs" if family in ENCODERS else "text"]), "metric": "perplexity", "context": 32,
        "max_new_tokens": 6 if family in ENCODERS else None, "dense_bits": "source",
    }  # fmt: skip
    if changes.get("calib", "") is None:
        base |= {"metric": None, "max_new_tokens": None, "confidence": 0.95}
    if changes.get("bits") != (16,):
        base["quantizer"] = TEXTLESS_QUANTIZER if changes.get("calib", "") is None else PLAIN_QUANTIZER
    return Settings(**{**base, **changes})


class Unseen:
    """A bar that nobody looks at."""

    def update(self, n: int) -> None:
        pass


class Done:
    """A conversion that ran: what it wrote, and in `said` its messages and the sweep's start, in order. `bench` and
    `judge` are what it measured with, made again over the same journal."""

    def __init__(self, settings: Settings) -> None:
        self.said: list[str] = []
        self.settings = settings
        self.manifest: Manifest
        self.report: ConversionReport
        self.manifest, self.report = Conversion(settings, self.said.append, self._progress).run()

    @cached_property
    def bench(self) -> Bench:
        coding = Coding.open(self.settings)
        material = Material.read(self.settings, coding.checkpoint)
        folder = self.settings.work / directory_of(subject_of(material, coding))
        journal = Journal(folder / "journal.jsonl", folder.name)
        return Bench(coding, material, journal, coding.moments_in(folder))

    @cached_property
    def judge(self) -> Judge:
        return References.of(self.bench).judge

    @property
    def tried(self) -> list[int]:
        """The widths that all experts had together."""
        found = (re.match(r"all experts at +(\d+) bits: ", line) for line in self.said)
        return [int(match[1]) for match in found if match]

    @contextmanager
    def _progress(self, label: str, total: int, unit: str = "probe") -> Iterator[Bar]:
        self.said.append(f"{label} of {total}")
        yield Unseen()

    def swept(self) -> int:
        """Measurements that the sweep lacked; 0 where there was none."""
        return next((int(line.split()[-1]) for line in self.said if line.startswith("sweep of ")), 0)


def check_parts(material: Material) -> None:
    """No text is in two of the parts that a conversion with something to learn has."""
    parts = material.learning, material.ranking, material.acceptance, material.splits.heldout
    texts = [{sample.source for sample in part} for part in parts]
    assert all(texts)
    assert sum(map(len, texts)) == len(set.union(*texts))
