"""The small packs that inputs are made from."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from moert.pack.layout import Neurons
from moert.pack.manifest import SEAL
from moert.pack.reader import Pack
from tests.random_packs import NEURON_SPECS, QUANTIZATION, SPECS, write_pack

WHOLE, IN_BLOCKS, IN_TRELLIS = "rich", "firing", "trellis"


@cache
def _made() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="target-")


def folder() -> Path:
    """Where this process writes; it is gone with it, or is removed by who started it."""
    return Path(_made().name)


@cache
def pack_of(name: str) -> Pack:
    """One of SPECS, or of NEURON_SPECS in blocks of neurons; IN_TRELLIS: with trellis codes."""
    root = folder() / f"{name}.pack"
    if name in SPECS:
        write_pack(root, SPECS[name], QUANTIZATION)
    elif name == IN_TRELLIS:
        write_pack(root, quantization=replace(QUANTIZATION, codes="trellis"))
    else:
        how = replace(QUANTIZATION, neurons=Neurons(512, bundled=False, together=True))
        write_pack(root, NEURON_SPECS[name], how)
    return Pack.open(root)


def manifest_text(name: str) -> str:
    """Without its seal."""
    text = (pack_of(name).root / "manifest.json").read_text(encoding="utf-8")
    return text.rpartition(SEAL)[0] + "\n}"
