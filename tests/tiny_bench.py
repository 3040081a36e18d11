"""The settings that tests of `moert bench` run a tiny pack with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moert.bench.measure import BenchSettings
from moert.engine.settings import EngineSettings

SETTINGS = BenchSettings(EngineSettings(cache="50%", io="buffered,1", eviction="lru", predict="none", threads=1), 3)


def but(**changes: Any) -> BenchSettings:
    """These, with other settings of the engine."""
    return replace(SETTINGS, engine=SETTINGS.engine.but(**changes))
