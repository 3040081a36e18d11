"""Damage anywhere in a pack either raises a PackError or changes nothing that can be read."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_packs import NEURON_SPECS, QUANTIZATION, SPECS, read_all, write_pack

from moert.pack.errors import PackError
from moert.pack.layout import Neurons
from moert.pack.manifest import Quantization
from moert.pack.model_spec import ModelSpec
from moert.pack.reader import Pack

TARGETS = ["manifest.json", "backbone.safetensors", "experts/D00/E000.safetensors", "experts/D02/E002.safetensors"]


class Sound:
    """A pack that is fine, and all that can be read from it."""

    def __init__(self, root: Path, spec: ModelSpec, quantization: Quantization) -> None:
        self.root = root
        write_pack(root, spec, quantization)
        self.values: Any = read_all(root)
        self.bodies = {name: (root / name).read_bytes() for name in TARGETS}

    def survives(self, name: str, body: bytes) -> bool:
        """True if the pack with this body is read with the same values, False if it is refused; else fails."""
        (self.root / name).write_bytes(body)
        try:
            found = read_all(self.root)
            assert found == self.values, f"{name} was read with other values"
            list(Pack.open(self.root).verify_hashes())
        except PackError as error:
            assert "\n" not in str(error)  # noqa: PT017
            return False
        finally:
            (self.root / name).write_bytes(self.bodies[name])
        return True


@pytest.fixture(scope="module", params=["decoder", "rich", "firing", "trellis"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sound]:
    root = tmp_path_factory.mktemp("fuzz") / "model.pack"
    if request.param in SPECS:
        yield Sound(root, SPECS[request.param], QUANTIZATION)
    elif request.param == "trellis":
        yield Sound(root, SPECS["decoder"], replace(QUANTIZATION, codes="trellis"))
    else:  # a pack with experts in blocks of neurons
        yield Sound(
            root, NEURON_SPECS[request.param], replace(QUANTIZATION, neurons=Neurons(512, bundled=False, together=True))
        )
    shutil.rmtree(root)


def damaged(body: bytes, rng: random.Random) -> bytes:
    """One to three accidents: a flipped bit, a changed byte, bytes lost, put in, repeated or zeroed."""
    result = bytearray(body)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(result)) if result else 0
        count = rng.choice([1, 1, 2, 8, 64, 4096])
        kind = rng.randrange(6)
        if kind == 0 and result:
            result[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and result:
            result[at] = rng.choice(b'0123456789-.eE"{}[]:, \n\\\0\xff')
        elif kind == 2:
            del result[at : at + count]
        elif kind == 3:
            result[at:at] = rng.randbytes(count)
        elif kind == 4:
            result[at:at] = result[at : at + count]
        else:
            result[at : at + count] = bytes(len(result[at : at + count]))
    return bytes(result)


@pytest.mark.parametrize("name", TARGETS)
def test_random_damage(sound: Sound, name: str) -> None:
    rng = random.Random(f"damage of {name}")
    body = sound.bodies[name]
    refused = 0
    for _ in range(150):
        changed = damaged(body, rng)
        if changed == body:
            continue
        refused += not sound.survives(name, changed)
    assert refused > 120


def test_every_digit_of_the_manifest(sound: Sound) -> None:
    """A number that became another number is the damage that is hardest to see."""
    body = sound.bodies["manifest.json"]
    digits = [at for at, byte in enumerate(body) if chr(byte).isdigit()]
    rng = random.Random(1)
    for at in rng.sample(digits, 150):
        changed = bytearray(body)
        changed[at] = ord("0") + (body[at] - ord("0") + rng.randint(1, 9)) % 10
        assert not sound.survives("manifest.json", bytes(changed)), body[at - 30 : at + 10]


@pytest.mark.parametrize("name", TARGETS)
def test_every_length(sound: Sound, name: str) -> None:
    body = sound.bodies[name]
    rng = random.Random(2)
    for length in [0, 1, 7, 8, 9, len(body) - 1, *(rng.randrange(len(body)) for _ in range(30))]:
        assert not sound.survives(name, body[:length])


@settings(max_examples=100)
@given(st.sampled_from(TARGETS), st.integers(0, 1 << 20), st.binary(max_size=9), st.integers(0, 9))
def test_any_splice(sound: Sound, name: str, at: int, put: bytes, lost: int) -> None:
    body = sound.bodies[name]
    at %= len(body)
    changed = body[:at] + put + body[at + lost :]
    assert sound.survives(name, changed) == (changed == body)


@settings(max_examples=100)
@given(st.text('{}[]":,0123456789.eE-+ntfNaIy \n\\u', max_size=60))
def test_text_that_looks_like_json(sound: Sound, text: str) -> None:
    assert not sound.survives("manifest.json", text.encode())
    head = '{"format": "model.pack", "major": 1, "minor": 0, "creator": '
    assert not sound.survives("manifest.json", (head + text + "}").encode())
