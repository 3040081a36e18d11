"""The compiled C: its structs and functions, the choice of an instruction set, the checksum of files."""

from __future__ import annotations

import os
import struct
import zlib
from ctypes import (
    CDLL,
    POINTER,
    Structure,
    addressof,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_void_p,
)
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moert.errors import RunError

if TYPE_CHECKING:
    import numpy.typing as npt

KINDS = {"MXFP4": 5, "F16": 16, "BF16": 17, "F32": 32}  # of a matrix without codes of ours; for codes it is their width
ACTIVATIONS = {"relu": 0, "silu": 1, "gelu": 2, "gelu_new": 3, "relu2": 4}
SCORES = {"softmax": 0, "sigmoid": 1, "sigmoid_of_chosen": 2, "sparsemixer": 3, "sqrt_softplus": 4}


class Matrix(Structure):
    """The struct moert_matrix."""

    _fields_ = [
        ("data", c_void_p), ("scale", c_void_p), ("minimum", c_void_p), ("bias", c_void_p),
        ("kind", c_int32), ("rows", c_int32), ("cols", c_int32), ("group", c_int32),
        ("block_rows", c_int32), ("power", c_int32), ("blocks", c_void_p),
    ]  # fmt: skip


class Norm(Structure):
    """The struct moert_norm."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_float)]


class Act(Structure):
    """The struct moert_act."""

    _fields_ = [("kind", c_int32), ("limit", c_float), ("slope", c_float), ("plus", c_float), ("bound", c_float)]


class Ffn(Structure):
    """The struct moert_ffn."""

    _fields_ = [("gate", Matrix), ("up", Matrix), ("down", Matrix)]


class Place(Structure):
    """The struct moert_place."""

    _fields_ = [
        ("data", c_int64), ("scale", c_int64), ("minimum", c_int64), ("bias", c_int64),
        ("kind", c_int32), ("group", c_int32), ("power", c_int32),
    ]  # fmt: skip


class Neurons(Structure):
    """The struct moert_neurons."""

    _fields_ = [
        ("gate", Place), ("up", Place), ("down", Place),
        ("d_model", c_int32), ("d_ff", c_int32), ("block_rows", c_int32),
    ]  # fmt: skip


class Heads(Structure):
    """The struct moert_heads."""

    _fields_ = [
        ("sinks", c_void_p), ("n", c_int32), ("kv", c_int32), ("dim", c_int32), ("value_dim", c_int32),
        ("causal", c_int32), ("window", c_int32), ("chunk", c_int32), ("scale", c_float), ("softcap", c_float),
    ]  # fmt: skip


class Attention(Structure):
    """The struct moert_attention."""

    _fields_ = [
        ("heads", Heads), ("norm", Norm), ("q_norm", Norm), ("k_norm", Norm), ("v_norm", Norm), ("after", Norm),
        ("q", Matrix), ("k", Matrix), ("v", Matrix), ("o", Matrix), ("gate", Matrix),
        ("rope_dims", c_int32), ("norm_each", c_int32), ("norm_turned", c_int32), ("clip", c_float), ("add", c_float),
    ]  # fmt: skip


class Latent(Structure):
    """The struct moert_latent."""

    _fields_ = [
        ("heads", Heads), ("norm", Norm), ("after", Norm), ("q_norm", Norm), ("kv_norm", Norm),
        ("q_a", Matrix), ("q", Matrix), ("q_turn", Matrix), ("kv_a", Matrix), ("k_turn", Matrix),
        ("keys", Matrix), ("values", Matrix), ("o", Matrix), ("gate", Matrix), ("rope_dims", c_int32), ("add", c_float),
    ]  # fmt: skip


class Positions(Structure):
    """The struct moert_positions."""

    _fields_ = [("turns", c_void_p), ("bias", c_void_p), ("bias_stride", c_int64), ("query_scale", c_void_p)]


class Router(Structure):
    """The struct moert_router."""

    _fields_ = [
        ("norm", Norm), ("own", Norm), ("matrix", Matrix), ("choice_bias", c_void_p), ("expert_scale", c_void_p),
        ("score", c_int32), ("top_k", c_int32), ("renormalise", c_int32),
        ("groups", c_int32), ("best_groups", c_int32), ("group_top", c_int32), ("factor", c_float), ("jitter", c_float),
    ]  # fmt: skip


class Keys(Structure):
    """The struct moert_keys."""

    _fields_ = [
        ("pages", c_void_p), ("head", c_int64), ("values", c_int64), ("key_steps", c_int64), ("value_steps", c_int64),
        ("small", c_int32),
    ]  # fmt: skip


class Taps(Structure):
    """The struct moert_taps."""

    _fields_ = [("taps", c_void_p), ("bias", c_void_p), ("channels", c_int32), ("k", c_int32), ("silu", c_int32)]


class Delta(Structure):
    """The struct moert_delta."""

    _fields_ = [
        ("q", c_void_p), ("k", c_void_p), ("v", c_void_p), ("decay", c_void_p), ("beta", c_void_p),
        ("state", c_void_p), ("y", c_void_p),
        ("tokens", c_int32), ("key_heads", c_int32), ("heads", c_int32), ("dk", c_int32), ("dv", c_int32),
        ("each", c_int32),
    ]  # fmt: skip


class Scan(Structure):
    """The struct moert_scan."""

    _fields_ = [
        ("x", c_void_p), ("dt", c_void_p), ("a", c_void_p), ("b", c_void_p), ("c", c_void_p), ("d", c_void_p),
        ("state", c_void_p), ("y", c_void_p),
        ("tokens", c_int32), ("heads", c_int32), ("groups", c_int32), ("p", c_int32), ("n", c_int32), ("each", c_int32),
    ]  # fmt: skip


class Lstm(Structure):
    """The struct moert_lstm."""

    _fields_ = [
        ("inputs", c_void_p), ("recurrent", c_void_p), ("counts", c_void_p), ("state", c_void_p), ("y", c_void_p),
        ("sequences", c_int32), ("width", c_int32), ("backward", c_int32),
    ]  # fmt: skip


class Sparse(Structure):
    """The struct moert_sparse."""

    _fields_ = [
        ("queries", c_void_p), ("keys", c_void_p), ("values", c_void_p), ("spans", c_void_p), ("y", c_void_p),
        ("rows", c_int32), ("width", c_int32),
    ]  # fmt: skip


RULES = {"recency": 0, "frequency": 1, "nearness": 2, "wait": 3}


class Residents(Structure):
    """The struct moert_residents."""

    _fields_ = [
        ("rows", c_int64), ("steps", c_int64), ("place", c_void_p), ("order", c_void_p), ("frequency", c_void_p),
        ("last_used", c_void_p), ("loaded_at", c_void_p), ("last_visit", c_void_p), ("nbytes", c_void_p),
        ("recent", c_void_p), ("visits", c_void_p), ("visited_at", c_void_p), ("interval", c_void_p),
        ("nearness", c_void_p), ("following", c_void_p), ("forgotten", c_void_p), ("forgotten_n", c_int64),
        ("remembered", c_double), ("rule", c_int32), ("experts", c_int32),
    ]  # fmt: skip


PLACING = 6
"""The numbers for each expert in the scratch of moert_assign."""


class Placing(Structure):
    """The struct moert_placing."""

    _fields_ = [
        ("kinds", c_void_p), ("host_call_s", c_double), ("launch_s", c_double), ("row_s", c_double),
        ("pass_s", c_double), ("reluctance", c_double), ("device_s", c_double), ("copy_s", c_double),
        ("read_s", c_double), ("tried", c_int32), ("rule", c_int32), ("by_caller", c_int32),
    ]  # fmt: skip


class Feedback(Structure):
    """The struct moert_feedback."""

    _fields_ = [
        ("values", c_void_p), ("factor", c_void_p), ("scale", c_void_p), ("minimum", c_void_p), ("group", c_void_p),
        ("codes", c_void_p), ("moved", c_void_p), ("stride", c_int64), ("across", c_int64), ("inputs", c_int32),
        ("columns", c_int32), ("improves", c_int32), ("top", c_float),
    ]  # fmt: skip


class Trellis(Structure):
    """The struct moert_trellis."""

    _fields_ = [
        ("values", c_void_p), ("factor", c_void_p), ("scale", c_void_p), ("weight", c_void_p), ("first", c_void_p),
        ("second", c_void_p), ("coded", c_void_p), ("moved", c_void_p), ("states", c_void_p), ("room", c_void_p),
        ("stride", c_int64), ("across", c_int64), ("inputs", c_int32), ("ahead", c_int32), ("columns", c_int32),
        ("look", c_int32), ("step", c_int32), ("state", c_int32), ("improves", c_int32),
    ]  # fmt: skip


class Read(Structure):
    """The struct moert_read."""

    _fields_ = [
        ("offset", c_int64), ("nbytes", c_int64), ("place", c_void_p), ("fd", c_int32), ("crc", c_uint32),
        ("checked", c_int32), ("forget", c_int32), ("found", c_int64), ("error", c_int32), ("wrong", c_int32),
    ]  # fmt: skip


ABI = 22
PATH = Path(__file__).with_name("_native.so")


class InstructionSetInvalid(RunError):
    """An instruction set that this library does not have or this processor does not run. Leave `--tune kernels` out."""


class NativeFailed(MemoryError):
    """The library could not get the memory that it needs."""


def address(array: npt.NDArray[Any]) -> int:
    """Returns the address of an array's first number. The array's memory has to be contiguous."""
    try:
        return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # an array that is empty, or not to be written: takes three times as long
        assert array.flags.c_contiguous
        return int(array.ctypes.data)


class _Array:
    """An argument that is an array: its memory has to be contiguous and writable."""

    from_param = (c_char * 0).from_buffer


_POOL, _READER, _DATA = c_void_p, c_void_p, c_void_p
# name: (result, arguments), as in moert.h. Data is passed by address.
_FUNCTIONS = {
    "moert_abi": (c_int, []),
    "moert_block": (c_int, [c_int, c_int]),
    "moert_isa_count": (c_int, []),
    "moert_isa_name": (c_char_p, [c_int]),
    "moert_isa_runs": (c_int, [c_int]),
    "moert_pool_open": (_POOL, [c_int, c_int]),
    "moert_pool_close": (None, [_POOL]),
    "moert_pool_stop": (None, [_POOL, c_int]),
    "moert_linear": (c_int, [_POOL, c_int, _DATA, _Array, c_int, _DATA]),
    "moert_rows": (c_int, [_POOL, POINTER(Matrix), c_int, _DATA, _Array]),
    "moert_mixture": (c_int, [_POOL, _DATA, c_int, _DATA, _DATA, _Array, _Array, _Array, c_int, _Array]),
    "moert_parts": (c_int, [_POOL, _DATA, c_int, _DATA, _Array, _Array, _Array, c_int, _Array]),
    "moert_add_parts": (None, [_POOL, _Array, _Array, _Array, c_int, c_int, _Array]),
    "moert_fire": (c_int, [_POOL, _DATA, _DATA, _DATA, _DATA, _DATA, c_int, _Array]),
    "moert_project": (c_int, [_POOL, _DATA, _DATA, _DATA, _DATA, c_int, _DATA, _Array]),
    "moert_attend": (c_int, [_POOL, _DATA, c_int, _Array, _DATA, c_int, c_int, _DATA]),
    "moert_attend_latent": (c_int, [_POOL, _DATA, c_int, _Array, _DATA, c_int, c_int, _DATA]),
    "moert_keep": (c_int, [_POOL, _DATA, c_int, _Array, c_int, _DATA]),
    "moert_normalise": (None, [_POOL, _DATA, c_int, c_int, _Array, _Array]),
    "moert_scores": (c_int, [_POOL, _DATA, c_int, _Array, _Array, _Array]),
    "moert_choose": (c_int, [_POOL, _DATA, _Array, c_int, _Array, _Array]),
    "moert_prefer": (c_int, [_DATA, _Array, c_float, c_int, c_int, _Array, _Array, _Array]),
    "moert_gate": (c_int, [_POOL, POINTER(Matrix), c_int, _Array, c_float, _Array]),
    "moert_convolve": (None, [_POOL, _DATA, c_int, _DATA, _DATA, _Array]),
    "moert_delta_rule": (c_int, [_POOL, _DATA]),
    "moert_scan_tokens": (c_int, [_POOL, _DATA]),
    "moert_lstm_tokens": (c_int, [_POOL, _DATA]),
    "moert_attend_sparsely": (c_int, [_POOL, _DATA]),
    "moert_softplus": (None, [_POOL, c_int, c_int, _DATA, _DATA, _Array]),
    "moert_sigmoid": (None, [_POOL, c_int64, _DATA, _Array]),
    "moert_balance": (None, [_POOL, c_int, c_int, c_int, c_float, _Array]),
    "moert_gated": (None, [_POOL, _DATA, c_int, c_int, c_int, c_int, _DATA, _DATA, _Array]),
    "moert_crc32": (c_uint32, [c_uint32, _DATA, c_int64]),
    "moert_crc32_fast": (c_int, []),
    "moert_leave": (c_int64, [_DATA, _Array, c_int64, _Array, _Array]),
    "moert_fence": (c_int, [_DATA, c_int64]),
    "moert_fence_end": (None, [c_int]),
    "moert_fence_broken": (c_int, [c_int]),
    "moert_fences_broken": (c_int64, []),
    "moert_assign": (c_double, [_DATA, c_int, _Array, _Array, _Array]),
    "moert_code_inputs": (None, [c_int, _DATA]),
    "moert_code_pairs": (c_int, [c_int, _DATA]),
    "moert_reader_open": (_READER, [c_int, c_int]),
    "moert_reader_close": (None, [_READER]),
    "moert_reader_has_ring": (c_int, [_READER]),
    "moert_read_many": (c_int, [_READER, _Array, c_int]),
    "moert_head": (c_int, [_POOL, _DATA, c_float, c_float, POINTER(Matrix), c_int, _Array, _Array]),
}


@dataclass(frozen=True)
class InstructionSet:
    """One of the instruction sets that the library has. number: the number for moert_pool_open."""

    number: int
    name: str
    runs: bool


@dataclass(frozen=True)
class Missing:
    """The reason why there is no library, and the user's remedy."""

    reason: str
    advice: str = "install moert again"


