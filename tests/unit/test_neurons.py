"""Experts in blocks of neurons: where every byte lies, what goes in comes out, and a checksum of each piece."""

from __future__ import annotations

import zlib
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from damaged import damaged
from hypothesis import given, settings
from hypothesis import strategies as st
from random_packs import (
    DECODER,
    ENCODER_DECODER,
    FILES,
    FIRING,
    NEURON_SPECS,
    NEURONS,
    QUANTIZATION,
    flat,
    flat_experts,
    minor_of,
    random_biases,
    random_expert,
    random_matrix,
    read_biases,
    write_pack,
)
from safetensors.numpy import load_file

from moeconv.matrices import bias_of, columns_of, matrices_of, matrix_of, read_expert, rows_of, stored_matrices
from moeconv.packing.packed import check_pieces
from moeconv.writer import PackWriter, checksums, checksums_to_bytes, expert_body, place
from moert.pack.codec import QuantizedMatrix, dequantize, n_groups, row_bytes
from moert.pack.errors import FormatTooNew, HashMismatch, HeaderInvalid
from moert.pack.layout import NEURONS as NEURONS_FILE
from moert.pack.layout import Coding, MatrixPlace, NeuronLayout, Neurons, expert_layout, neuron_layout
from moert.pack.manifest import Quantization
from moert.pack.model_spec import ModelSpec
from moert.pack.parts import Experts, Ffn
from moert.pack.reader import Pack, checksums_from_bytes
from moert.pack.tensors import to_bytes
from tests.pairs import thinned

BLOCKS = replace(QUANTIZATION, neurons=Neurons(512, bundled=False))


def sized(d_model: int, d_ff: int, gated: bool, bias: bool) -> ModelSpec:
    """A model whose experts have this shape."""
    part = Ffn(d_ff, ENCODER_DECODER.moe.ffn.act, gated, bias)
    stacks = {
        name: replace(
            stack,
            kinds=tuple(
                replace(kind, ffn=replace(kind.ffn, ffn=part)) if isinstance(kind.ffn, Experts) else kind
                for kind in stack.kinds
            ),
        )
        for name, stack in ENCODER_DECODER.stacks.items()
    }
    return replace(ENCODER_DECODER, d_model=d_model, encoder=stacks["encoder"], decoder=stacks["decoder"])


widths = st.sampled_from([2, 3, 4, 8, 16])
layouts = st.fixed_dictionaries({
    "d_model": st.integers(1, 300), "d_ff": st.integers(1, 200), "gated": st.booleans(), "bias": st.booleans(),
    "bits": st.tuples(widths, widths, widths), "group": st.sampled_from([0, 4, 32, 1000]),
    "dtype16": st.sampled_from(["F16", "BF16"]),
    "neurons": st.builds(
        lambda nbytes, how: Neurons(nbytes, *how), st.sampled_from([512, 1024, 4096, 1 << 20]),
        st.sampled_from([(False, False), (True, False), (False, True)]),
    ),
})  # fmt: skip


def parts_of(layout: NeuronLayout, matrix: MatrixPlace) -> list[tuple[int, int]]:
    """Where each part of a matrix lies in its piece: from, to."""
    if matrix.bits == 16:
        sizes = [2 * layout.d_model]
    else:
        groups = n_groups(layout.d_model, matrix.group_size)
        sizes = [row_bytes(layout.d_model, matrix.bits), 2 * groups, 2 * groups]
    found = [(at, at + layout.per_block * nbytes) for at, nbytes in zip(matrix.places, sizes, strict=True)]
    if matrix.bias_place is not None:
        found.append((matrix.bias_place, matrix.bias_place + 4 * layout.per_block))
    return found


