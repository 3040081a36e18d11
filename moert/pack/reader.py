"""The reader of packs: one read for each expert."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moert.pack.codec import U8, Width
from moert.pack.errors import (
    FileMissing,
    FileTruncated,
    HashMismatch,
    HeaderInvalid,
    ManifestMissing,
    PackError,
    UnsafePath,
)
from moert.pack.files import OpenedFile, irregular, is_left, placed, unreadable, wrong_length
from moert.pack.layout import NEURONS, U32, ExpertLayout, NeuronLayout
from moert.pack.manifest import FORMAT_NAME, NGRAMS, ExpertEntry, Manifest, parse_manifest
from moert.pack.model_spec import ExpertKey
from moert.pack.tensors import (
    FileKind,
    Place,
    Room,
    TensorFile,
    bound_of,
    check_size,
    header_of,
    json_bytes,
    take_room,
    unbounded,
)

MANIFEST = "manifest.json"
_CHUNK = 1 << 20
_HASHED_AT_ONCE = 4


class Piece(NamedTuple):
    """A file of a pack, or the bytes of one expert in a file."""

    path: str
    offset: int
    nbytes: int
    sha256: str


class Pack:
    """An open pack. Cheap to open: the manifest is parsed and every file's size checked, contents come later."""

    def __init__(self, root: Path, manifest: Manifest, room: Room = unbounded) -> None:
        self.root = root
        self.manifest = manifest
        self.room = room
        self._entries = {entry.key: entry for entry in manifest.experts}
        self._folders: set[str] = set()  # whose real places are inside the pack

    @classmethod
    def open(cls, path: str | os.PathLike[str], room: Room = unbounded) -> Pack:
        """Returns the pack at `path`. `room` is called before a file of the pack is read as a whole, now and later.
        Raises a PackError that names the fault of the directory, or the error that `room` raises."""
        root = Path(path)
        if not os.path.isdir(root):  # Path.is_dir raises for names that are too long
            shown = str(root) if len(str(root)) <= 200 and str(root).isprintable() else ascii(str(root)[:60]) + "…"
            raise ManifestMissing(f"{shown} is not a directory: a pack is a directory with a {MANIFEST}")
        pack = cls(root, parse_manifest(_manifest_text(root, room)), room)
        pack._check_sizes()
        return pack

    def entry(self, key: ExpertKey) -> ExpertEntry:
        return self._entries[key]

    def layout(self, key: ExpertKey) -> ExpertLayout:
        return self.manifest.layout(self._entries[key])

    @property
    def has_neurons(self) -> bool:
        """Returns whether experts lie in blocks of neurons."""
        return self.manifest.quantization.neurons is not None

    def neurons(self, key: ExpertKey) -> NeuronLayout:
        """Returns the places of an expert's neurons, in a pack that `has_neurons`."""
        return self.manifest.neurons(self._entries[key])

    def file(self, relative: str) -> Path:
        """Returns the real path of a file of the pack. Raises UnsafePath if a link leads out of it."""
        folder, path = os.path.dirname(relative), self.root / relative
        if folder in self._folders and not os.path.islink(path):
            return path
        _check_inside(self.root, path)
        if _is_inside(self.root, path.parent):  # else a link in there leads back into the pack
            self._folders.add(folder)
        return path

    def read_file(self, relative: str) -> bytes:
        """Returns the bytes of a file that is not an expert, checked against size and fast checksum.

        Raises FileMissing (also if the pack has no such file), FileTruncated, HashMismatch, UnsafePath, SizeOverflow,
        or the error that the pack's `room` raises.
        """
        if relative not in self.manifest.files:
            raise FileMissing(f"the pack at {self.root} has no {relative}")
        with self.opened(relative) as file:
            check_size(relative, file.nbytes)
            self.room(file.nbytes, relative)
            body = file.read(file.nbytes)
        if zlib.crc32(body) != self.manifest.files[relative].crc32:
            raise HashMismatch(f"{relative}: checksum differs from the manifest: the file is damaged, copy it again")
        take_room(relative, body, self.room)
        return body

    def opened(self, relative: str) -> OpenedFile:
        """Returns an open file that the manifest names and that is not an expert, of the size that the manifest says.
        Raises FileMissing, FileTruncated, UnsafePath."""
        file = OpenedFile(self.root, relative, self.file(relative))
        try:
            file.expect(self.manifest.files[relative].nbytes)
        except FileTruncated:
            file.close()
            raise
        return file

    def check_expert(self, key: ExpertKey, buffer: U8, crc32: Callable[[memoryview], int] = zlib.crc32) -> None:
        """Checks all bytes of an expert, uint8 [file_bytes]; `crc32`: zlib's, or a faster one.

        Raises HeaderInvalid or HashMismatch.
        """
        entry, layout = self._entries[key], self.layout(key)
        if buffer[: layout.data_offset].tobytes() != layout.header:
            raise HeaderInvalid(
                f"{entry.path}: its header is not that of expert {key} with widths {dict(entry.bits)}: the file is "
                "damaged or belongs to another expert"
            )
        if crc32(buffer.data) != entry.crc32:
            raise HashMismatch(f"{entry.path}: checksum differs from the manifest: the file is damaged, copy it again")

    def verify_hashes(self, pieces: Sequence[Piece] | None = None) -> Iterator[str]:
        """Reads pieces, several at a time, by default all; yields the path of each once its sha256 is found right.
        Raises HashMismatch or FileMissing at the first in order that is not, FileTruncated or UnsafePath."""
        from concurrent.futures import ThreadPoolExecutor  # opening a pack needs none

        ended = Event()

        sizes = self.sizes()

        def check(piece: Piece) -> str:
            self._check_size(piece.path, sizes[piece.path])
            try:
                found = _sha256(self.file(piece.path), piece, ended)
            except OSError as error:
                raise unreadable(self.root, piece.path, error) from None
            if found != piece.sha256:
                raise HashMismatch(
                    f"{piece.path}: sha256 differs from the manifest: the file is damaged, copy it again"
                )
            return piece.path

        with ThreadPoolExecutor(_HASHED_AT_ONCE) as readers:
            try:
                yield from readers.map(check, list(self.pieces()) if pieces is None else pieces)
            finally:
                ended.set()
                readers.shutdown(cancel_futures=True)

    def pieces(self) -> Iterator[Piece]:
        """Yields all pieces of the pack but the manifest."""
        for relative, file in self.manifest.files.items():
            yield Piece(relative, 0, file.nbytes, file.sha256)
        for entry in self.manifest.experts:
            yield Piece(entry.path, entry.offset, entry.file_bytes, entry.sha256)

    def sizes(self) -> Mapping[str, int]:
        """Returns the bytes of every file but the manifest, by its path in the pack."""
        return {piece.path: piece.offset + piece.nbytes for piece in self.pieces()}  # the last of a file ends it

    def _check_sizes(self) -> None:
        """Checks the sizes of all files: a file that its folder's listing does not show as expected is checked by
        itself."""
        folders: dict[str, dict[str, int]] = {}
        for relative, nbytes in self.sizes().items():
            folder, _, name = relative.rpartition("/")
            folders.setdefault(folder, {})[name] = nbytes
        for folder, expected in folders.items():
            found = self._regular_files(folder, expected)
            for name, nbytes in expected.items():
                if found.get(name) != nbytes:
                    self._check_size(f"{folder}/{name}" if folder else name, nbytes)

    def _regular_files(self, folder: str, names: Collection[str]) -> dict[str, int]:
        """Returns the sizes of the files of these names in a folder of the pack that are no links; none where the
        folder lies outside the pack."""
        place = self.root / folder
        if not _is_inside(self.root, place):
            return {}
        try:
            with os.scandir(place) as found:
                return {
                    one.name: one.stat(follow_symlinks=False).st_size
                    for one in found
                    if one.name in names and one.is_file(follow_symlinks=False)
                }
        except OSError:
            return {}

    def _check_size(self, relative: str, nbytes: int) -> None:
        try:
            found = os.stat(self.file(relative))
        except OSError as error:
            raise unreadable(self.root, relative, error) from None
        if not stat.S_ISREG(found.st_mode):
            raise irregular(self.root, relative)
        if found.st_size != nbytes:
            raise wrong_length(relative, found.st_size, nbytes)


