"""All but the experts of a pack: weights as they are stored, and a tokenizer that gives every token of a text."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from dense_packs import GROUP, Tensors, dense_quantization, widened, write_dense_pack
from random_packs import SPECS, write_pack
from tokenizers import Tokenizer, models, pre_tokenizers

from moeconv.writer import add_to_pack
from moert.engine.budget import Budget
from moert.engine.engine import Engine
from moert.engine.text import Text
from moert.errors import TokenizerMissing
from moert.kernels.backend import Floats
from moert.models.backbone import load_backbone
from moert.pack.codec import F32, unpack_codes
from moert.pack.errors import HashMismatch, HeaderInvalid
from moert.pack.reader import Pack
from tests.refusing import one_line
from tests.shapes import Shape, every, shapes_of

TEXT = "a b c d e f"


def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"[pad]": 0, **{word: at + 1 for at, word in enumerate(TEXT.split())}}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def pack_with(path: Path, body: bytes) -> Pack:
    write_pack(path)
    add_to_pack(path, Pack.open(path).manifest, "tokenizer.json", body)
    return Pack.open(path)


def test_stored_truncation_and_padding_have_no_effect(tmp_path: Path) -> None:
    stored = words()
    stored.enable_truncation(4)
    stored.enable_padding(length=9, pad_token="[pad]")
    tokenizer = Text(pack_with(tmp_path / "model.pack", stored.to_str().encode())).tokenizer
    assert tokenizer.encode(TEXT).ids == words().encode(TEXT).ids == [1, 2, 3, 4, 5, 6]
    assert tokenizer.encode("b").ids == [2]


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"\xff\xfe", b'{"version": "1.0",\n "model": {"type": "None"}}'], ids=repr
)
def test_a_tokenizer_that_is_none_is_one_line(tmp_path: Path, body: bytes) -> None:
    pack = pack_with(tmp_path / "model.pack", body)
    with one_line(TokenizerMissing, r"the pack's tokenizer\.json can't be read .*convert the model again"):
        _ = Text(pack).tokenizer


def test_a_damaged_tokenizer_is_noticed(tmp_path: Path) -> None:
    """It would still load, and split texts differently."""
    pack = pack_with(tmp_path / "model.pack", words().to_str().encode())
    path = pack.root / "tokenizer.json"
    path.write_text(path.read_text().replace('"a":1', '"g":1'))
    with pytest.raises(HashMismatch, match=r"tokenizer\.json: checksum differs"):
        _ = Text(pack).tokenizer


# Stored weights


WIDTHS = {"attention": 3, "router": 16, "ffn": 2, "head": 4, "embed": 8}


def by_hand(tensors: Tensors, stem: str, bits: int, in_features: int) -> F32:
    """scale · code + min, in float32, for each weight."""
    codes = unpack_codes(tensors[f"{stem}.qweight"].numpy(), bits, in_features).astype(np.float32)
    group = np.arange(in_features) // GROUP
    scale, minimum = (tensors[f"{stem}.{part}"].numpy().astype(np.float32)[:, group] for part in ("scale", "min"))
    return codes * scale + minimum


NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@pytest.mark.parametrize("dtype16", ["F16", "BF16"])
@pytest.mark.parametrize("family", SPECS)
def test_weights_come_back_as_they_are_stored(tmp_path: Path, family: str, dtype16: str) -> None:
    spec = SPECS[family]
    bits = {role: width for role, width in {**WIDTHS, "mixer": 2}.items() if role in spec.roles()}
    written = write_dense_pack(tmp_path / "p", spec, dense_quantization(bits, dtype16))
    pack = Pack.open(tmp_path / "p")
    stored = load_backbone(pack)
    assert list(stored) == list(shapes_of(spec))
    wide = widened(stored)
    assert {name: weight.shape for name, weight in wide.items()} == shapes_of(spec)
    quantized = 0
    for name, weight in stored.items():
        if isinstance(weight, Floats):
            assert weight.dtype == NAMES[written[name].dtype]
            raw = written[name].contiguous().view(torch.uint8).numpy()
            assert np.array_equal(np.ascontiguousarray(weight.data).view(np.uint8), raw)
            assert np.array_equal(wide[name], written[name].float().numpy())
            continue
        quantized += 1
        role, stem = spec.tensors[name].role, name.removesuffix(".weight")
        assert role is not None
        assert (weight.bits, weight.group_size) == (bits[role], GROUP)
        for mine, part in ((weight.qweight, "qweight"), (weight.scale, "scale"), (weight.minimum, "min")):
            assert mine.flags.c_contiguous
            assert np.array_equal(mine, written[f"{stem}.{part}"].numpy())
        assert np.array_equal(wide[name], by_hand(written, stem, weight.bits, weight.in_features))
    assert quantized == sum(bits.get(spec.tensors[name].role or "", 16) < 16 for name in stored)


MAPPINGS = Path("/proc/self/maps")


@pytest.mark.skipif(not MAPPINGS.exists(), reason="needs Linux")
@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("family", SPECS)
def test_an_engine_holds_nothing_of_the_file(tmp_path: Path, family: str, kernels: str) -> None:
    """Where memory is short, the pages of a mapped file are read from disk again and again, and one that becomes
    shorter would end the process."""
    write_dense_pack(tmp_path / "p", SPECS[family], dense_quantization({"attention": 4, "router": 16}))
    path = str(tmp_path / "p" / "backbone.safetensors")
    stored = load_backbone(Pack.open(tmp_path / "p"))
    assert dict(stored)
    assert path not in MAPPINGS.read_text()
    del stored
    with Engine.open(tmp_path / "p", predict="none", kernels=kernels):
        assert path not in MAPPINGS.read_text()


def test_backbone_bytes_are_what_is_held(tmp_path: Path) -> None:
    spec = SPECS["decoder"]
    written = write_dense_pack(tmp_path / "p", spec, dense_quantization(WIDTHS))
    held = sum(tensor.nbytes for tensor in written.values())
    assert held <= Budget.of(Pack.open(tmp_path / "p").manifest).backbone_bytes <= held + 10_000


Q = "decoder.0.attn.q"


def recast(name: str, to: torch.dtype) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name].to(to)})


BACKBONES: dict[str, tuple[str, Callable[[Tensors], object]]] = {
    "no scales": (f"lacks {Q}.scale", lambda t: t.pop(f"{Q}.scale")),
    "no codes": (f"lacks {Q}.qweight", lambda t: t.pop(f"{Q}.qweight")),
    "a matrix besides": (f"holds '{Q}.weight'", lambda t: t.update({f"{Q}.weight": torch.zeros(12, 10)})),
    "codes where none belong": (
        "holds 'decoder.norm.qweight'",
        lambda t: t.update({"decoder.norm.qweight": torch.zeros(10, dtype=torch.uint8)}),
    ),
    "signed codes": (f"{Q}.qweight is of the type I8, expected U8", recast(f"{Q}.qweight", torch.int8)),
    "wide scales": (f"{Q}.scale is of the type F32, expected F16", recast(f"{Q}.scale", torch.float32)),
    "scales of bfloat16": (f"{Q}.min is of the type BF16, expected F16", recast(f"{Q}.min", torch.bfloat16)),
    "the other 16 bits": ("router.weight is of the type F16, expected BF16",
                          recast("decoder.0.router.weight", torch.float16)),
    "a router of float32": ("router.weight is of the type F32, expected BF16",
                            recast("decoder.0.router.weight", torch.float32)),
    "too few codes": (f"{Q}.qweight has the shape",
                      lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"][:, 1:].clone()})),
    "one group too many": (f"{Q}.scale has the shape", lambda t: t.update({f"{Q}.scale": torch.ones(12, 4).half()})),
    "an infinite scale": (f"scales of {Q}.weight are not finite", lambda t: t[f"{Q}.scale"].fill_(torch.inf)),
    "a minimum that is none": (f"scales of {Q}.weight are not finite", lambda t: t[f"{Q}.min"][0].fill_(torch.nan)),
    "norms of whole numbers": ("should hold floating-point numbers", recast("decoder.norm.weight", torch.int32)),
}  # fmt: skip


@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_that_is_not_that_of_the_manifest(tmp_path: Path, name: str) -> None:
    words, change = BACKBONES[name]
    write_dense_pack(tmp_path / "p", SPECS["decoder"], dense_quantization(WIDTHS), change)
    with one_line(HeaderInvalid, words):
        dict(load_backbone(Pack.open(tmp_path / "p")))


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted by /proc")
def test_loading_holds_little_more_than_the_copies(tmp_path: Path) -> None:
    """22 matrices of 4 MB: the file does not lie in memory as a whole beside what was read of it."""
    spec = Shape(1024, d_model=1024, n_heads=8, n_kv_heads=8, head_dim=128, decoder=every(5), d_ff=1).spec

    def number(tensors: Tensors) -> None:
        for at, tensor in enumerate(tensors.values()):
            tensor.fill_(at)

    write_dense_pack(tmp_path / "p", spec, dense_quantization({"router": 16}), number)
    code = (
        "import sys, re\n"
        "from moert.models.backbone import load_backbone\n"
        "from moert.pack.reader import Pack\n"
        "def peak(): return int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) * 1024\n"
        "weights = load_backbone(Pack.open(sys.argv[1]))\n"
        "before = peak()\n"
        "kept = {name: weights.pop(name).widened() for name in list(weights)}\n"
        "more = peak() - before\n"
        "assert all((array == at).all() for at, array in enumerate(kept.values()))\n"
        "print(more)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "p")], capture_output=True, text=True, check=True)
    assert 85_000_000 < int(done.stdout) < 120_000_000
