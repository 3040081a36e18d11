"""Loads everything but the experts: backbone.safetensors and the tokenizer."""

from __future__ import annotations

import zlib

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor

from moert.errors import TokenizerMissing
from moert.pack.errors import FileMissing, HashMismatch, HeaderInvalid
from moert.pack.manifest import BACKBONE
from moert.pack.model_spec import backbone_tensors
from moert.pack.reader import Pack

TOKENIZER = "tokenizer.json"
_CHUNK = 1 << 20


def load_backbone(pack: Pack) -> dict[str, Tensor]:
    """Canonical name → float32 tensor, read one after the other. Raises FileMissing, HashMismatch or HeaderInvalid."""
    if BACKBONE not in pack.manifest.files:
        raise FileMissing(f"the pack at {pack.root} lists no {BACKBONE}: convert the model again")
    _check_checksum(pack)
    expected = backbone_tensors(pack.manifest.model)
    weights: dict[str, Tensor] = {}
    try:
        with safe_open(pack.file(BACKBONE), framework="pt") as file:
            names: list[str] = list(file.keys())
            found = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            _check(found, expected)
            for name in expected:
                tensor = file.get_tensor(name)
                if not tensor.is_floating_point():
                    raise HeaderInvalid(f"{BACKBONE}: {name} should hold floating-point numbers, found {tensor.dtype}")
                weights[name] = tensor.float()
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise HeaderInvalid(f"{BACKBONE} is not a safetensors file ({reason}): copy the pack again") from None
    return weights


def load_tokenizer(pack: Pack) -> Tokenizer:
    """The pack's tokenizer, set to give every token of a text and no others: what was stored of cutting and filling
    to a length belongs to training.

    Raises TokenizerMissing, or a PackError if the file isn't what the manifest says.
    """
    if TOKENIZER not in pack.manifest.files:
        raise TokenizerMissing(f"the pack at {pack.root} has no {TOKENIZER}: convert the model with its tokenizer")
    body = pack.read_file(TOKENIZER)
    try:
        tokenizer = Tokenizer.from_buffer(body)
    except Exception as error:  # the library raises plain Exception
        reason = " ".join(str(error).split())
        raise TokenizerMissing(
            f"{TOKENIZER} in {pack.root} can't be read ({reason}): convert the model again"
        ) from None
    if not tokenizer.get_vocab_size():
        raise TokenizerMissing(f"{TOKENIZER} in {pack.root} has no vocabulary: convert the model again")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_checksum(pack: Pack) -> None:
    """Reads the file once in pieces, so that it is never in memory as a whole beside its float32 copy."""
    checksum = 0
    with open(pack.file(BACKBONE), "rb") as handle:
        while chunk := handle.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    if checksum != pack.manifest.files[BACKBONE].crc32:
        raise HashMismatch(f"{BACKBONE}: checksum differs from the manifest: the file is damaged, copy it again")


def _check(found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"holds {extra[0]}, which the model has not"
        raise HeaderInvalid(f"{BACKBONE} {what}: it is not that of this model")
    for name, shape in expected.items():
        if found[name] != shape:
            raise HeaderInvalid(f"{BACKBONE}: {name} has the shape {found[name]}, expected {shape}")