@dataclass(frozen=True)
class Library:
    """The loaded library: its C functions by name, and its instruction sets, best first."""

    functions: CDLL
    instruction_sets: tuple[InstructionSet, ...]

    def choose(self, wanted: str | None = None) -> int:
        """Returns the number of the wanted instruction set, by default of the best that runs.

        Raises InstructionSetInvalid.
        """
        running = [each for each in self.instruction_sets if each.runs]
        known = {each.name: each for each in self.instruction_sets}
        if wanted is None:
            return running[0].number
        names = ", ".join(each.name for each in running)
        if wanted not in known:
            raise InstructionSetInvalid(f"there is no instruction set {wanted!r} in the native kernels: use {names}")
        if not known[wanted].runs:
            raise InstructionSetInvalid(f"this processor does not run the instruction set {wanted}: use {names}")
        return known[wanted].number


def check(failed: int) -> None:
    """Raises NativeFailed unless a function of the library has returned 0."""
    if failed:
        raise NativeFailed("the native kernels could not get the memory that they need")


def load() -> Library | None:
    """Returns the library, or None where there is none that works; missing() then returns the reason."""
    found = _open(PATH)
    return found if isinstance(found, Library) else None


def missing() -> str | None:
    """Returns the reason why load() returns None; None if it does not."""
    found = _open(PATH)
    return found.reason if isinstance(found, Missing) else None


