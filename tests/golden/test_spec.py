"""SPEC.md is enough: a reader that follows its text alone, in another style, finds the same values as ours."""

from __future__ import annotations

import itertools
import json
import math
import re
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dense_packs import dense_quantization, widened, write_dense_pack
from random_packs import NEURON_SPECS, NEURONS, QUANTIZATION, SPECS, random_trellis, write_pack

from moeconv.matrices import biases_of, matrices_of, projection_weights, read_expert
from moert.models.backbone import load_backbone
from moert.pack.codec import CODES, INT_WIDTHS, dequantize_trellis, pack_codes
from moert.pack.documents import plain
from moert.pack.layout import Neurons
from moert.pack.manifest import Dense
from moert.pack.parts import ROLES
from moert.pack.reader import Pack
from tests.pairs import thinned

SPEC = (Path(__file__).parents[2] / "moert" / "pack" / "SPEC.md").read_text(encoding="utf-8")
TINY = Path(__file__).parent / "tiny.pack"


def manifest_of(root: Path) -> dict[str, Any]:
    body = (root / "manifest.json").read_bytes()
    at = body.rindex(b',\n "crc32": ')
    document: dict[str, Any] = json.loads(body)
    assert body[at:] == b',\n "crc32": %d\n}\n' % document["crc32"]
    assert zlib.crc32(body[:at]) == document["crc32"]
    return document


