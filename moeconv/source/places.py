"""Where the files of a checkpoint may lie: inside its folder, or where the hub's cache keeps what that links to."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

_READ = (".json", ".safetensors", ".model", ".txt", ".jinja", ".tiktoken", ".py")
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"
_KEPT = ("models--", "datasets--")  # how the folders of the hub's cache begin


def is_plain(name: str) -> bool:
    """Whether the name of a file leads nowhere but into the folder that it is said of."""
    pure = PurePosixPath(name)
    sound = name.isprintable() and not set("\\:").intersection(name) and 0 < len(name) <= 200
    return sound and bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts


def leads_out(folder: Path, path: Path) -> bool:
    """Whether a link on the way to `path`, which lies in `folder`, leads out of that. Those of the hub's cache lead
    from snapshots/REVISION to blobs beside it, and its older downloads into any folder to the cache's blobs: these are
    meant so."""
    try:
        real, root = path.resolve(), folder.resolve()
        blobs = (root.parent.parent / _BLOBS).resolve()
    except (OSError, RuntimeError):  # links in a circle
        return True
    kept = real.parent.name == _BLOBS and real.parent.parent.name.startswith(_KEPT)
    linked = root.parent.name == _SNAPSHOTS and real.parent == blobs
    return not (real.is_relative_to(root) or linked or kept)


def stray(folder: Path) -> Path | None:
    """The first of the folder's files, as far as they are read, that is a link out of it. Raises OSError."""
    with os.scandir(folder) as entries:
        links = sorted(entry.name for entry in entries if entry.is_symlink() and entry.name.endswith(_READ))
    return next((folder / name for name in links if leads_out(folder, folder / name)), None)