@settings(max_examples=200)
@given(layouts)
def test_where_each_byte_lies(case: dict) -> None:
    spec = sized(case["d_model"], case["d_ff"], case["gated"], case["bias"])
    bits = dict(zip(spec.moe.ffn.projections, case["bits"], strict=False))
    neurons, key = case["neurons"], spec.expert_keys()[-1]
    layout = expert_layout(spec, key, bits, Coding(case["group"], case["dtype16"]), 4096, neurons)
    placed = layout.neurons
    assert placed == neuron_layout(spec, bits, Coding(case["group"], case["dtype16"]), 4096, neurons).moved(
        layout.data_offset
    )
    # A block has all neurons that fit, and at least one.
    assert (placed.n_blocks - 1) * placed.per_block < case["d_ff"] <= placed.n_blocks * placed.per_block
    assert [i for k in range(placed.n_blocks) for i in placed.block(k)] == list(range(case["d_ff"]))
    assert placed.columns_bytes <= neurons.piece_bytes or placed.per_block == 1
    if placed.per_block < case["d_ff"]:
        one_more = [(placed.per_block + 1) * nbytes for nbytes in placed.columns.neuron_bytes(case["d_model"])]
        assert list(accumulate(one_more, lambda end, nbytes: -(-end // 8) * 8 + nbytes))[-1] > neurons.piece_bytes
    # Parts follow each other at multiples of 8, pieces at multiples of 512 (rows that are read at once: of 8), and
    # nothing lies in two places.
    of_rows = placed.rows.values(), placed.rows_bytes, 8 if neurons.together else 512
    for matrices, nbytes, unit in (of_rows, ([placed.columns], placed.columns_bytes, 512)):
        parts = sorted(part for matrix in matrices for part in parts_of(placed, matrix))
        assert all(start % 8 == 0 for start, _ in parts)
        assert all(0 <= after - stop < 8 for (_, stop), (after, _) in pairwise(parts))
        assert parts[0][0] == 0
        assert nbytes % unit == 0 <= nbytes - parts[-1][1] < unit
    assert placed.together_bytes == (-(-placed.n_blocks * placed.rows_bytes // 512) * 512 if neurons.together else 0)
    assert neurons.bundled or placed.rows_at + placed.together_bytes <= placed.columns_at
    spans = [(placed.rows_at + k * placed.rows_step, placed.rows_bytes) for k in range(placed.n_blocks)]
    spans += [(placed.columns_at + k * placed.columns_step, placed.columns_bytes) for k in range(placed.n_blocks)]
    if case["bias"]:
        assert (placed.bias_at - layout.data_offset) == 0
        spans.append((placed.bias_at, 4 * case["d_model"]))
    spans = sorted(spans)
    assert all(at + nbytes <= after for (at, nbytes), (after, _) in pairwise(spans))
    assert spans[0][0] >= layout.data_offset
    assert sum(spans[-1]) <= layout.file_bytes
    assert layout.file_bytes % 4096 == layout.data_offset % 4096 == 0
    slots = {slot.name: slot for slot in layout.slots if not slot.name.startswith("pad.")}
    names = (["down.bias"] if case["bias"] else []) + (["blocks"] if neurons.bundled else ["rows", "columns"])
    assert list(slots) == names
    assert all(slot.start % 4096 == 0 for slot in slots.values())
    whole = sum(case["d_ff"] * sum(m.neuron_bytes(case["d_model"])) for _, m in placed.matrices)
    biases = 4 * (case["d_model"] + (len(bits) - 1) * case["d_ff"]) if case["bias"] else 0
    assert layout.tensor_bytes == whole + biases


@settings(max_examples=60)
@given(layouts, st.integers(0, 99))
def test_matrices_come_back_from_blocks(case: dict, seed: int) -> None:
    spec = sized(case["d_model"], case["d_ff"], case["gated"], case["bias"])
    bits = dict(zip(spec.moe.ffn.projections, case["bits"], strict=False))
    rng, key = np.random.default_rng(seed), spec.expert_keys()[0]
    layout = expert_layout(spec, key, bits, Coding(case["group"], case["dtype16"]), 4096, case["neurons"])
    shape = (case["d_ff"], case["d_model"])
    matrices = {name: random_matrix(rng, *shape, width, case["group"]) for name, width in bits.items()}
    biases = random_biases(spec, key, seed)
    quantization = Quantization("group", case["group"], case["dtype16"], 0, neurons=case["neurons"])
    body = np.frombuffer(expert_body(key, layout, quantization, matrices, biases), np.uint8)
    assert layout.neurons is not None
    for name, matrix in matrices.items():
        assert flat(matrix_of(layout.neurons, body, name)) == flat(matrix)
    for name, bias in biases.items():
        assert bias_of(layout.neurons, body, name).tolist() == bias.tolist()
    # What belongs to no neuron is zero.
    blank = np.zeros(len(body), np.uint8)
    full = {name: np.full(bias.shape, -1, np.int32).view(np.float32) for name, bias in biases.items()}
    ones = {n: tuple(np.full((case["d_ff"], b), 255, np.uint8) for b in m.neuron_bytes(shape[1]))
            for n, m in layout.neurons.matrices}  # fmt: skip
    place(layout.neurons, blank, ones, full)
    assert not body[layout.data_offset :][blank[layout.data_offset :] == 0].any()


@thinned("dtype16, group_size, neurons, family", ["F16", "BF16"], [0, 4], NEURONS, NEURON_SPECS)
def test_what_goes_in_comes_out(
    tmp_path: Path, family: str, neurons: Neurons, group_size: int, dtype16: str
) -> None:  # fmt: skip
    spec, out = NEURON_SPECS[family], tmp_path / "model.pack"
    quantization = replace(QUANTIZATION, group_size=group_size, dtype16=dtype16, neurons=neurons)
    given = write_pack(out, spec, quantization)
    pack = Pack.open(out)
    assert pack.manifest.minor == minor_of(spec, 4 if neurons.together else 3)
    assert pack.manifest.quantization == quantization
    bodies = {key: read_expert(pack, key) for key in given}
    assert flat_experts({key: stored_matrices(pack, key, body) for key, body in bodies.items()}) == flat_experts(given)
    for key, body in bodies.items():
        down, found = given[key]["down"], matrices_of(pack, key, body)
        wide = dequantize(down) if isinstance(down, QuantizedMatrix) else down
        assert found["down"].shape == spec.projection_shape("down")
        assert np.array_equal(found["down"], wide.T)
        assert flat(found["up"]) == flat(given[key]["up"])
    biases = {key: random_biases(spec, key) for key in given}
    assert read_biases(pack) == {key: {name: each.tolist() for name, each in of.items()} for key, of in biases.items()}
    assert set(pack.manifest.files) == {*FILES, NEURONS_FILE}
    assert len(list(pack.verify_hashes())) == len(given) + len(FILES) + 1


@pytest.mark.parametrize("neurons", NEURONS, ids=str)
def test_the_file_is_safetensors(tmp_path: Path, neurons: Neurons) -> None:
    write_pack(tmp_path / "p", FIRING, replace(QUANTIZATION, neurons=neurons))
    pack = Pack.open(tmp_path / "p")
    for entry in pack.manifest.experts:
        tensors, placed, body = load_file(pack.file(entry.path)), pack.neurons(entry.key), read_expert(pack, entry.key)
        if neurons.bundled:
            both = np.concatenate([rows_of(placed, body), columns_of(placed, body)], axis=1)
            assert np.array_equal(tensors["blocks"], both)
        else:
            assert np.array_equal(tensors["rows"], rows_of(placed, body))
            assert np.array_equal(tensors["columns"], columns_of(placed, body))
        assert tensors["down.bias"].tolist() == bias_of(placed, body, "down").tolist()


@pytest.mark.parametrize("files", ["expert", "layer"])
@pytest.mark.parametrize("neurons", [*NEURONS[:2], NEURONS[-1]], ids=str)
def test_each_piece_has_a_checksum(tmp_path: Path, neurons: Neurons, files: str) -> None:
    quantization, out = replace(QUANTIZATION, neurons=neurons), tmp_path / "p"
    writer = PackWriter(out, FIRING, quantization, "fresh", files)
    for key in FIRING.expert_keys():
        writer.write_expert(key, random_expert(FIRING, key, 4, neurons=True), biases=random_biases(FIRING, key))
    writer.finish("tests", None)
    pack = Pack.open(out)
    found = checksums_from_bytes(pack.read_file(NEURONS_FILE), pack.manifest)
    for entry in pack.manifest.experts:
        placed = pack.neurons(entry.key)
        body = pack.file(entry.path).read_bytes()[entry.offset :][: entry.file_bytes]
        spans = [(placed.rows_at + k * placed.rows_step, placed.rows_bytes) for k in range(placed.n_blocks)]
        spans += [(placed.columns_at + k * placed.columns_step, placed.columns_bytes) for k in range(placed.n_blocks)]
        spans.append((placed.bias_at or 0, 4 * placed.d_model))
        spans += [(placed.rows_at, placed.together_bytes)] if neurons.together else []
        assert found[entry.key].tolist() == [zlib.crc32(body[at : at + nbytes]) for at, nbytes in spans]
        check_pieces(entry.key, placed, read_expert(pack, entry.key), found[entry.key])


def test_a_wrong_checksum_of_a_piece_is_found(tmp_path: Path) -> None:
    write_pack(tmp_path / "p", FIRING, BLOCKS)
    pack = Pack.open(tmp_path / "p")
    key = FIRING.expert_keys()[2]
    expected = checksums_from_bytes(pack.read_file(NEURONS_FILE), pack.manifest)[key].copy()
    for place_of in range(len(expected)):
        expected[place_of] ^= 1
        with pytest.raises(HashMismatch, match=f"a checksum of {key}"):
            check_pieces(key, pack.neurons(key), read_expert(pack, key), expected)
        expected[place_of] ^= 1


def test_without_biases_the_last_checksum_is_zero(tmp_path: Path) -> None:
    write_pack(tmp_path / "p", ENCODER_DECODER, BLOCKS)
    pack = Pack.open(tmp_path / "p")
    found = checksums_from_bytes(pack.read_file(NEURONS_FILE), pack.manifest)
    assert {int(sums[-1]) for sums in found.values()} == {0}


def test_a_run_that_was_killed_has_the_checksums_of_both(tmp_path: Path) -> None:
    for out, stop in ((tmp_path / "once", 0), (tmp_path / "twice", 3)):
        writer = PackWriter(out, FIRING, BLOCKS, "same")
        for number, key in enumerate(FIRING.expert_keys()):
            if stop and number == stop:
                del writer
                writer = PackWriter(out, FIRING, BLOCKS, "same")
                assert all(writer.has(done) for done in FIRING.expert_keys()[:stop])
            writer.write_expert(key, random_expert(FIRING, key, 4, neurons=True), biases=random_biases(FIRING, key))
        writer.finish("tests", None)
    assert (tmp_path / "once" / NEURONS_FILE).read_bytes() == (tmp_path / "twice" / NEURONS_FILE).read_bytes()
    assert (tmp_path / "once" / "manifest.json").read_bytes() == (tmp_path / "twice" / "manifest.json").read_bytes()


def test_a_run_killed_while_layers_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(out: Path) -> PackWriter:
        writer = PackWriter(out, FIRING, BLOCKS, "same", "layer")
        for key in FIRING.expert_keys():
            if not writer.has(key):
                writer.write_expert(key, random_expert(FIRING, key, 4, neurons=True), biases=random_biases(FIRING, key))
        return writer

    written(tmp_path / "once").finish("tests", None)
    killed = written(tmp_path / "twice")
    monkeypatch.setattr(PackWriter, "write_file", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        killed.finish("tests", None)
    monkeypatch.undo()
    del killed
    again = written(tmp_path / "twice")
    again.finish("tests", None)
    assert (tmp_path / "once" / NEURONS_FILE).read_bytes() == (tmp_path / "twice" / NEURONS_FILE).read_bytes()


def test_matrices_that_do_not_fit_are_our_bug(tmp_path: Path) -> None:
    spec = ENCODER_DECODER
    key, writer = spec.expert_keys()[0], PackWriter(tmp_path / "p", spec, BLOCKS, "fresh")
    turned = random_expert(spec, key, 4, neurons=True)
    with pytest.raises(ValueError, match=f"{key}: down: .*the layout has 13 of"):
        writer.write_expert(key, random_expert(spec, key, 4))
    with pytest.raises(KeyError):
        writer.write_expert(key, {"up": turned["up"]})
    gated = PackWriter(tmp_path / "q", FIRING, BLOCKS, "fresh")
    key = FIRING.expert_keys()[0]
    turned, biases = random_expert(FIRING, key, 4, neurons=True), random_biases(FIRING, key)
    for name in biases:
        with pytest.raises(ValueError, match=rf"{name}\.bias is not given"):
            gated.write_expert(key, turned, biases={n: b for n, b in biases.items() if n != name})


def test_a_pack_without_blocks_has_no_such_file(tmp_path: Path) -> None:
    write_pack(tmp_path / "p", DECODER)
    assert NEURONS_FILE not in Pack.open(tmp_path / "p").manifest.files
    assert "neurons" not in (tmp_path / "p" / "manifest.json").read_text()


# neurons.safetensors, read strictly.


@pytest.fixture(scope="module")
def firing(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    out = tmp_path_factory.mktemp("neurons") / "p"
    write_pack(out, FIRING, BLOCKS)
    return Pack.open(out)


def test_checksums_are_written_and_read(firing: Pack) -> None:
    body = firing.read_file(NEURONS_FILE)
    found = checksums_from_bytes(body, firing.manifest)
    assert checksums_to_bytes(found) == checksums_to_bytes(dict(reversed(found.items()))) == body
    key = FIRING.expert_keys()[1]
    assert np.array_equal(found[key], checksums(firing.neurons(key), read_expert(firing, key)))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda sums: sums.pop("D00/E000"), HeaderInvalid, "lacks the tensor D00/E000"),
        (lambda sums: sums.update({"D07/E000": np.zeros(3, np.uint32)}), HeaderInvalid, "has the tensor 'D07/E000'"),
        (lambda sums: sums.update({"D00/E001": np.zeros(4, np.uint32)}), HeaderInvalid, "should have 7 checksums, f"),
        (lambda sums: sums.update({"D00/E001": np.zeros(3, np.int32)}), HeaderInvalid, "should be uint32 with 1"),
        (lambda sums: sums.update({"D00/E001": np.zeros((1, 3), np.uint32)}), HeaderInvalid, "should be uint32 with 1"),
    ],
)
def test_checksums_that_are_not_those_of_the_pack(firing: Pack, change, error, said) -> None:  # type: ignore[no-untyped-def]
    found = checksums_from_bytes(firing.read_file(NEURONS_FILE), firing.manifest)
    named = {str(key): sums for key, sums in found.items()}
    change(named)
    with pytest.raises(error, match=said) as caught:
        checksums_from_bytes(to_bytes(named, {"format": "model.pack neurons", "version": 1}), firing.manifest)
    assert "\n" not in str(caught.value)


def test_checksums_of_a_later_version(firing: Pack) -> None:
    found = checksums_from_bytes(firing.read_file(NEURONS_FILE), firing.manifest)
    body = to_bytes({str(key): sums for key, sums in found.items()}, {"version": 2})
    with pytest.raises(FormatTooNew, match="has version 2, this program reads 1"):
        checksums_from_bytes(body, firing.manifest)


@given(st.data())
@settings(max_examples=200)
def test_damage_is_refused_or_harmless(firing: Pack, data: st.DataObject) -> None:
    body = damaged(firing.read_file(NEURONS_FILE), data)
    try:
        found = checksums_from_bytes(body, firing.manifest)
    except (HeaderInvalid, FormatTooNew) as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert {key: len(sums) for key, sums in found.items()} == {
        entry.key: firing.neurons(entry.key).n_checksums for entry in firing.manifest.experts
    }
