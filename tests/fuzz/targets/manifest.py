"""manifest.json: parsed, and then used as `moert info` does."""

from __future__ import annotations

import json

from moeconv.writer import seal
from moert.engine.budget import Budget
from moert.pack.errors import PackError
from moert.pack.manifest import parse_manifest
from tests.fuzz.target import Target
from tests.fuzz.targets.packs import IN_BLOCKS, IN_TRELLIS, manifest_text
from tests.random_packs import SPECS


def read(body: bytes) -> None:
    """A line of JSON gets a seal that is right, so that what it says is looked at."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:  # which the pack's reader refuses before
        return
    if text.startswith("{") and text.endswith("}"):
        text = seal(text[:-1])
    manifest = parse_manifest(text)
    Budget.of(manifest)
    for entry in manifest.experts:
        manifest.layout(entry)
        if manifest.quantization.neurons is not None:
            manifest.neurons(entry)


def seeds() -> list[bytes]:
    names = (IN_TRELLIS, *SPECS.keys() - {"decoder"}, IN_BLOCKS)  # the first is the decoder with other codes
    texts = [manifest_text(name) for name in sorted(names)]
    return [json.dumps(json.loads(text), separators=(",", ":")).encode() for text in texts]


TARGET = Target(read, (PackError,), seeds, longest=16384)
