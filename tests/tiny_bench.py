"""The settings that tests of `moert bench` run a tiny pack with."""

from __future__ import annotations

from moert.bench.measure import BenchSettings
from moert.budget import CacheLimit
from moert.experts.drive import IoSettings

SETTINGS = BenchSettings(
    cache=CacheLimit(share=0.5), io=IoSettings(False, 1), eviction="lru", predictor="none", threads=1, new_tokens=3
)