def advice() -> str | None:
    """Returns the user's remedy where load() returns None."""
    found = _open(PATH)
    return found.advice if isinstance(found, Missing) else None


def missing_note() -> str | None:
    """Returns a note for the user where the library is missing, with the reason and the remedy."""
    found = _open(PATH)
    if isinstance(found, Library):
        return None
    return f"no native kernels: {found.reason}; computing with numpy, slowly: {found.advice}"


@cache
def _open(path: Path) -> Library | Missing:
    """Returns the library at `path`, or the reason why it can't be used."""
    try:
        if _cut_short(path):
            return Missing(f"{path.name} is damaged: its end is missing")
        functions = CDLL(str(path))
        _declare(functions)
    except FileNotFoundError:
        return Missing(f"{path.name} was not built", "install a C compiler, then moert again")
    except (OSError, AttributeError) as error:  # can't be read; not for this machine; a function that is not there
        why = getattr(error, "strerror", None) or str(error).removeprefix(f"{path}: ")
        return Missing(f"{path.name} does not load: {' '.join(why.split())}")
    abi = functions.moert_abi()
    if abi != ABI:
        return Missing(f"{path.name} is of another version (interface {abi}, expected {ABI})")
    return Library(functions, tuple(_instruction_sets(functions)))


def _cut_short(path: Path) -> bool:
    """Returns whether a 64-bit ELF file ends before the table of its sections, which linkers write last: to load it
    would end the process. Raises OSError."""
    with path.open("rb") as stream:
        header, nbytes = stream.read(64), os.fstat(stream.fileno()).st_size
    if not header.startswith(b"\x7fELF\x02\x01"):  # of 64 bits, little-endian
        return False
    if len(header) < 64:
        return True
    (start,), (size, count) = struct.unpack_from("<Q", header, 0x28), struct.unpack_from("<HH", header, 0x3A)
    return bool(start + size * count > nbytes)


def _declare(functions: CDLL) -> None:
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments


def _instruction_sets(functions: CDLL) -> list[InstructionSet]:
    return [
        InstructionSet(number, functions.moert_isa_name(number).decode(), bool(functions.moert_isa_runs(number)))
        for number in range(functions.moert_isa_count())
    ]


_PART = 1 << 28


def crc32(data: bytes | memoryview, value: int = 0) -> int:
    """Returns the CRC-32 of `data`, as zlib.crc32 does."""
    found = load()
    if found is None or not found.functions.moert_crc32_fast():
        return zlib.crc32(data, value)
    import numpy as np  # the version is printed without it

    array = np.frombuffer(data, np.uint8)
    for at in range(0, len(array), _PART):  # Ctrl-C is handled between parts
        part = array[at : at + _PART]
        value = int(found.functions.moert_crc32(value, part.ctypes.data, part.nbytes))
    return value
