"""The archive of a prefix cache: states of decoders in files, each found again by the tokens that it has read.

A file has one line of text (form, version, the digest of all that the state depends on beside its tokens, their number,
the bytes of the state), then the tokens, the arrays of the state, and the sha256 of all that. It is written under
another name and renamed; nothing of it is used before its sha256 is right.
"""

from __future__ import annotations

import os
import re
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moert.errors import BudgetTooSmall
from moert.models.kv import State
from moert.pack.files import atomic_write, sha256

_VERSION = 1
_HEAD = re.compile(rb"moert-prefix ([0-9]{1,9}) ([0-9a-f]{64}) ([0-9]{1,9}) ([0-9]{1,18})\n")
_MOST_HEAD = 128
_ENDING = ".prefix"
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.prefix(\.[0-9a-f]{8}\.tmp)?")
_WORTH = 16
"""Tokens of a state that are loaded, at most, for each token that need not be read."""


class _Unusable(Exception):
    """A file that has no state for this engine; the message says why. Do nothing: the state is computed anew."""


@dataclass(eq=False)
class _File:
    """A file of the archive: the tokens of its state, the place where the state's bytes begin, and their number."""

    path: Path
    ids: array[int]
    start: int
    nbytes: int


class Folder(NamedTuple):
    """A folder for states, and the most bytes that the files of all packs in it may have."""

    path: Path
    most_bytes: int