def is_pack(root: Path) -> bool:
    """Returns whether the directory's manifest says that it is a pack, whole or damaged, of this version or another."""
    try:
        document = json.loads(_manifest_text(root))
    except (PackError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == FORMAT_NAME


def pack_around(path: Path) -> Path | None:
    """Returns the pack that a place lies in; None if it lies in none."""
    return next((folder for folder in placed(path).parents if (folder / MANIFEST).is_file() and is_pack(folder)), None)


def strangers(root: Path) -> list[str]:
    """Returns the files in the folder of a pack that its manifest does not name, but for those that a killed writer has
    left: all files but the manifest where it can't be read, none where there is no pack."""
    if not is_pack(root):
        return []
    try:
        manifest = parse_manifest(_manifest_text(root))
        named = {MANIFEST, *manifest.files, *(entry.path for entry in manifest.experts)}
    except PackError:
        named = {MANIFEST}
    found = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(name for name in found if name not in named and not is_left(name))


def _manifest_text(root: Path, room: Room = unbounded) -> bytes:
    path = root / MANIFEST
    _check_inside(root, path)
    if not path.exists():
        if _is_checkpoint(root):
            raise ManifestMissing(f"{root} is a checkpoint, not a pack: convert it with moeconv quantize {root}")
        raise ManifestMissing(f"{root} has no {MANIFEST}: not a pack, or its conversion did not finish")
    try:
        with OpenedFile(root, MANIFEST, path) as file:
            check_size(MANIFEST, file.nbytes)
            room(file.nbytes, MANIFEST)
            text = file.read(file.nbytes)
    except (FileMissing, FileTruncated) as error:
        raise ManifestMissing(str(error)) from None
    most_marks = bound_of(MANIFEST).most_marks
    assert most_marks is not None
    room(json_bytes(MANIFEST, text, most_marks), MANIFEST)
    return text


def _is_checkpoint(root: Path) -> bool:
    """Returns whether a folder has the files that transformers saves a model to."""
    weights = ("model*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
    return (root / "config.json").is_file() and any(any(root.glob(pattern)) for pattern in weights)


def _check_inside(root: Path, path: Path) -> None:
    """Raises UnsafePath for a path that leads out of the pack."""
    if not _is_inside(root, path):
        raise UnsafePath(f"{path} leads out of the pack, by a link or by its name: a pack is complete in itself")


def _is_inside(root: Path, path: Path) -> bool:
    """Returns whether a path below `root` really leads to a place below it, whatever links are on the way."""
    try:
        return path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # links in a circle
        return False


def _sha256(path: Path, piece: Piece, ended: Event) -> str:
    """Returns the sha256, in hexadecimal, of the bytes of a piece that were read until `ended` was set."""
    import hashlib  # takes memory, and opening a pack needs none of it

    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        handle.seek(piece.offset)
        left = piece.nbytes
        while not ended.is_set() and (chunk := handle.read(min(_CHUNK, left))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


def bits_histogram(experts: tuple[ExpertEntry, ...]) -> Mapping[Width, int]:
    """Returns for each width the number of projections that have it."""
    counts: dict[Width, int] = {}
    for entry in experts:
        for width in entry.bits.values():
            counts[width] = counts.get(width, 0) + 1
    return dict(sorted(counts.items()))


FLOATS: Mapping[str, tuple[Any, int, int]] = {
    "F16": (np.uint16, 0x7FFF, 0x7C00), "BF16": (np.uint16, 0x7FFF, 0x7F80), "F32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
}  # fmt: skip
"""For each form of floats: integers of their size, a mask of all bits but the sign, and the smallest masked number that
is infinity or no number."""
CHECKED_BYTES = 256 << 10  # bytes that are checked at once, so that they stay near the processor


def all_finite(dtype: str, numbers: U8) -> bool:
    """Returns whether all floats of a form (F16, BF16 or F32), whose bytes are given in order, are finite."""
    kind, unsigned, least = FLOATS[dtype]
    bits = numbers.view(kind)
    step = CHECKED_BYTES // bits.itemsize
    return all(int((bits[start : start + step] & kind(unsigned)).max()) < least for start in range(0, len(bits), step))


CHECKSUMS = FileKind(NEURONS, "neurons", 1, "convert the model")


def checksums_from_bytes(body: bytes, manifest: Manifest) -> dict[ExpertKey, U32]:
    """Returns for each expert its checksums, uint32 [n_checksums]: see moert.pack.layout.checksums. Raises
    HeaderInvalid, FormatTooNew."""
    file = TensorFile(CHECKSUMS, body)
    file.only(str(entry.key) for entry in manifest.experts)
    found: dict[ExpertKey, U32] = {}
    for entry in manifest.experts:
        expected = manifest.neurons(entry).n_checksums
        sums: U32 = file.tensor(str(entry.key), np.uint32)
        if len(sums) != expected:
            raise file.wrong(f"{entry.key} should have {expected} checksums, found {len(sums)}")
        found[entry.key] = sums
    return found


_ROW_TYPES: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class StoredRows:
    """The rows of a table in an open file: in place of an array [rows, dim]."""

    def __init__(self, file: OpenedFile, place: Place) -> None:
        self._file, self._start, self._dim = file, place.start, place.shape[1]
        self.dtype, self._type = place.dtype, np.dtype(_ROW_TYPES[place.dtype])

    def __getitem__(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Returns the rows of these numbers [numbers, dim], of the type F32, F16 or, as uint16, BF16. Raises
        FileTruncated or FileMissing."""
        asked, places = np.unique(numbers, return_inverse=True)
        found = np.empty((len(asked), self._dim), self._type)
        for number, row in zip(asked.tolist(), found, strict=True):
            self._file.read_into(row.view(np.uint8).data, self._start + number * row.nbytes)
        return found[places]

    def __del__(self) -> None:
        self._file.close()


def tables_of(pack: Pack) -> dict[str, StoredRows]:
    """Returns the pack's tables by their canonical names. Raises FileMissing, FileTruncated, HeaderInvalid, or the
    error that the pack's room raises."""
    expected = pack.manifest.model.tables
    if not expected:
        return {}
    with pack.opened(NGRAMS) as file:
        found = header_of(file, pack.room).tensors
    if found.keys() != expected.keys():
        raise HeaderInvalid(f"{NGRAMS} has other tables than the model: it is not that of this model")
    for name, place in found.items():
        if place.dtype not in _ROW_TYPES or place.shape != expected[name].shape:
            raise HeaderInvalid(
                f"{NGRAMS}: {name} has the shape {place.shape} and the type {place.dtype}, expected "
                f"{expected[name].shape} of {', '.join(_ROW_TYPES)}"
            )
    return {name: StoredRows(pack.opened(NGRAMS), place) for name, place in found.items()}
