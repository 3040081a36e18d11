"""The committed pack must be read with exactly these values and written with exactly these bytes, in every version."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from golden_pack import FILES, NEURONS_SPEC, QUALITY, SPEC, WIDTHS, build, build_neurons, build_trellis, codes

from moeconv.matrices import biases_of, matrices_of, projection_weights, read_expert
from moert.pack.codec import QuantizedMatrix, TrellisMatrix, decoded, unpack_codes
from moert.pack.model_spec import ExpertKey
from moert.pack.reader import Pack

TINY = Path(__file__).parent / "tiny.pack"
NEURONS, TOGETHER = TINY.with_name("neurons.pack"), TINY.with_name("together.pack")
TRELLIS = TINY.with_name("trellis.pack")


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_it_is_written_with_these_bytes(tmp_path: Path) -> None:
    build(tmp_path / "tiny.pack")
    assert files(tmp_path / "tiny.pack") == files(TINY)


def test_the_files_are_these() -> None:
    digests = {name: hashlib.sha256(body).hexdigest()[:16] for name, body in files(TINY).items()}
    assert digests == {
        "backbone.safetensors": "c1c27fbee3f12b16",
        "config.json": "ca3d163bab055381",
        "experts/D00/E000.safetensors": "53e59bf553437978",
        "experts/D00/E001.safetensors": "cf60dc8cb94fe543",
        "manifest.json": "6defff9138dc8279",
    }


def test_blocks_of_neurons_are_written_with_these_bytes(tmp_path: Path) -> None:
    for golden, together in ((NEURONS, False), (TOGETHER, True)):
        build_neurons(tmp_path / golden.name, together)
        assert files(tmp_path / golden.name) == files(golden)


def test_blocks_of_neurons_by_hand() -> None:
    pack = Pack.open(NEURONS)
    assert pack.manifest.model == NEURONS_SPEC
    assert pack.manifest.minor == 3
    first, second = NEURONS_SPEC.expert_keys()
    # A column of 4 bits takes 3 + 4 + 4 bytes, one of 16 bits takes 12.
    assert [pack.neurons(key).per_block for key in (first, second)] == [46, 42]
    body = (NEURONS / "experts/D00/E000.safetensors").read_bytes()
    rows = body[2 * 4096 :]  # behind the header and the biases of down
    assert rows[:2] == bytes([0b01_10_11_00, 0b11_00])  # gate, neuron 0: 0 3 2 1 0 3
    columns = body[3 * 4096 :]
    assert columns[:3] == bytes([0x70, 0x5E, 0x3C])  # down, column 0: 0 7 14 5 12 3
    assert columns[512:515] == bytes([0x3C, 0x1A, 0xF8])  # column 46: 12 3 10 1 8 15
    projections = matrices_of(pack, first, read_expert(pack, first))
    assert projection_weights(projections["down"])[:, 0].tolist() == [-0.75, 1.0, 2.75, 0.5, 5.0, 0.5]
    assert biases_of(pack, first, read_expert(pack, first))["gate"][:3].tolist() == [0, 0.25, 0.5]


def test_rows_together_by_hand() -> None:
    pack, apart = Pack.open(TOGETHER), Pack.open(NEURONS)
    assert (pack.manifest.minor, apart.manifest.minor) == (4, 3)
    first, second = NEURONS_SPEC.expert_keys()
    placed = pack.neurons(first)
    body = (TOGETHER / "experts/D00/E000.safetensors").read_bytes()
    rows = body[2 * 4096 :]
    assert rows[:2] == bytes([0b01_10_11_00, 0b11_00])
    others = (NEURONS / "experts/D00/E000.safetensors").read_bytes()[2 * 4096 :]
    assert rows[placed.rows_bytes :][:2] == others[apart.neurons(first).rows_bytes :][:2]  # gate, neuron 46
    assert placed.rows_bytes % 8 == 0
    assert placed.rows_bytes < apart.neurons(first).rows_bytes < placed.rows_bytes + 512
    for key in (first, second):
        ours, theirs = (matrices_of(one, key, read_expert(one, key)) for one in (pack, apart))
        for name in ours:
            assert projection_weights(ours[name]).tolist() == projection_weights(theirs[name]).tolist()


def test_trellis_codes_are_written_with_these_bytes(tmp_path: Path) -> None:
    build_trellis(tmp_path / "trellis.pack")
    assert files(tmp_path / "trellis.pack") == files(TRELLIS)


def test_trellis_codes_by_hand() -> None:
    """Of 3 bits, rows in steps of 6 bits. Bytes 0, 37, 74: windows of 0x500 and 0x894 from bits 0 and 6 on."""
    pack = Pack.open(TRELLIS)
    key = ExpertKey("decoder", 0, 1)
    up = matrices_of(pack, key, read_expert(pack, key))["up"]
    assert isinstance(up, TrellisMatrix)
    assert (pack.manifest.minor, up.bits, len(up.stream)) == (6, 3, 3 * 8 * 6 // 8 + 2)
    assert up.stream[:3].tolist() == [0, 37, 74]
    # 0x500 * 19503 and 0x894 * 19503 modulo 2**16: 60160 and 33580, in fields of 5 bits 29 and 12, 16 and 12
    assert decoded(up)[:2, :2].tolist() == [[78, -15], [2, -15]]


def test_it_is_read_with_these_values() -> None:
    pack = Pack.open(TINY)
    assert pack.manifest.model == SPEC
    assert pack.manifest.quality == QUALITY
    assert [entry.importance for entry in pack.manifest.experts] == [0.125, None]
    assert {name: pack.read_file(name) for name in pack.manifest.files} == FILES
    for expert, widths in WIDTHS.items():
        key = ExpertKey("decoder", 0, expert)
        parts = matrices_of(pack, key, read_expert(pack, key))
        assert {name: part.bits if isinstance(part, QuantizedMatrix) else 16 for name, part in parts.items()} == widths
        for name, part in parts.items():
            if isinstance(part, QuantizedMatrix):
                expected = codes(*SPEC.projection_shape(name), part.bits)
                np.testing.assert_array_equal(unpack_codes(part.qweight, part.bits, part.in_features), expected)


def test_one_row_of_each_width_by_hand() -> None:
    pack = Pack.open(TINY)
    first, second = (matrices_of(pack, key, read_expert(pack, key)) for key in SPEC.expert_keys())
    # Two groups in a row of six: codes 0-3 with scale 1/4 and minimum -3/4, codes 4-5 with 1/2 and -1.
    rows = {
        "gate 2": (first["gate"], [0, 3, 2, 1, 0, 3]),
        "up 3": (first["up"], [0, 7, 6, 5, 4, 3]),
        "gate 8": (second["gate"], [0, 7, 14, 21, 28, 35]),
    }
    for where, (part, row) in rows.items():
        expected = [code / 4 - 0.75 for code in row[:4]] + [code / 2 - 1 for code in row[4:]]
        assert projection_weights(part)[0].tolist() == expected, where
    down = [code / 4 - 0.75 for code in [0, 7, 14, 5]] + [12 / 2 - 1]
    assert projection_weights(first["down"])[0].tolist() == down
    assert projection_weights(second["up"])[0].tolist() == [-1, -0.875, -0.75, -0.625, -0.5, -0.375]


def test_bytes_of_one_row_by_hand() -> None:
    body = (TINY / "experts/D00/E000.safetensors").read_bytes()
    data = body[8 + int.from_bytes(body[:8], "little") :]
    assert data[:2] == bytes([0b01_10_11_00, 0b11_00])  # gate, row 0: 0 3 2 1 0 3
    assert data[192:195] == bytes([0b01_10_11_00, 0b11_00, 0b0_1_1_1_1_0])  # up, row 0: 0 7 6 5 4 3, low bits first
