"""Safetensors files, read strictly, and the bounds of all files of a pack."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moert.pack.documents import brief, parsed
from moert.pack.errors import FormatTooNew, HeaderInvalid, SizeOverflow
from moert.pack.files import OpenedFile
from moert.pack.model_spec import STACKS, LayerKey

Room = Callable[[int, str], None]
"""A function that is called, before memory is taken, with the bytes that reading a file of this name will take at once;
raises an error of its own where memory lacks them."""

HEADER_BYTES = 1 << 23
HEADER_MARKS = 1 << 20
"""The most marks of a safetensors file's header: the header of 14,848 experts with checksums has a tenth of these, and
of HEADER_BYTES."""
_MARK_BYTES = 128
"""The most memory that each value and each name of JSON takes, beside its letters (119 measured)."""
_TEXT_BYTES, _WIDE_TEXT_BYTES = 6, 9
"""The most memory that each byte of the text takes: itself, decoded, and in the values, where a letter has up to four
bytes; the larger number, if the text has letters beyond ASCII, counts four bytes when decoded too."""

TEXT_BYTES = 640
"""The most memory that turning a text into tokens takes for each byte that it has, or has once it is normalised: where
each byte is a token (600 measured)."""
TOKENIZER = "tokenizer.json"
_TREE = re.compile(b'"(Unigram|unk_id)"')  # older files do not name it
_WORDS = re.compile(rb'\[\s*"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)
_NODE_BYTES, _NAME_BYTES, _TOKENIZER_MARK_BYTES = 330, 400, 170  # see tokenizer_takes
_MOST_DEPTH = 256  # letters that words may share: each further one counts as a node
_MOST_WORDS, _MOST_BYTES = 1 << 19, 1 << 25  # kept to count nodes: each letter of further words counts as a node
COVERED_BYTES = 8 << 20
"""The bytes that the margin of every budget has room for: no Room refuses so few."""


def unbounded(nbytes: int, name: str) -> None:
    """The Room of callers that have no limit."""


class Bound(NamedTuple):
    """The bounds of a file: the most bytes, the most marks of its JSON, and how many times its bytes are taken at once
    to make objects of them."""

    most_bytes: int
    times: float = 1.0
    most_marks: int | None = None


class Taken(NamedTuple):
    """The most bytes that reading a file takes at one time, the file's own among them, and the bytes that are kept
    afterwards."""

    peak_bytes: int
    kept_bytes: int


NOTHING = Taken(0, 0)


_BOUNDS = {
    "manifest.json": Bound(1 << 25, most_marks=1 << 21),
    TOKENIZER: Bound(1 << 26, most_marks=1 << 22),
    "chat.json": Bound(1 << 20, most_marks=1 << 18),
    "config.json": Bound(1 << 22, most_marks=1 << 18),
    "generation_config.json": Bound(1 << 22, most_marks=1 << 18),
    "report.json": Bound(1 << 26, most_marks=1 << 21),
    "trace.safetensors": Bound(1 << 21, times=2.0),
    "paths.safetensors": Bound(1 << 28, times=1.5),
    "neurons.safetensors": Bound(1 << 28, times=1.5),
    "hash.safetensors": Bound(1 << 30, times=1.5),
    "order.safetensors": Bound(1 << 28, times=2.5),
    "predictor.safetensors": Bound(1 << 33, times=2.5),
}
_OTHER = Bound(1 << 28)
"""The bounds of any other file of a pack that a program reads as a whole."""


def bound_of(name: str) -> Bound:
    """Returns the bounds of a file of the pack that is read as a whole, by its name."""
    return _BOUNDS.get(name, _OTHER)


def known_bounds() -> dict[str, int]:
    """Returns the most bytes of each file that has a use, by its name."""
    return {name: bound.most_bytes for name, bound in _BOUNDS.items()}


def check_size(name: str, nbytes: int) -> None:
    """Raises SizeOverflow for a file of this name that is larger than its bound."""
    most = bound_of(name).most_bytes
    if nbytes > most:
        raise SizeOverflow(f"{name} has {nbytes} bytes, none is larger than {most}: this is no pack of a model")


def marks(text: bytes) -> int:
    """Returns the number of letters that open, join or divide in JSON text, at least as many as it has values and
    names."""
    return sum(map(text.count, (b"[", b"{", b",", b":")))


def json_bytes(name: str, text: bytes, most_marks: int) -> int:
    """Returns the most memory that reading the text as JSON takes. Raises SizeOverflow where the text has more values
    and names than `most_marks`."""
    count = marks(text)
    if count > most_marks:
        raise SizeOverflow(
            f"{name} has {count} values and names, none has more than {most_marks}: this is no pack of a model"
        )
    return _MARK_BYTES * count + (_TEXT_BYTES if text.isascii() else _WIDE_TEXT_BYTES) * len(text)


def take_room(name: str, body: bytes, room: Room) -> None:
    """Calls `room` with the bytes that making objects of a file takes, all of whose bytes were read. Raises
    SizeOverflow, or the error that `room` raises."""
    bound = bound_of(name)
    if name.endswith(".safetensors"):
        header = body[8 : 8 + min(HEADER_BYTES, int.from_bytes(body[:8], "little"))]
        room(int((bound.times - 1) * len(body)) + json_bytes(name, header, HEADER_MARKS), name)
    elif bound.most_marks is not None:
        needed = json_bytes(name, body, bound.most_marks)
        room(tokenizer_takes([body]).peak_bytes - len(body) if name == TOKENIZER else needed, name)


def tokenizer_takes(parts: Iterable[bytes]) -> Taken:
    """Returns the memory that the library takes to read a tokenizer.json, whose bytes come in parts: of one part never
    less.

    Measured on vocabularies of 2,000 to 250,000 tokens: beside the file and its small parts 70 to 140 bytes for each
    mark at the peak, and 290 to 365 for each name at the end; of Unigram, which keeps a tree of all tokens, 300 for
    each token and for each node. In parts, tokens before the part with the model's type are not counted.
    """
    nbytes = count = names = whole = 0
    words, tree = list[bytes](), False
    for part in parts:
        nbytes, count, names = nbytes + len(part), count + marks(part), names + part.count(b":")
        tree = tree or _TREE.search(part) is not None
        few = part.count(b"[") <= _MOST_WORDS
        found = _WORDS.findall(part) if tree and few else []
        whole += len(part) if tree and not few else 0
        if len(words) + len(found) <= _MOST_WORDS and nbytes <= _MOST_BYTES:
            words += found
        else:
            whole += sum(map(len, found)) + len(found)
    kept = max(_NAME_BYTES * names, _NODE_BYTES * (whole + len(words) + _nodes(words)) if tree else 0)
    return Taken(3 * nbytes + max(kept, 0 if tree else _TOKENIZER_MARK_BYTES * count), kept)


def vocabulary_takes(tokens: int) -> Taken:
    """Returns about the memory that a tokenizer.json with `tokens` tokens takes, where the file can't be looked at."""
    return Taken(_NAME_BYTES * tokens, _NAME_BYTES * tokens)


