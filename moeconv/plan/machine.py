"""The machine that is stated where none is asked: what docs/models.md reckons with, and on any machine what a layer and
a missing expert cost, which no short measurement shows. Pure but for reading machine.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from moeconv.plan.outlook import Host
from moeconv.plan.pace import Processor

DATA = "machine.json"
SOURCE = "python -m recipes.bench.outlook_machine"
DEFAULT_DRIVE = 500e6
"""Bytes a second where nothing is known of a drive: a SATA SSD."""


@dataclass(frozen=True)
class Machine:
    """`name`: processor, cores and instruction set."""

    name: str
    processor: Processor
    host: Host

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Machine:
        """Of what machine.json has."""
        of = values["processor"]
        speeds = {int(bits): float(speed) for bits, speed in of["kernel_bytes_per_s"].items()}
        return cls(values["name"], Processor(speeds, of["layer_s"], of["miss_s"]), Host(**values["host"]))


@cache
def stated() -> Machine:
    """The one in machine.json."""
    return Machine.from_json(json.loads((files("moeconv.plan") / DATA).read_text(encoding="utf-8")))


def processor_of(facts: dict[str, Any]) -> Processor | None:
    """Of what `moert info --system --json` says, with the stated costs of layers and misses; None where it has measured
    no kernels."""
    measured = facts["kernel_bytes_per_s"]
    if measured is None:
        return None
    return replace(stated().processor, kernel_bytes_per_s={int(bits): speed for bits, speed in measured.items()})
