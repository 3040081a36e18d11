"""What was measured of this machine and is remembered in the user's cache folder: drives, and devices that compute."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from moert.pack.files import write_atomically

DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading an entry that somebody has changed can raise."""
_CACHE = Path("moert", "drives.json")
_VERSION = 1


def cache_file() -> Path | None:
    """Where things are remembered; None if the user has no such folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / _CACHE
    except RuntimeError:
        return None


def entries(cache: Path | None, section: str) -> dict[str, Any]:
    """What is remembered there by key, not checked yet; nothing if the file is damaged or not there."""
    found = _document(cache).get(section, {})
    return dict(found) if isinstance(found, dict) else {}


def remember(cache: Path | None, section: str, body: Mapping[str, Any]) -> None:
    """Replaces a section of the file, and with it the file, in one step; where that can't be done, nothing is
    remembered."""
    if cache is None:
        return
    document = {**_document(cache), "version": _VERSION, section: body}
    with suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cache, json.dumps(document, indent=1).encode())


def _document(cache: Path | None) -> dict[str, Any]:
    with suppress(OSError, *DAMAGED):
        if cache is not None and cache.is_file():  # of anything else a read may not end
            document = json.loads(cache.read_bytes())
            if document["version"] == _VERSION:
                return dict(document)
    return {}
