"""What a conversion measures with, over the journal in its work directory, without the conversion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moeconv.conversion.conversion import directory_of, subject_of
from moeconv.conversion.material import Coding, Material
from moeconv.conversion.measuring import Bench
from moeconv.conversion.settings import Settings
from moeconv.measure.workdir import WorkDir


@contextmanager
def opened(settings: Settings) -> Iterator[Bench]:
    """Raises ConversionError for what these settings, or the work directory, don't allow."""
    coding = Coding.open(settings)
    material = Material.read(settings, coding.checkpoint)
    directory = directory_of(subject_of(material, coding))
    with WorkDir(settings.work / directory) as work:
        yield Bench(coding, material, work.journal(directory), coding.moments_in(work.path))