def bit(data: bytes, n: int) -> int:
    return data[n // 8] >> (n % 8) & 1


def plane(data: bytes, width: int, j: int) -> int:
    return sum(bit(data, j * width + b) << b for b in range(width))


def code(row: bytes, bits: int, inputs: int, j: int) -> int:
    if bits != 3:
        return plane(row, bits, j)
    return plane(row, 2, j) + 4 * plane(row[math.ceil(inputs / 4) :], 1, j)


def trellis_by_the_text(stream: bytes, scales: bytes, bits: float, out: int, inputs: int) -> list[list[float]]:
    """One code after the other, and each weight as the sum that stands in the text."""
    row = next(line for line in SPEC.splitlines() if re.match(rf"\| ([\d., ]+, )?{bits:g}(, [\d., ]+)? \| .*±", line))
    widths, steps, multiplier, k, half = (cell.split("±")[-1].strip() for cell in row.strip("|").split("|"))
    s = int(steps.split(", ")[widths.split(", ").index(f"{bits:g}")])
    positive, m, size = [int(each) for each in half.split()], int(multiplier), int(k)
    table = [-each for each in reversed(positive)] + positive
    assert len(table) == 2**size
    q, at = list[list[int]](), 0
    pairs = math.ceil(inputs / 2)
    for first in range(0, out, 128):
        rows = up_to(min(128, out - first), 8)
        block = stream[at : at + pairs * rows * s // 8 + 2]
        at += len(block)
        for r in range(min(128, out - first)):
            q.append([])
            for p in range(pairs):
                window = sum(bit(block, (p * rows + r) * s + i) << i for i in range(12))
                h = window * m % 2**16
                q[-1] += [table[h // 2 ** (16 - size)], table[h // 2 ** (16 - 2 * size) % 2**size]]
    assert at == len(stream)
    b = max(2**i for i in range(7) if inputs % 2**i == 0)

    def sign(j: int) -> int:
        mixed = j * 2654435761 % 2**32
        mixed = (mixed ^ mixed // 2**15) * 2246822519 % 2**32
        return -1 if mixed >= 2**31 else 1

    scale, c = np.frombuffer(scales, "<f2").astype(np.float32), np.float32(1 / math.sqrt(b))
    return [
        [
            float((scale[i] * c) * np.float32(sign(j) * sum(
                (-1) ** (j % b & n).bit_count() * values[j - j % b + n] for n in range(b)
            )))
            for j in range(inputs)
        ]
        for i, values in enumerate(q)
    ]  # fmt: skip


def weights_by_the_text(
    data: bytes, table: dict[str, Any], name: str, bits: float, inputs: int, group: int
) -> list[list[float]]:
    def tensor(part: str) -> tuple[bytes, list[int]]:
        start, stop = table[f"{name}.{part}"]["data_offsets"]
        return data[start:stop], table[f"{name}.{part}"]["shape"]

    if f"{name}.trellis" in table:
        assert bits < 8
        stream, _ = tensor("trellis")
        scales, (out,) = tensor("scale")
        return trellis_by_the_text(stream, scales, bits, out, inputs)
    bits = int(bits)
    if bits == 16 and f"{name}.exponent" in table:
        values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        codes, (rows, row_bytes) = tensor("qweight")
        exponents, (_, groups) = tensor("exponent")
        return [
            [
                (-1) ** (found // 8) * values[found % 8] * 2.0 ** (exponents[i * groups + j // 32] - 127)
                for j in range(inputs)
                for found in [code(codes[i * row_bytes : (i + 1) * row_bytes], 4, inputs, j)]
            ]
            for i in range(rows)
        ]
    if bits == 16:
        body, (rows, _) = tensor("weight")
        if table[f"{name}.weight"]["dtype"] == "F16":
            flat = np.frombuffer(body, "<f2").astype(np.float32)
        else:
            pairs = np.frombuffer(body, "<u2")
            flat = np.frombuffer(b"".join(b"\0\0" + int(pair).to_bytes(2, "little") for pair in pairs), "<f4")
        return flat.reshape(rows, inputs).tolist()  # type: ignore[no-any-return]
    codes, (rows, row_bytes) = tensor("qweight")
    scale_bytes, (_, groups) = tensor("scale")
    scale = np.frombuffer(scale_bytes, "<f2").reshape(rows, groups)
    minimum = np.frombuffer(tensor("min")[0], "<f2").reshape(rows, groups)
    result = []
    for i in range(rows):
        row = codes[i * row_bytes : (i + 1) * row_bytes]
        found = [np.float32(code(row, bits, inputs, j)) for j in range(inputs)]
        result.append([
            float(value * np.float32(scale[i, j // group]) + np.float32(minimum[i, j // group]))
            for j, value in enumerate(found)
        ])  # fmt: skip
    return result


def power_by_the_text(entry: dict[str, Any], table: dict[str, Any], name: str) -> float:
    """What the weights of an expert's projection are multiplied with."""
    powers = entry.get("powers") or {}
    said = ",".join(f"{each}:{powers[each]}" for each in ("gate", "up", "down") if each in powers)
    assert table["__metadata__"].get("powers", "") == said
    return float(2.0 ** powers.get(name, 0))


def up_to(nbytes: int, unit: int) -> int:
    return math.ceil(nbytes / unit) * unit


class Piece:
    """Rows or columns of a block, as SPEC.md says them: [(projection, width)] of it, and where their parts begin."""

    def __init__(
        self, projections: dict[str, int], wide: int, size: int, neurons: int, biased: bool, unit: int = 512
    ) -> None:
        self.wide, self.group, self.widths = wide, min(size, wide) if size else wide, projections
        self.places: dict[str, tuple[int, int]] = {}
        end, groups = 0, math.ceil(wide / self.group)
        for name, bits in projections.items():
            each = {2: [(wide + 3) // 4], 3: [(wide + 3) // 4 + (wide + 7) // 8], 4: [(wide + 1) // 2], 8: [wide]}
            sizes = [2 * wide] if bits == 16 else [*each[bits], 2 * groups, 2 * groups]
            for part, nbytes in zip(["weight"] if bits == 16 else ["qweight", "scale", "min"], sizes, strict=True):
                self.places[f"{name}.{part}"] = up_to(end, 8), nbytes
                end = up_to(end, 8) + neurons * nbytes
        for name in projections if biased else ():
            self.places[f"{name}.bias"] = up_to(end, 8), 4
            end = up_to(end, 8) + neurons * 4
        self.nbytes = up_to(end, unit)

    def neuron(self, piece: bytes, place: int, name: str, part: str) -> bytes:
        at, nbytes = self.places[f"{name}.{part}"]
        return piece[at + place * nbytes :][:nbytes]

    def weights(self, piece: bytes, place: int, name: str, dtype16: str) -> list[float]:
        """The row of a neuron: all features of d_model."""
        if self.widths[name] == 16:
            row = self.neuron(piece, place, name, "weight")
            if dtype16 == "F16":
                return np.frombuffer(row, "<f2").astype(np.float32).tolist()  # type: ignore[no-any-return]
            return np.frombuffer(b"".join(b"\0\0" + row[i : i + 2] for i in range(0, len(row), 2)), "<f4").tolist()  # type: ignore[no-any-return]
        codes = self.neuron(piece, place, name, "qweight")
        scale, minimum = (np.frombuffer(self.neuron(piece, place, name, part), "<f2") for part in ("scale", "min"))
        found = [np.float32(code(codes, self.widths[name], self.wide, j)) for j in range(self.wide)]
        return [
            float(value * np.float32(scale[j // self.group]) + np.float32(minimum[j // self.group]))
            for j, value in enumerate(found)
        ]


def check_blocks_against_our_reader(root: Path) -> None:
    document, pack = manifest_of(root), Pack.open(root)
    quantization, model = document["quantization"], document["model"]
    sums = (root / "neurons.safetensors").read_bytes()
    sums_at = 8 + int.from_bytes(sums[:8], "little")
    sums_table = json.loads(sums[8:sums_at])
    assert sums_table.pop("__metadata__") == {"format": "model.pack neurons", "version": "1"}
    assert len(sums_table) == len(document["experts"])
    for entry in document["experts"]:
        body = (root / entry["path"]).read_bytes()
        data = body[8 + int.from_bytes(body[:8], "little") :]
        table = json.loads(body[8 : len(body) - len(data)])
        stack = model[entry["key"][0]]
        experts = stack["kinds"][stack["layers"][entry["key"][1]]]["ffn"]
        ffn, wide = experts["ffn"], (experts.get("narrow") or {"features": model["d_model"]})["features"]
        d_ff, limit, size = ffn["d_ff"], quantization["neurons"]["piece_bytes"], quantization["group_size"]
        down = {"down": entry["bits"]["down"]}
        block = max(
            [b for b in range(1, d_ff + 1) if Piece(down, wide, size, b, biased=False).nbytes <= limit], default=1
        )
        together = quantization["neurons"].get("together", False)
        unit = 8 if together else 512
        rows = Piece({n: b for n, b in entry["bits"].items() if n != "down"}, wide, size, block, ffn["bias"], unit)
        columns = Piece(down, wide, size, block, biased=False)
        blocks = math.ceil(d_ff / block)

        def pieces(name: str, nbytes: int, data: bytes = data, table: Any = table, n: int = blocks) -> list[bytes]:
            assert table[name]["shape"] == [n, nbytes]
            start, stop = table[name]["data_offsets"]
            assert start % document["page_bytes"] == 0
            return [data[start:stop][k * nbytes :][:nbytes] for k in range(n)]

        if quantization["neurons"]["bundled"]:
            whole = pieces("blocks", rows.nbytes + columns.nbytes)
            of_rows, of_columns = [p[: rows.nbytes] for p in whole], [p[rows.nbytes :] for p in whole]
        else:
            of_rows, of_columns = pieces("rows", rows.nbytes), pieces("columns", columns.nbytes)
        key = next(expert.key for expert in pack.manifest.experts if list(expert.key) == entry["key"])
        ours, biases = (read(pack, key, read_expert(pack, key)) for read in (matrices_of, biases_of))
        for i in range(d_ff):
            for name in rows.widths:
                found = rows.weights(of_rows[i // block], i % block, name, quantization["dtype16"])
                found = [number * power_by_the_text(entry, table, name) for number in found]
                assert found == projection_weights(ours[name])[i].tolist()
                if ffn["bias"]:
                    [number] = np.frombuffer(rows.neuron(of_rows[i // block], i % block, name, "bias"), "<f4")
                    assert number == biases[name][i]
            found = columns.weights(of_columns[i // block], i % block, "down", quantization["dtype16"])
            found = [number * power_by_the_text(entry, table, "down") for number in found]
            assert found == projection_weights(ours["down"])[:, i].tolist()
        last = b""
        if ffn["bias"]:
            start, stop = table["down.bias"]["data_offsets"]
            last = data[start:stop]
            assert np.frombuffer(last, "<f4").tolist() == biases["down"].tolist()
        short = f"{'E' if entry['key'][0] == 'encoder' else 'D'}{entry['key'][1]:02d}/E{entry['key'][2]:03d}"
        start, stop = sums_table[short]["data_offsets"]
        region = b"".join(of_rows)
        all_rows = [region + bytes(up_to(len(region), 512) - len(region))] if together else []
        expected = [zlib.crc32(piece) for piece in [*of_rows, *of_columns, last, *all_rows]]
        assert np.frombuffer(sums[sums_at:][start:stop], "<u4").tolist() == expected


@thinned("dtype16, neurons, family", ["F16", "BF16"], NEURONS, NEURON_SPECS)
def test_experts_in_blocks_of_neurons(tmp_path: Path, family: str, neurons: Neurons, dtype16: Any) -> None:
    quantization = replace(QUANTIZATION, neurons=neurons, dtype16=dtype16)
    write_pack(tmp_path / "model.pack", NEURON_SPECS[family], quantization)
    check_blocks_against_our_reader(tmp_path / "model.pack")


def test_the_golden_pack_of_neurons() -> None:
    for name in ("neurons.pack", "together.pack"):
        check_blocks_against_our_reader(TINY.with_name(name))


def check_against_our_reader(root: Path) -> None:
    document, pack = manifest_of(root), Pack.open(root)
    model, size = document["model"], document["quantization"]["group_size"]
    for entry in document["experts"]:
        body = (root / entry["path"]).read_bytes()
        assert (len(body), zlib.crc32(body)) == (entry["file_bytes"], entry["crc32"])
        data_at = 8 + int.from_bytes(body[:8], "little")
        assert data_at % document["page_bytes"] == len(body) % document["page_bytes"] == 0
        table = json.loads(body[8:data_at])
        key = next(expert.key for expert in pack.manifest.experts if list(expert.key) == entry["key"])
        ours, biases = (read(pack, key, read_expert(pack, key)) for read in (matrices_of, biases_of))
        stack = model[entry["key"][0]]
        experts = stack["kinds"][stack["layers"][entry["key"][1]]]["ffn"]
        ffn, wide = experts["ffn"], (experts.get("narrow") or {"features": model["d_model"]})["features"]
        for name in ("gate", "up", "down") if ffn["gated"] else ("up", "down"):
            inputs = ffn["d_ff"] if name == "down" else wide
            group = min(size, inputs) if size else inputs
            found = weights_by_the_text(body[data_at:], table, name, entry["bits"][name], inputs, group)
            found = [[number * power_by_the_text(entry, table, name) for number in row] for row in found]
            assert found == projection_weights(ours[name]).tolist(), (key, name)
            if ffn["bias"]:
                start, stop = table[f"{name}.bias"]["data_offsets"]
                assert np.frombuffer(body[data_at:][start:stop], "<f4").tolist() == biases[name].tolist()


@pytest.mark.parametrize("name", ["tiny.pack", "trellis.pack"])
def test_the_golden_pack(name: str) -> None:
    check_against_our_reader(TINY.with_name(name))


@pytest.mark.parametrize("family", SPECS)
def test_packs_of_all_kinds(tmp_path: Path, family: str) -> None:
    write_pack(tmp_path / "model.pack", SPECS[family])
    check_against_our_reader(tmp_path / "model.pack")


@pytest.mark.parametrize("family", SPECS)
def test_trellis_codes(tmp_path: Path, family: str) -> None:
    write_pack(tmp_path / "model.pack", SPECS[family], replace(QUANTIZATION, codes="trellis"))
    check_against_our_reader(tmp_path / "model.pack")


@pytest.mark.parametrize("bits", CODES)
@pytest.mark.parametrize("shape", [(1, 1), (137, 4), (9, 96)])
def test_trellis_codes_of_more_blocks_and_inputs(bits: float, shape: tuple[int, int]) -> None:
    matrix = random_trellis(np.random.default_rng(3), *shape, bits)
    found = trellis_by_the_text(matrix.stream.tobytes(), matrix.scale.tobytes(), bits, *shape)
    assert found == dequantize_trellis(matrix).tolist()


def test_the_example_of_trellis_codes_in_the_text() -> None:
    [example] = re.findall(r"^`((?:[0-9A-F]{2} )+[0-9A-F]{2})`. The first code", SPEC, re.MULTILINE)
    scales = np.array([0.5, 2], "<f2").tobytes()
    found = trellis_by_the_text(bytes.fromhex(example), scales, 2, 2, 2)
    said = re.findall(r"weights are about\s+([\d., −]+) and ([\d., −]+)\.", SPEC)
    numbers = [[float(each) for each in row.replace("−", "-").split(", ")] for row in said[0]]
    assert np.round(found, 2).tolist() == numbers


def test_four_bits_of_the_source(tmp_path: Path) -> None:
    write_pack(tmp_path / "model.pack", SPECS["rich"], quantization=replace(QUANTIZATION, mxfp4=True))
    check_against_our_reader(tmp_path / "model.pack")


WIDTHS = {"attention": 3, "mixer": 4, "router": 16, "ffn": 2, "head": 4, "embed": 8}


def role_by_the_text(name: str, model: dict[str, Any]) -> str | None:
    """The table of roles, in the words of SPEC.md."""
    *before, last = name.removesuffix(".weight").split(".")
    if name == "embed.weight":
        return "head" if model["head"]["tied"] else "embed"
    if not name.endswith(".weight") or (before and before[-1].endswith("streams")):
        return None
    if before and before[-1] in ("attn", "cross"):
        return "attention" if last in (*"qkvo", "gate", "q_a", "q_turn", "kv_a", "k_turn", "keys", "values") else None
    if before and before[-1] == "mixer":
        stack = model[before[0]]
        mixer = stack["kinds"][stack["layers"][int(before[1])]]["mixer"]
        others = ("a", "a_narrow") if mixer.get("by_feature") else ()
        others = ("q_a", "kv") if mixer["kind"] == "pooled" else others
        return "mixer" if last in ("in", *"qkvz", "z_narrow", "inner", "steps", "out", *others) else None
    if before[-2:-1] == ["mixer"] and before[-1] in ("narrow", "pool", "index"):
        return "mixer" if before[-1] == "narrow" or last in ("values", "gates", "q", "weights") else None
    if before and before[-1] in ("ffn", "shared", "beside"):
        return "ffn"
    if last in ("narrow", "widen", "bypass"):
        return "ffn"
    if last == "project":
        return "head"
    return last if last in ("head", "router") else None


@pytest.mark.parametrize(("mixed", "trellis"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("family", SPECS)
def test_dense_matrices(tmp_path: Path, family: str, mixed: bool, trellis: bool) -> None:
    spec, root = SPECS[family], tmp_path / "p"
    widths = {**WIDTHS, "embed": 3} if trellis else WIDTHS
    bits = {role: width for role, width in widths.items() if role in spec.roles()}
    quantization = dense_quantization(bits, "F16")
    assert quantization.dense is not None
    names = [name for name, tensor in spec.tensors.items() if tensor.role is not None]
    own = dict(zip(names[::3], itertools.cycle((2, 16, 3, 8, 4)), strict=False)) if mixed else None
    coded = tuple(role for role in bits if trellis and role != "router")
    write_dense_pack(root, spec, replace(quantization, dense=replace(quantization.dense, matrices=own, trellis=coded)))
    document = manifest_of(root)
    least = {"rich": 9, "mixers": 9, "streaming": 10, "pooling": 11, "gated": 12}.get(family, 7 if mixed else 0)
    assert document["minor"] == (14 if trellis else least)
    dense = document["quantization"]["dense"]
    assert dense.get("matrices") == own
    body = (root / "backbone.safetensors").read_bytes()
    data_at = 8 + int.from_bytes(body[:8], "little")
    table, found = json.loads(body[8:data_at]), set()
    for name, ours in widened(load_backbone(Pack.open(root))).items():
        role = role_by_the_text(name, document["model"])
        if role is None:
            assert table[name]["dtype"] == "F32"
            found.add(name)
            continue
        stem, inputs, width = name.removesuffix(".weight"), ours.shape[1], dense["bits"][role]
        width = dense.get("matrices", {}).get(name, width)
        group = min(dense["group_size"], inputs) if dense["group_size"] else inputs
        assert weights_by_the_text(body[data_at:], table, stem, width, inputs, group) == ours.tolist(), name
        parts = ["trellis", "scale"] if role in coded and width < 8 else ["qweight", "scale", "min"]
        found |= {f"{stem}.{part}" for part in (["weight"] if width == 16 else parts)}
    assert set(table) - {"__metadata__"} == found


def test_the_examples_in_the_text() -> None:
    rows = re.findall(r"^\| (\d) \| [^|]* \| ([\d ]+) \| ([^|]+) \|$", SPEC, re.MULTILINE)
    assert [int(width) for width, _, _ in rows] == list(INT_WIDTHS)
    for width, codes, expected in rows:
        row = np.array([[int(value) for value in codes.split()]], dtype=np.uint8)
        assert pack_codes(row, int(width)).tobytes() == bytes.fromhex(re.sub(r"[` ]", "", expected))


def test_every_field_of_the_manifest_is_in_the_text() -> None:
    names: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            names.update(value)
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            collect(inner)

    dense = Dense("", 0, dict.fromkeys(ROLES, 8), matrices={})
    collect([asdict(dense), plain(replace(QUANTIZATION, codes="trellis")), *map(plain, SPECS.values())])
    for root in (TINY, TINY.with_name("neurons.pack"), TINY.with_name("together.pack")):
        collect({**manifest_of(root), "files": {"": manifest_of(root)["files"]["config.json"]}})
    assert sorted(name for name in names - {""} if not re.search(rf'[`"]{name}[`"]|\b{name}, |, {name}\b', SPEC)) == []


def test_every_error_is_in_the_text() -> None:
    from moert.pack import errors

    bases = {"Error", "PackError", "WriteFailed"}
    names = {name for name, value in vars(errors).items() if isinstance(value, type)} - bases
    assert {name for name in names if f"| `{name}` |" not in SPEC} == set()
