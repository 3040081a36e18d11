"""Weights that are no numbers are refused in the file, or end the run in one line: nothing is written of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Moert
from damaged import resealed
from dense_packs import Tensors, dense_quantization, write_dense_pack
from hypothesis import given
from hypothesis import strategies as st
from random_packs import SPECS
from safetensors.torch import load, save
from tiny_packs import DECODER_SHAPE, MIXERS_SHAPE, write_pack

from moeconv.packing.packed import check_backbone, verify
from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.errors import NotFinite
from moert.kernels import library
from moert.models.backbone import load_backbone
from moert.pack.errors import HeaderInvalid
from moert.pack.layout import Neurons
from moert.pack.manifest import BACKBONE
from moert.pack.reader import Pack, all_finite

NUMBERS = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


@pytest.fixture
def moert(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Moert:
    return Moert(capsys, monkeypatch)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = DECODER_SHAPE.but(eos=())
    return write_pack(tmp_path_factory.mktemp("weights") / "tiny.pack", shape.spec, paths=False)


@pytest.fixture
def pack(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "tiny.pack")


def with_backbone(pack: Path, name: str, value: float, place: int = -1, form: torch.dtype | None = None) -> Path:
    tensors = load((pack / BACKBONE).read_bytes())
    if form is not None:
        tensors[name] = tensors[name].to(form)
    tensors[name].view(-1)[place] = value
    (pack / BACKBONE).write_bytes(save(tensors))
    return resealed(pack)


TENSORS = [
    "embed.weight", "head.weight", "decoder.norm.weight", "decoder.0.router.weight", "decoder.0.attn.q.weight",
    "decoder.2.ffn.up.weight", "decoder.3.ffn_norm.weight", "rope.0.frequencies",
]  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("value", NUMBERS)
def test_a_backbone_with_what_is_no_number(pack: Path, moert: Moert, name: str, value: str) -> None:
    with_backbone(pack, name, NUMBERS[value])
    said = moert.refuses("run", pack, "abc", "--max-new-tokens", "3")
    assert said == f"moert: {BACKBONE}: {name} has numbers that are not finite: convert the model again\n"
    with pytest.raises(HeaderInvalid, match=f"{name}.* has numbers that are not finite"):
        check_backbone(Pack.open(pack))


@pytest.mark.parametrize("form", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize("place", [0, 700, -1])
def test_of_any_form(pack: Path, form: torch.dtype, value: str, place: int) -> None:
    with_backbone(pack, "head.weight", NUMBERS[value], place, form)
    with pytest.raises(HeaderInvalid, match=r"head.weight has numbers that are not finite"):
        load_backbone(Pack.open(pack)).pop("head.weight")


@pytest.mark.parametrize("value", [1e30, -1e30, 1001.0])
def test_positions_that_turn_too_fast(pack: Path, moert: Moert, value: float) -> None:
    """As those of a rope_theta of 5e-324 would."""
    with_backbone(pack, "rope.0.frequencies", value, 0)
    assert "rope.0.frequencies should turn by at most 1000 a position" in moert.refuses("run", pack, "abc")


def test_scales_of_dense_matrices(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["decoder.0.attn.q.scale"].view(-1)[-1] = torch.nan

    write_dense_pack(tmp_path / "p", SPECS["decoder"], dense_quantization({"attention": 4}), change)
    with pytest.raises(HeaderInvalid, match=r"scales of decoder.0.attn.q.weight are not finite"):
        load_backbone(Pack.open(tmp_path / "p")).pop("decoder.0.attn.q.weight")


@given(st.lists(st.integers(0, 0xFFFFFFFF), min_size=1, max_size=40), st.sampled_from(["F16", "BF16", "F32"]))
def test_bits_say_what_numbers_say(bits: list[int], form: str) -> None:
    kind = {"F16": np.uint16, "BF16": np.uint16, "F32": np.uint32}[form]
    numbers = np.array(bits, np.uint64).astype(kind)
    if form == "BF16":
        values = (numbers.astype(np.uint32) << 16).view(np.float32)
    else:
        values = numbers.view(np.float16 if form == "F16" else np.float32)
    assert all_finite(form, numbers.view(np.uint8)) == bool(np.isfinite(values).all())


@pytest.mark.parametrize("count", [1, 131_072, 131_073, 400_000])
@pytest.mark.parametrize("place", [0, -1])
def test_in_whatever_piece_it_is(count: int, place: int) -> None:
    numbers = np.ones(count, np.float16)
    assert all_finite("F16", numbers.view(np.uint8))
    numbers[place] = np.inf
    assert not all_finite("F16", numbers.view(np.uint8))


# Experts: looked at by verify, and heard of where a token goes there.


def with_experts(pack: Path, value: float) -> Path:
    """One scale, minimum or weight of each expert is changed."""
    opened = Pack.open(pack)
    for entry in opened.manifest.experts:
        layout, body = opened.layout(entry.key), bytearray((pack / entry.path).read_bytes())
        slot = next(one for one in layout.slots if one.dtype in ("F16", "BF16"))
        bits = np.float16(value).tobytes() if slot.dtype == "F16" else np.float32(value).tobytes()[2:]
        at = layout.data_offset + slot.start
        body[at : at + 2] = bits
        (pack / entry.path).write_bytes(body)
    return resealed(pack)


RUNS = {
    "greedy": (), "sampled": ("--temperature", "1"), "json": ("--json",), "cold": ("--temperature", "1e-30"),
    "filtered": ("--temperature", "1", "--tune", "top-k=5", "--tune", "top-p=0.9"),
}  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_run_says_that_there_are_no_numbers(pack: Path, moert: Moert, run: str, value: str, kernels: str) -> None:
    with_experts(pack, NUMBERS[value])
    said = moert.refuses("run", pack, "hello", "--max-new-tokens", "9", "--tune", f"kernels={kernels}", *RUNS[run])
    assert said.startswith("moert: the model computes numbers that are not finite for token 1 of the answer")


@pytest.mark.parametrize("shape", [DECODER_SHAPE, MIXERS_SHAPE])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_engine_is_as_it_was_after_that(tmp_path: Path, shape: Any) -> None:
    pack = with_experts(write_pack(tmp_path / "p", shape.but(eos=()).spec, paths=False), np.nan)
    with Engine.open(pack, predict="none") as engine:
        for _ in range(2):
            with pytest.raises(NotFinite):
                engine.generate("hello", GenerationSettings(max_new_tokens=3))


@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize("neurons", [None, Neurons(512, bundled=False)])
def test_verify_names_the_expert(tmp_path: Path, value: str, neurons: Neurons | None) -> None:
    shape = DECODER_SHAPE if neurons is None else DECODER_SHAPE.but(activation="relu", gated=False)
    pack = write_pack(
        tmp_path / "p", shape.spec, paths=False, neurons=neurons, bits=(16,) if neurons else (2, 16, 3, 8, 4)
    )
    assert verify(Pack.open(pack), None).experts == len(Pack.open(pack).manifest.experts)
    if neurons is None:
        with_experts(pack, NUMBERS[value])
        with pytest.raises(
            HeaderInvalid, match=r"D00/E000.safetensors: expert D00/E000 has numbers that are not finite"
        ):
            verify(Pack.open(pack), None)


def test_verify_names_the_tensor(pack: Path) -> None:
    with_backbone(pack, "head.weight", np.nan)
    with pytest.raises(HeaderInvalid, match=r"head\.weight.* has numbers that are not finite"):
        verify(Pack.open(pack), None)


@pytest.mark.skipif(library.missing() is not None, reason="needs the kernels")
def test_matrices_stay_where_they_were_read_to(pack: Path) -> None:
    """Nothing is in memory twice on the way."""
    with Engine.open(pack, predict="none") as engine:
        assert engine.backend._staying == set()  # type: ignore[attr-defined]
    assert os.path.exists(pack)
