"""Files: written whole or not at all, by one process at a time, and open for explicit reads."""

from __future__ import annotations

import os
import re
import stat
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from moert.pack.errors import FileMissing, FileTruncated

if TYPE_CHECKING:
    import hashlib

READING: int = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
"""How files are opened: for bytes as they are, and a pipe in place of a file is not waited for."""
_ON_WINDOWS = os.name == "nt"
_LEFT = re.compile(r"\.[0-9a-f]{8}\.tmp$")


def placed(path: str | os.PathLike[str]) -> Path:
    """Returns the place that a path leads to: links to folders on the way are followed as the system follows them, so
    that `link/..` is the folder above the link's target. The last part of the path stays, also where it is a link."""
    path = Path(path)
    if path.name in ("", ".."):
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent), path.name)


def beside(path: Path, ending: str) -> Path:
    """Returns PATH.ending, in the folder that holds the path's place."""
    place = placed(path)
    return place.with_name(f"{place.name}.{ending}")


@contextmanager
def atomic_write(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yields the name of a new file beside `path` to write to: when the block ends, the file is made durable and takes
    the place of `path`. If the block or the system fails, `path` stays as it was and no file stays beside it. A file
    that is not `durable` is quicker, and may be damaged after a power cut. Raises OSError."""
    with _beside(path) as fresh:
        yield fresh
        if durable:
            fsync(fresh)
        os.replace(fresh, path)


def write_atomically(path: Path, body: bytes | bytearray) -> None:
    """Writes bytes from memory as `atomic_write` does. Raises OSError."""
    write_in_order([(path, body)])


def write_in_order(files: Sequence[tuple[Path, bytes | bytearray]]) -> None:
    """Writes every file beside its place first, so that a full disk changes nothing; then puts the files in their
    places, in the given order. Raises OSError."""
    with ExitStack() as stack:
        staged = [(stack.enter_context(_beside(path)), path, body) for path, body in files]
        for fresh, _, body in staged:
            with open(fresh, "xb") as stream:
                stream.write(body)
            fsync(fresh)
        for fresh, path, _ in staged:
            os.replace(fresh, path)


def sha256(body: bytes | array[int] = b"") -> hashlib._Hash:
    """Returns the sha256 of bytes, to which more may be added."""
    import hashlib  # takes memory, and a run needs none of it

    return hashlib.sha256(body)


def fsync(path: Path) -> None:
    """Makes a file durable, or the names in a folder; not these on Windows, which opens no folders. Raises OSError."""
    if _ON_WINDOWS and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if _ON_WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_left(name: str) -> bool:
    """Returns whether a file of this name was left by a writer that was killed."""
    return _LEFT.search(name) is not None


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yields a name that no other writer takes; removes the file of this name at the end, if there is one."""
    fresh = path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")  # see is_left
    try:
        yield fresh
    finally:
        fresh.unlink(missing_ok=True)


class OpenedFile:
    """A regular file, open for reading, which may become shorter or fail at any time. Close it, or use it in a with
    block. Only one thread at a time may read."""

    def __init__(self, root: Path, relative: str, path: Path) -> None:
        """Opens the file `relative` of the pack at `root`, whose real path is `path`. Raises FileMissing."""
        self._root, self.relative = root, relative
        try:
            descriptor = os.open(path, READING)
        except OSError as error:
            raise unreadable(root, relative, error) from None
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise irregular(root, relative)
        self.nbytes, self._file = found.st_size, FileIO(descriptor)

    def expect(self, nbytes: int) -> None:
        """Checks that the file has `nbytes` bytes. Raises FileTruncated."""
        if self.nbytes != nbytes:
            raise wrong_length(self.relative, self.nbytes, nbytes)

    def read(self, nbytes: int, offset: int = 0) -> bytes:
        """Returns `nbytes` bytes from `offset` on. Raises FileTruncated or FileMissing."""
        try:
            self._file.seek(offset)
            body = self._file.read(nbytes) or b""
        except OSError as error:
            raise unreadable(self._root, self.relative, error) from None
        if len(body) == nbytes:
            return body
        whole = bytearray(nbytes)  # one call gives at most 2 GiB
        whole[: len(body)] = body
        self.read_into(memoryview(whole)[len(body) :], offset + len(body))
        return bytes(whole)

    def read_into(self, buffer: memoryview, offset: int = 0) -> None:
        """Fills `buffer` with the file's bytes from `offset` on. Raises FileTruncated or FileMissing."""
        found = 0
        try:
            self._file.seek(offset)
            while found < len(buffer) and (count := self._file.readinto(buffer[found:])):
                found += count
        except OSError as error:
            raise unreadable(self._root, self.relative, error) from None
        if found != len(buffer):
            raise FileTruncated(f"{self.relative}: read {found} of {len(buffer)} bytes: copy the pack again")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> OpenedFile:
        return self

    def __exit__(self, *ending: object) -> None:
        self.close()


def irregular(root: Path, relative: str) -> FileMissing:
    """Returns the error for a folder, a pipe or a device in place of a file."""
    return FileMissing(f"{relative} in the pack at {root} is not a regular file: copy the pack again")


def wrong_length(relative: str, found: int, expected: int) -> FileTruncated:
    return FileTruncated(f"{relative} has {found} bytes, the manifest says {expected}: copy the pack again")


def unreadable(root: Path, relative: str, error: OSError) -> FileMissing:
    """Returns the error for a file of a pack that the system refuses to read."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return FileMissing(f"{relative} is missing from the pack at {root}: copy the pack again")
    return FileMissing(f"{relative} in the pack at {root} can't be read: {error.strerror}")
