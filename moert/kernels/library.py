"""The loader of the compiled C, which chooses an instruction set; the checksum of a pack's files in C."""

from __future__ import annotations

import os
import struct
import zlib
from ctypes import CDLL, POINTER, c_char, c_char_p, c_double, c_float, c_int, c_int64, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from moert.errors import RunError
from moert.kernels.structs import Matrix

ABI = 19
PATH = Path(__file__).with_name("_native.so")


class InstructionSetInvalid(RunError):
    """An instruction set that this library does not have or this processor does not run."""


class NativeFailed(MemoryError):
    """The library could not get the memory that it needs."""


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
    "moert_gated": (None, [_POOL, _DATA, c_int, c_int, c_int, c_int, _DATA, _DATA, _Array]),
    "moert_crc32": (c_uint32, [c_uint32, _DATA, c_int64]),
    "moert_crc32_fast": (c_int, []),
    "moert_leave": (c_int64, [_DATA, _DATA, c_int64, _DATA, _DATA]),
    "moert_fence": (c_int, [_DATA, c_int64]),
    "moert_fence_end": (None, [c_int]),
    "moert_fence_broken": (c_int, [c_int]),
    "moert_fences_broken": (c_int64, []),
    "moert_assign": (c_double, [_DATA, c_int, _DATA, _DATA, _DATA]),
    "moert_code_inputs": (None, [c_int, _DATA]),
    "moert_reader_open": (_READER, [c_int, c_int]),
    "moert_reader_close": (None, [_READER]),
    "moert_reader_has_ring": (c_int, [_READER]),
    "moert_read_many": (c_int, [_READER, _DATA, c_int]),
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
    array = np.frombuffer(data, np.uint8)
    for at in range(0, len(array), _PART):  # Ctrl-C is handled between parts
        part = array[at : at + _PART]
        value = int(found.functions.moert_crc32(value, part.ctypes.data, part.nbytes))
    return value
