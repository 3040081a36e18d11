"""neurons.safetensors: the checksums of an expert's pieces."""

from __future__ import annotations

from moeconv.matrices import read_expert
from moeconv.packing.packed import check_pieces
from moert.pack.errors import PackError
from moert.pack.layout import NEURONS
from moert.pack.reader import checksums_from_bytes
from tests.fuzz.described import described, file_of
from tests.fuzz.target import Target
from tests.fuzz.targets.packs import IN_BLOCKS, pack_of


def read(body: bytes) -> None:
    pack = pack_of(IN_BLOCKS)
    sums = checksums_from_bytes(file_of(body), pack.manifest)
    key = pack.manifest.experts[0].key
    check_pieces(key, pack.neurons(key), read_expert(pack, key), sums[key])


def seeds() -> list[bytes]:
    file = (pack_of(IN_BLOCKS).root / NEURONS).read_bytes()
    return [described(file), file]


TARGET = Target(read, (PackError,), seeds)
