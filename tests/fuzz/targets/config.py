"""config.json of every family."""

from __future__ import annotations

import json
from pathlib import Path

from moeconv.errors import ConversionError
from moeconv.source.outline import Outline
from tests.fuzz.target import Target
from tests.published import PUBLISHED


def read(body: bytes) -> None:
    """The config, and in a second line what generation_config.json says."""
    config, _, generation = body.partition(b"\n")
    try:
        found, beside = json.loads(config), json.loads(generation or b"{}")
    except (ValueError, RecursionError):  # refused before
        return
    if isinstance(found, dict) and isinstance(beside, dict):
        outline = Outline.of(found, beside, Path("model") / "config.json")
        _ = outline.spec.tensors


def seeds() -> list[bytes]:
    """One of each family, the shortest."""
    longest_first = sorted(PUBLISHED.values(), key=lambda config: -len(json.dumps(config)))
    of_family = {str(config["model_type"]): config for config in longest_first}
    return [json.dumps(config, separators=(",", ":")).encode() + b"\n{}" for config in of_family.values()]


TARGET = Target(read, (ConversionError,), seeds, longest=8192)
