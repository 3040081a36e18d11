"""hash.safetensors: read, held against the model, and run on a few tokens."""

from __future__ import annotations

import numpy as np

from moert.beside.sida.network import readers
from moert.kernels import REFERENCE, open_backend
from moert.pack.errors import PackError
from moert.pack.learnt import HashFunction, RoutedLoss
from tests.fuzz.described import described, file_of
from tests.fuzz.target import Target
from tests.random_hash import random_hash
from tests.random_packs import DECODER, ENCODER_DECODER

_BACKEND = open_backend(REFERENCE, 1)


def read(body: bytes) -> None:
    function = HashFunction.from_bytes(file_of(body))
    spec = DECODER if "encoder" not in function.stacks else ENCODER_DECODER
    function.check(spec)
    function.layer_hits(spec)
    rows = np.ones((2, spec.d_model), np.float32)
    with np.errstate(all="ignore"):
        for name, reader in readers(function, _BACKEND).items():
            if name == "encoder":
                reader.numbers(reader.encode(rows, [2]))
            else:
                reader.numbers(reader.read(rows, [2], [reader.begin()]))


def seeds() -> list[bytes]:
    routed = RoutedLoss(2, 0.01, 0.0, 0.02)
    files = [random_hash(DECODER, routed=routed).to_bytes(), random_hash(ENCODER_DECODER).to_bytes()]
    return [described(file) for file in files] + files[:1]


TARGET = Target(read, (PackError,), seeds, longest=16384)
