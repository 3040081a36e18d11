"""An advisory lock on a directory: one process writes there at a time."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a Unix: no lock
    fcntl = None  # type: ignore[assignment]


class DirectoryLock:
    """Held until `release` is called or the object is gone, at the latest when the process ends, killed or not.

    It follows the directory when that is renamed. Where the system or the file system knows no locks, all are granted.
    """

    def __init__(self, path: Path) -> None:
        """Raises BlockingIOError if another holds it, OSError if there is no such directory."""
        descriptor = os.open(path, os.O_RDONLY)
        self.release = weakref.finalize(self, os.close, descriptor)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise
        except OSError:
            return
        if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
            self.release()
            raise BlockingIOError(f"{path} was renamed by another process just now")