def _nodes(words: list[bytes]) -> int:
    """Returns the number of nodes of a tree of these words, one for each beginning of a word."""
    words = sorted(words)
    text, lengths = np.frombuffer(b"".join(words), np.uint8), np.array([*map(len, words)], np.int64)
    starts, alike, depth = np.cumsum(lengths) - lengths, np.arange(1, len(words)), 0
    nodes = len(text)
    while len(alike) and depth < _MOST_DEPTH:
        alike = alike[np.minimum(lengths[alike - 1], lengths[alike]) > depth]
        alike = alike[text[starts[alike - 1] + depth] == text[starts[alike] + depth]]
        nodes, depth = nodes - len(alike), depth + 1
    return nodes


DTYPE_BITS: Mapping[str, int] = {
    "F4": 4, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16,
    "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""The bits of a number of each type of tensors in safetensors files."""
LENGTH_BYTES = 8
_MOST_DIMS = 8
_METADATA = "__metadata__"
_LAYER = re.compile("([ED])([0-9]{2,5})")


class HeaderWrong(ValueError):
    """Bytes that are no safetensors header; the message is one short line. Fetch or copy the file again."""


class Place(NamedTuple):
    """The place of a tensor in a file: `start` and `stop` count bytes from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """The tensors of a file by name, in the order of the header, and the header's metadata."""

    tensors: dict[str, Place]
    metadata: dict[str, str]


def header_of(file: OpenedFile, room: Room) -> Header:
    """Returns the header of an open file. Raises HeaderInvalid, SizeOverflow, FileTruncated, FileMissing, or the error
    that `room` raises."""
    try:
        length = header_bytes(file.read(min(LENGTH_BYTES, file.nbytes)), file.nbytes)
        room(length, file.relative)
        text = file.read(length, LENGTH_BYTES)
        room(json_bytes(file.relative, text, HEADER_MARKS), file.relative)
        return read_header(text, file.nbytes)
    except HeaderWrong as error:
        raise HeaderInvalid(f"{file.relative} is not a safetensors file ({error}): copy the pack again") from None


def header_bytes(prefix: bytes, file_bytes: int, most_bytes: int = HEADER_BYTES) -> int:
    """Returns the bytes of the JSON that follows the first 8 bytes of a file. Raises HeaderWrong where the file has
    fewer, or for more than `most_bytes`."""
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if len(prefix) < LENGTH_BYTES or length > file_bytes - LENGTH_BYTES:
        raise HeaderWrong(f"its header should have {length} bytes, the file has {file_bytes}")
    if length > most_bytes:
        raise HeaderWrong(f"its header has {length} bytes, none is larger than {most_bytes}")
    return length


def read_header(text: bytes, file_bytes: int, most_marks: int = HEADER_MARKS) -> Header:
    """Returns the header whose JSON is `text`, of a file of `file_bytes` bytes. Its tensors have to fill the rest of
    the file, one behind the other. Raises HeaderWrong, also for more values and names than `most_marks`."""
    if (count := marks(text)) > most_marks:
        raise HeaderWrong(f"its header has {count} values and names, none has more than {most_marks}")
    try:
        document = parsed(text)
    except ValueError as error:
        raise HeaderWrong(f"its header is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise HeaderWrong(f"its header should be a JSON object, found {brief(document)}")
    metadata = document.pop(_METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderWrong("its metadata should be text by name")
    first = LENGTH_BYTES + len(text)
    tensors = {name: _place(name, entry, first) for name, entry in document.items()}
    end = first
    for name, place in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if place.start != end:
            raise HeaderWrong(f"{brief(name)} begins at byte {place.start - first}, expected {end - first}")
        end = place.stop
    if end != file_bytes:
        raise HeaderWrong(f"its tensors end at byte {end}, the file at {file_bytes}")
    return Header(tensors, metadata)


def _place(name: str, entry: Any, first: int) -> Place:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise HeaderWrong(f"{brief(name)} should have a dtype, a shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise HeaderWrong(f"{brief(name)} has a dtype that is none")
    if not name.isprintable():
        raise HeaderWrong(f"{brief(name)} is no name of a tensor")
    if not _whole(shape) or len(shape) > _MOST_DIMS or not _whole(offsets) or len(offsets) != 2:
        raise HeaderWrong(f"{brief(name)} has a shape or data_offsets that are none")
    start, stop = offsets
    if 8 * (stop - start) != DTYPE_BITS[dtype] * math.prod(shape):
        raise HeaderWrong(f"{brief(name)} has {stop - start} bytes, its shape needs others")
    return Place(dtype, tuple(shape), first + start, first + stop)


def _whole(values: Any) -> bool:
    """Returns whether `values` is a list of whole numbers that a file's bytes may be counted with."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 48 for value in values)


_TYPES: Mapping[str, Any] = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "U16": np.uint16, "F16": np.float16,
    "I32": np.int32, "U32": np.uint32, "F32": np.float32, "F64": np.float64, "I64": np.int64, "U64": np.uint64,
}  # fmt: skip
"""numpy's types by the names that safetensors has for them, in the order of the library that other programs write
with."""


class FileKind(NamedTuple):
    """A safetensors file of a pack beside the weights: its name, its form, the latest version of it, and the way to
    make it anew."""

    name: str
    form: str
    version: int
    again: str

    def body(self, tensors: Mapping[str, npt.NDArray[Any]], **metadata: object) -> bytes:
        """Returns the content of a file with these tensors; equal ones give equal bytes."""
        return to_bytes(tensors, {"format": f"model.pack {self.form}", "version": self.version, **metadata})

    def wrong(self, fault: str) -> HeaderInvalid:
        """Returns the error for a fault of the file."""
        return HeaderInvalid(f"{self.name}: {' '.join(fault.split())}: {self.again} again")

    def check(self, what: str, found: Mapping[Any, object], expected: Mapping[Any, object]) -> None:
        """Raises HeaderInvalid for the first layer or stack whose numbers, which `what` names, are not the model's."""
        for at in [*expected, *found]:
            if found.get(at) != expected.get(at):
                raise self.wrong(f"{at} has {what} {found.get(at)}, in the model {expected.get(at)}")


class TensorFile:
    """The content of such a file; its tensors are views of the file's bytes. All methods raise HeaderInvalid where the
    file lacks a field or tensor, or has it in another form."""

    def __init__(self, kind: FileKind, body: bytes) -> None:
        """Reads the header. Raises HeaderInvalid, or FormatTooNew for a later version than the kind's."""
        self._kind, self._body = kind, body
        try:
            length = header_bytes(body[:LENGTH_BYTES], len(body))
            self._tensors, self._metadata = read_header(body[LENGTH_BYTES : LENGTH_BYTES + length], len(body))
        except HeaderWrong as error:
            raise self.wrong(f"is not a safetensors file ({error})") from None
        if (version := self.number("version", 1 << 16)) > kind.version:
            raise FormatTooNew(f"{kind.name} has version {version}, this program reads {kind.version}")

    def has(self, field: str) -> bool:
        """Returns whether the file has metadata of this name."""
        return field in self._metadata

    def text(self, field: str) -> str:
        """Returns the metadata of this name; empty where there is none."""
        return self._metadata.get(field, "")

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def only(self, names: Iterable[str]) -> None:
        """Checks that the file has no other tensors."""
        if others := sorted(set(self._tensors).difference(names)):
            raise self.wrong(f"has the tensor {others[0][:60]!r}, which does not belong there")

    def number(self, field: str, high: int) -> int:
        """Returns a number from 1 to `high` in the metadata."""
        text = self._metadata.get(field, "")
        if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= high):
            raise self.wrong(f"{field} should be a number from 1 to {high}, found {text[:40]!r}")
        return int(text)

    def numbers(self, field: str, below: int) -> list[int]:
        """Returns rising numbers from 0 to `below` - 1 in the metadata, written 1,3,5."""
        text = self._metadata.get(field, "")
        parts = text.split(",")
        if len(parts) <= below and all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
            found = [int(part) for part in parts]
            if found[-1] < below and all(one < other for one, other in itertools.pairwise(found)):
                return found
        raise self.wrong(f"{field} should be rising numbers below {below}, found {text[:40]!r}")

    def tensor(self, name: str, dtype: Any, ndim: int = 1) -> npt.NDArray[Any]:
        """Returns the tensor of this name, dtype and number of dimensions; not to be written."""
        place = self._tensors.get(name)
        if place is None:
            raise self.wrong(f"lacks the tensor {name}")
        if _TYPES.get(place.dtype) != dtype or len(place.shape) != ndim:
            found = f"{place.dtype} with {len(place.shape)} dimensions"
            raise self.wrong(f"{name} should be {np.dtype(dtype)} with {ndim}, found {found}")
        return self._view(place)

    def shaped(self, name: str, dtype: Any, *shape: int) -> npt.NDArray[Any]:
        """Returns the tensor of this name, dtype and shape, in which -1 stands for any size; all its numbers are
        finite."""
        array = self.tensor(name, dtype, len(shape))
        expected = tuple(found if asked < 0 else asked for asked, found in zip(shape, array.shape, strict=True))
        if array.shape != expected or not array.size:
            raise self.wrong(f"{name} should be of shape {expected}, found {array.shape}")
        if not np.isfinite(array).all():
            raise self.wrong(f"{name} should be finite")
        return array

    def layers(self, ending: str = "") -> list[LayerKey]:
        """Returns the layers, in the order of execution, that have a tensor D03 with this ending."""
        stacks = {name[0].upper(): name for name in STACKS}
        found = [_LAYER.fullmatch(name.removesuffix(ending)) for name in self._tensors if name.endswith(ending)]
        keys = {LayerKey(stacks[match[1]], int(match[2])) for match in found if match is not None}
        return sorted(keys, key=lambda at: (STACKS.index(at.stack), at.layer))

    def _view(self, place: Place) -> npt.NDArray[Any]:
        dtype = np.dtype(_TYPES[place.dtype])
        count = (place.stop - place.start) // dtype.itemsize
        array = np.frombuffer(self._body, dtype, count, place.start) if count else np.empty(0, dtype)
        return np.require(array.reshape(place.shape), requirements="A")  # kernels get addresses of numbers

    def wrong(self, fault: str) -> HeaderInvalid:
        """Returns the error for a fault of the file."""
        return self._kind.wrong(fault)


def to_bytes(tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, object]) -> bytes:
    """Returns a safetensors file's content, in which equal tensors give equal bytes: metadata in the order of their
    names, tensors from the largest numbers to the smallest, as the library has them, then by name."""
    header: dict[str, object] = {_METADATA: {name: str(value) for name, value in sorted(metadata.items())}}
    bodies = list[bytes]()
    end, order = 0, [*_TYPES]
    for name in sorted(tensors, key=lambda name: (-order.index(_called(tensors[name])), name)):
        array = tensors[name]
        start, end = end, end + array.nbytes
        header[name] = {"dtype": _called(array), "shape": list(array.shape), "data_offsets": [start, end]}
        bodies.append(array.tobytes())
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(LENGTH_BYTES, "little"), text, *bodies])


def _called(array: npt.NDArray[Any]) -> str:
    """Returns the name that safetensors has for an array's type."""
    return next(name for name, kind in _TYPES.items() if kind == array.dtype)
