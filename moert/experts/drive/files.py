"""Expert files that stay open: opening one takes a fifth of the time of a small read."""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from dataclasses import dataclass

from moert.experts.drive.io import open_expert

_MOST = 1024
_SHARE = 3  # of the descriptors that the process may have


@dataclass(eq=False, slots=True)
class OpenFile:
    """What a descriptor reads from, and how many are reading. One that is `stale` is closed behind the last of them."""

    name: tuple[str, bool]
    fd: int
    seen: tuple[int, ...]
    epoch: int
    users: int = 0
    stale: bool = False


class OpenFiles:
    """The files of a folder that were opened last. Safe to use from several threads.

    Before the first read after `expect`, a file is looked at by its name: another in its place, or one whose rights
    have changed, is opened anew.
    """

    def __init__(self, root: str | os.PathLike[str], most: int | None = None) -> None:
        """`most` files; None: as many as the process may well have."""
        self._root, self._most = os.fspath(root), most or max(1, min(_MOST, _allowed() // _SHARE))
        self._files: dict[tuple[str, bool], OpenFile] = {}
        self._lock, self._epoch = threading.Lock(), 0

    def __len__(self) -> int:
        return len(self._files)

    def expect(self) -> None:
        """Something may have happened to the files since they were read last."""
        self._epoch += 1

    def take(self, path: str, direct: bool) -> OpenFile:
        """To be read from until it is given back; past the page cache if `direct` and the file system can. Raises
        OSError."""
        with self._lock:
            file = self._files.get((path, direct))
            if file is not None and file.epoch != self._epoch and not self._still(file):
                self._drop(file)
                file = None
            if file is None:
                file = self._open((path, direct))
            file.users += 1
            return file

    def give(self, file: OpenFile, failed: bool = False) -> None:
        """It is not in use any more. What has `failed` is opened anew next time."""
        with self._lock:
            file.users -= 1
            if file.stale and not file.users:
                os.close(file.fd)
            elif not file.stale and (failed or (len(self._files) > self._most and not file.users)):
                self._drop(file)

    def close(self) -> None:
        """What is in use is closed when it is given back."""
        with self._lock:
            for file in list(self._files.values()):
                self._drop(file)

    def __del__(self) -> None:
        self.close()

    # What follows is called holding the lock.

    def _still(self, file: OpenFile) -> bool:
        try:
            found = os.stat(os.path.join(self._root, file.name[0]))
        except OSError:
            return False
        file.epoch = self._epoch
        return _identity(found) == file.seen

    def _open(self, name: tuple[str, bool]) -> OpenFile:
        unused = [file for file in self._files.values() if not file.users] if len(self._files) >= self._most else []
        for file in unused[: len(self._files) - self._most + 1]:
            self._drop(file)
        path, direct = name
        fd = open_expert(os.path.join(self._root, path), direct)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
                number = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.ESPIPE
                raise OSError(number, os.strerror(number))
            os.set_blocking(fd, True)  # of a file that means: a read in the background may wait
        except BaseException:
            os.close(fd)
            raise
        file = self._files[name] = OpenFile(name, fd, _identity(found), self._epoch)
        return file

    def _drop(self, file: OpenFile) -> None:
        del self._files[file.name]
        file.stale = True
        if not file.users:
            os.close(file.fd)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _allowed() -> int:
    """Descriptors that the process may have."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
