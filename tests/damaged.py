"""Files of a pack that something has happened to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from moeconv.writer import file_entry
from tests.random_packs import sealed


def damaged(body: bytes, data: st.DataObject) -> bytes:
    """One to three small changes: a bit, bytes that are gone or there twice, or other text."""
    changed = bytearray(body)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        change = data.draw(st.sampled_from(["flip", "drop", "repeat", "text"]))
        if change == "flip":
            changed[at] ^= 1 << data.draw(st.integers(0, 7))
        elif change == "drop":
            del changed[at : at + data.draw(st.sampled_from([1, 2, 8, 64]))]
        elif change == "repeat":
            changed[at:at] = changed[at : at + 8]
        else:
            changed[at : at + 1] = data.draw(st.sampled_from([b"0", b"9", b"-", b'"', b"]", b"\xff"]))
    return bytes(changed)


def resealed(root: Path, change: Callable[[dict[str, Any]], Any] = lambda document: None) -> Path:
    """Makes manifest and hashes right again after files were changed, as a stranger would; `change` alters the manifest
    too. Files that are larger than 16 MiB keep what the manifest says of them."""
    document = json.loads((root / "manifest.json").read_text())
    for name, entry in document["files"].items():
        if (root / name).stat().st_size <= 16 << 20:
            found = file_entry((root / name).read_bytes())
            entry.update(nbytes=found.nbytes, sha256=found.sha256, crc32=found.crc32)
    for entry in document["experts"]:
        start, nbytes = entry.get("offset", 0), entry["file_bytes"]
        found = file_entry((root / entry["path"]).read_bytes()[start : start + nbytes])
        entry.update(sha256=found.sha256, crc32=found.crc32)
    change(document)
    (root / "manifest.json").write_text(sealed(document))
    return root
