"""neurons.safetensors: a checksum of each piece of an expert, so that a piece which was read alone can be trusted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moert.pack.blocks import U32, checksums
from moert.pack.codec import U8
from moert.pack.errors import HashMismatch
from moert.pack.manifest import Manifest
from moert.pack.model_spec import ExpertKey
from moert.pack.neurons import NEURONS, NeuronLayout
from moert.pack.tensors import TensorFile, to_bytes

VERSION = 1


def checksums_to_bytes(of: Mapping[ExpertKey, U32]) -> bytes:
    """The file's content; equal checksums give equal bytes."""
    metadata: dict[str, object] = {"format": "model.pack neurons", "version": VERSION}
    return to_bytes({str(key): of[key] for key in sorted(of)}, metadata)


def checksums_from_bytes(body: bytes, manifest: Manifest) -> dict[ExpertKey, U32]:
    """Of each expert, uint32 [n_checksums]: see moert.pack.blocks.checksums. Raises HeaderInvalid, FormatTooNew."""
    file = TensorFile(NEURONS, body, VERSION, "convert the model")
    file.only(str(entry.key) for entry in manifest.experts)
    found: dict[ExpertKey, U32] = {}
    for entry in manifest.experts:
        expected = manifest.neurons(entry).n_checksums
        sums: U32 = file.tensor(str(entry.key), np.uint32)
        if len(sums) != expected:
            raise file.wrong(f"{entry.key} should have {expected} checksums, found {len(sums)}")
        found[entry.key] = sums
    return found


def check_pieces(key: ExpertKey, layout: NeuronLayout, buffer: U8, expected: U32) -> None:
    """That the pieces of an expert, all of whose bytes are in `buffer`, are those that `expected` is of. Raises
    HashMismatch."""
    if not np.array_equal(checksums(layout, buffer), expected):
        raise HashMismatch(f"{NEURONS}: a checksum of {key} is not that of its neurons: convert the model again")
