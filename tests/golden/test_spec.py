"""SPEC.md is enough: a reader that follows its text alone, in another style, finds the same values as ours."""

from __future__ import annotations

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
from random_packs import QUANTIZATION, SPECS, write_pack

from moert.models.backbone import load_backbone
from moert.pack.codec import INT_WIDTHS, pack_codes
from moert.pack.manifest import Dense
from moert.pack.parts import ROLES
from moert.pack.reader import Pack, projection_weights
from moert.pack.reading import plain

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


def weights_by_the_text(
    data: bytes, table: dict[str, Any], name: str, bits: int, inputs: int, group: int
) -> list[list[float]]:
    def tensor(part: str) -> tuple[bytes, list[int]]:
        start, stop = table[f"{name}.{part}"]["data_offsets"]
        return data[start:stop], table[f"{name}.{part}"]["shape"]

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
        ours, biases = (read(key, pack.read_expert(key)) for read in (pack.projections, pack.biases))
        stack = model[entry["key"][0]]
        experts = stack["kinds"][stack["layers"][entry["key"][1]]]["ffn"]
        ffn, wide = experts["ffn"], (experts.get("narrow") or {"features": model["d_model"]})["features"]
        for name in ("gate", "up", "down") if ffn["gated"] else ("up", "down"):
            inputs = ffn["d_ff"] if name == "down" else wide
            group = min(size, inputs) if size else inputs
            found = weights_by_the_text(body[data_at:], table, name, entry["bits"][name], inputs, group)
            assert found == projection_weights(ours[name]).tolist(), (key, name)
            if ffn["bias"]:
                start, stop = table[f"{name}.bias"]["data_offsets"]
                assert np.frombuffer(body[data_at:][start:stop], "<f4").tolist() == biases[name].tolist()


def test_the_golden_pack() -> None:
    check_against_our_reader(TINY)


@pytest.mark.parametrize("family", SPECS)
def test_packs_of_all_kinds(tmp_path: Path, family: str) -> None:
    write_pack(tmp_path / "model.pack", SPECS[family])
    check_against_our_reader(tmp_path / "model.pack")


def test_four_bits_of_the_source(tmp_path: Path) -> None:
    write_pack(tmp_path / "model.pack", SPECS["rich"], quantization=replace(QUANTIZATION, mxfp4=True))
    check_against_our_reader(tmp_path / "model.pack")


WIDTHS = {"attention": 3, "mixer": 4, "router": 16, "ffn": 2, "head": 4, "embed": 8}


def role_by_the_text(name: str, tied: bool) -> str | None:
    """The table of roles, in the words of SPEC.md."""
    *before, last = name.removesuffix(".weight").split(".")
    if name == "embed.weight":
        return "head" if tied else "embed"
    if not name.endswith(".weight"):
        return None
    if before and before[-1] in ("attn", "cross"):
        return "attention" if last in (*"qkvo", "gate", "q_a", "q_turn", "kv_a", "k_turn", "keys", "values") else None
    if before and before[-1] == "mixer":
        return "mixer" if last in ("in", *"qkvz", "inner", "steps", "out") else None
    if before and before[-1] in ("ffn", "shared", "beside"):
        return "ffn"
    if last in ("narrow", "widen", "bypass"):
        return "ffn"
    if last == "project":
        return "head"
    return last if last in ("head", "router") else None


@pytest.mark.parametrize("family", SPECS)
def test_dense_matrices(tmp_path: Path, family: str) -> None:
    spec, root = SPECS[family], tmp_path / "p"
    bits = {role: width for role, width in WIDTHS.items() if role in spec.roles()}
    write_dense_pack(root, spec, dense_quantization(bits, "F16"))
    document = manifest_of(root)
    dense = document["quantization"]["dense"]
    body = (root / "backbone.safetensors").read_bytes()
    data_at = 8 + int.from_bytes(body[:8], "little")
    table, found = json.loads(body[8:data_at]), set()
    for name, ours in widened(load_backbone(Pack.open(root))).items():
        role = role_by_the_text(name, document["model"]["head"]["tied"])
        if role is None:
            assert table[name]["dtype"] == "F32"
            found.add(name)
            continue
        stem, inputs, width = name.removesuffix(".weight"), ours.shape[1], dense["bits"][role]
        group = min(dense["group_size"], inputs) if dense["group_size"] else inputs
        assert weights_by_the_text(body[data_at:], table, stem, width, inputs, group) == ours.tolist(), name
        found |= {f"{stem}.{part}" for part in (["weight"] if width == 16 else ["qweight", "scale", "min"])}
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

    collect([asdict(Dense("", 0, dict.fromkeys(ROLES, 8))), *map(plain, SPECS.values())])
    collect({**manifest_of(TINY), "files": {"": manifest_of(TINY)["files"]["config.json"]}})
    assert sorted(name for name in names - {""} if not re.search(rf'[`"]{name}[`"]|\b{name}, |, {name}\b', SPEC)) == []


def test_every_error_is_in_the_text() -> None:
    from moert.pack import errors

    names = {name for name, value in vars(errors).items() if isinstance(value, type)} - {"PackError", "WriteFailed"}
    assert {name for name in names if f"| `{name}` |" not in SPEC} == set()