class Archive:
    """States of decoders in a folder. The file that was used longest ago leaves first, whatever pack it is of.

    `digest`: of everything that states depend on beside their tokens, 64 hexadecimal digits; `fresh` returns a new
    state for these tokens; `room` makes room in memory for bytes; `note` is called with a line about a file that can't
    be used, or a folder that can't be written.
    """

    def __init__(
        self, folder: Folder, digest: str, fresh: Callable[[Sequence[int]], State],
        room: Callable[[int], AbstractContextManager[object]], note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._folder, self._digest, self._fresh, self._room, self._note = folder, digest, fresh, room, note
        self._fixed = fresh([0]).is_fixed
        self._files = list[_File]()
        self._trouble = ""
        for path in sorted(folder.path.glob(f"{digest[:16]}-*{_ENDING}")):
            with self._noted(path):
                self._files.append(self._described(path))

    def take(self, ids: Sequence[int], beyond: int, most_bytes: int | None) -> tuple[State, list[int]] | None:
        """Returns the state with the longest beginning of a prompt in common, and its tokens; None where no state of up
        to `most_bytes` goes further than `beyond` tokens, far enough to be worth its loading."""
        asked = array("i", ids)
        while (found := self._longest(asked, beyond, most_bytes)) is not None:
            with self._noted(found.path):
                _touch(found.path)
                try:
                    with self._room(found.nbytes):
                        return self._loaded(found), found.ids.tolist()
                except BudgetTooSmall:
                    return None
            self._files = [each for each in self._files if each is not found]
        return None

    def put(self, ids: Sequence[int], state: State) -> None:
        """Keeps a state that has read these tokens, in place of those that it covers."""
        known = array("i", ids)
        covering = next((each for each in self._files if self._covers(each.ids, known)), None)
        try:
            if covering is not None and covering.path.exists():
                _touch(covering.path)
                return
            self._write(known, state)
        except OSError as error:
            why = f"{self._folder.path} can't be written ({error.strerror or error}): "
            self._tell(why + "conversations are not kept there")

    def _longest(self, asked: array[int], beyond: int, most_bytes: int | None) -> _File | None:
        best, key = None, (beyond, 0)
        for each in self._files:
            reach = _alike(each.ids, asked[:-1])
            if self._fixed and reach < len(each.ids):
                continue
            worth = (reach - beyond) * _WORTH >= len(each.ids) and (most_bytes is None or each.nbytes <= most_bytes)
            if worth and (reach, -each.nbytes) > key and reach > beyond:
                best, key = each, (reach, -each.nbytes)
        return best

    def _covers(self, longer: array[int], shorter: array[int]) -> bool:
        """Returns whether all that a state has can be had of another one."""
        return longer[: len(shorter)] == shorter and (not self._fixed or len(longer) == len(shorter))

    def _described(self, path: Path) -> _File:
        """Returns the file at a path, all but whose state was read. Raises OSError, or _Unusable."""
        with path.open("rb") as stream:
            head = stream.readline(_MOST_HEAD)
            match = _HEAD.fullmatch(head)
            if match is None:
                raise _Unusable("it is no file of kept tokens")
            if int(match[1]) != _VERSION:
                raise _Unusable(f"it has format {int(match[1])}, this program reads {_VERSION}")
            if match[2].decode() != self._digest:
                raise _Unusable("it is of another pack, or of other settings")
            tokens, nbytes, ids = int(match[3]), int(match[4]), array("i")
            start = len(head) + ids.itemsize * tokens
            if not tokens or os.fstat(stream.fileno()).st_size != start + nbytes + sha256().digest_size:
                raise _Unusable("it is cut short or damaged")
            ids.frombytes(stream.read(ids.itemsize * tokens))
            if path != self._path(ids):
                raise _Unusable("it is damaged")
        return _File(path, ids, start, nbytes)

    def _loaded(self, file: _File) -> State:
        """Returns the state in a file. Raises OSError, or _Unusable."""
        state = self._fresh(file.ids)
        state.expect(file.ids)
        seal, views = sha256(), _views(state)
        with file.path.open("rb") as stream:
            seal.update(stream.read(file.start))
            for view in views:
                stream.readinto(view)
                seal.update(view)
            if sum(map(len, views)) != file.nbytes or stream.read() != seal.digest():
                raise _Unusable("it is damaged")
        return state

    def _write(self, ids: array[int], state: State) -> None:
        """Writes a state's file, once there is room for it. Raises OSError."""
        views = _views(state)
        nbytes = sum(map(len, views))
        head = f"moert-prefix {_VERSION} {self._digest} {len(ids)} {nbytes}\n".encode()
        seal, start = sha256(), len(head) + ids.itemsize * len(ids)
        whole = start + nbytes + seal.digest_size
        if whole > self._folder.most_bytes:
            most = f"{self._folder.most_bytes} bytes of {self._folder.path}"
            self._tell(f"a conversation takes more than the {most}: it is not kept there")
            return
        covered = [each for each in self._files if self._covers(ids, each.ids)]
        self._leave(whole)
        path = self._path(ids)
        with atomic_write(path, durable=False) as fresh, open(fresh, "xb", opener=_private) as stream:
            for part in [memoryview(head), memoryview(ids).cast("B"), *views]:
                seal.update(part)
                stream.write(part)
            stream.write(seal.digest())
        _touch(path)
        self._trouble = ""
        for each in covered:
            self._files.remove(each)
            each.path.unlink(missing_ok=True)
        self._files.append(_File(path, ids, start, nbytes))

    def _path(self, ids: array[int]) -> Path:
        return self._folder.path / f"{self._digest[:16]}-{sha256(ids).hexdigest()[:32]}{_ENDING}"

    def _leave(self, nbytes: int) -> None:
        """Makes room for a file: those that were used longest ago leave, also unfinished ones that killed programs have
        left. Raises OSError."""
        there = list[tuple[int, int, Path]]()
        for entry in os.scandir(self._folder.path):
            with suppress(FileNotFoundError):
                if _NAME.fullmatch(entry.name) is not None:
                    found = entry.stat(follow_symlinks=False)
                    there.append((found.st_mtime_ns, found.st_size, Path(entry.path)))
        held = sum(size for _, size, _ in there)
        for _, size, path in sorted(there):
            if held + nbytes <= self._folder.most_bytes:
                return
            path.unlink(missing_ok=True)
            self._files = [each for each in self._files if each.path != path]
            held -= size

    @contextmanager
    def _noted(self, path: Path) -> Iterator[None]:
        """Notes that a file can't be used, unless it has gone: other programs may use the folder, too."""
        try:
            yield
        except FileNotFoundError:
            pass
        except (OSError, _Unusable) as error:
            self._note(f"{path} is left aside: {getattr(error, 'strerror', None) or error}")

    def _tell(self, trouble: str) -> None:
        """Notes a trouble once, until the next file was written."""
        if trouble != self._trouble:
            self._trouble = trouble
            self._note(trouble)


def _alike(one: array[int], other: array[int]) -> int:
    """Returns the length of the common beginning of both: slices of arrays are quickly compared."""
    ends = range(1, min(len(one), len(other)) + 1)
    return bisect_left(ends, True, key=lambda end: one[:end] != other[:end])


def _views(state: State) -> list[memoryview]:
    """Returns the bytes of a state, in place."""
    return [part.data.cast("B") for part in state.parts if part.size]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _touch(path: Path) -> None:
    """Makes a file the one that was used last. Raises OSError."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))
