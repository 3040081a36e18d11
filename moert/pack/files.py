"""Files that are written whole or not at all: a crash or a full disk leaves the old bytes or the new ones."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

_LEFT = re.compile(r"\.[0-9a-f]{8}\.tmp$")


def placed(path: str | os.PathLike[str]) -> Path:
    """Returns the place that a path leads to: links to folders on the way are followed as the system does it, so that
    `link/..` is where the link leads. The last part of the path stays, also where it is a link."""
    path = Path(path)
    if path.name in ("", ".."):
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent), path.name)


def beside(path: Path, ending: str) -> Path:
    """Returns PATH.ending, in the folder that holds the path's place."""
    place = placed(path)
    return place.with_name(f"{place.name}.{ending}")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Gives the name of a new file beside `path` to write to: when the block ends, it is made durable and takes the
    place of `path`. If the block or the system fails, `path` is as it was and nothing stays beside it. Raises OSError.
    """
    with _beside(path) as fresh:
        yield fresh
        fsync(fresh)
        os.replace(fresh, path)


def write_atomically(path: Path, body: bytes | bytearray) -> None:
    """`atomic_write` for bytes that are in memory. Raises OSError."""
    write_in_order([(path, body)])


def write_in_order(files: Sequence[tuple[Path, bytes | bytearray]]) -> None:
    """Writes every file beside its place first, so that a full disk changes nothing; then puts them in their places, in
    this order. Raises OSError."""
    with ExitStack() as stack:
        staged = [(stack.enter_context(_beside(path)), path, body) for path, body in files]
        for fresh, _, body in staged:
            with open(fresh, "xb") as stream:
                stream.write(body)
            fsync(fresh)
        for fresh, path, _ in staged:
            os.replace(fresh, path)


def fsync(path: Path) -> None:
    """Makes a file durable, or the names in a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_left(name: str) -> bool:
    """Returns whether a file of this name is one that a writer who was killed has left."""
    return _LEFT.search(name) is not None


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A name that no other writer takes; what is there at the end is removed."""
    fresh = path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")  # see is_left
    try:
        yield fresh
    finally:
        fresh.unlink(missing_ok=True)
