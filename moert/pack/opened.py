"""A file of a pack that is open for explicit reads: what the system says of it is an error of the pack, with its
name."""

from __future__ import annotations

import os
import stat
from io import FileIO
from pathlib import Path

from moert.pack.errors import FileMissing, FileTruncated


class OpenedFile:
    """A regular file, which may become shorter or fail at any time. Close it, or use it in a with block. One thread at
    a time reads."""

    def __init__(self, root: Path, relative: str, path: Path) -> None:
        """`path`: where that file of the pack at `root` really is. Raises FileMissing."""
        self._root, self.relative = root, relative
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe is not waited for
        try:
            descriptor = os.open(path, flags)
        except OSError as error:
            raise unreadable(root, relative, error) from None
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise irregular(root, relative)
        self.nbytes, self._file = found.st_size, FileIO(descriptor)

    def expect(self, nbytes: int) -> None:
        """That it has so many bytes. Raises FileTruncated."""
        if self.nbytes != nbytes:
            raise wrong_length(self.relative, self.nbytes, nbytes)

    def read(self, nbytes: int, offset: int = 0) -> bytes:
        """So many bytes from there on. Raises FileTruncated or FileMissing."""
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
        """Fills `buffer` from there on. Raises FileTruncated or FileMissing."""
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
    """What to raise for a folder, a pipe, a device."""
    return FileMissing(f"{relative} in the pack at {root} is not a regular file: copy the pack again")


def wrong_length(relative: str, found: int, expected: int) -> FileTruncated:
    return FileTruncated(f"{relative} has {found} bytes, the manifest says {expected}: copy the pack again")


def unreadable(root: Path, relative: str, error: OSError) -> FileMissing:
    """What to raise where the system refuses to read a file of a pack."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return FileMissing(f"{relative} is missing from the pack at {root}: copy the pack again")
    return FileMissing(f"{relative} in the pack at {root} can't be read: {error.strerror}")
