"""Files of a work directory that a test changes as a sweep would have written them."""

from __future__ import annotations

import json
from pathlib import Path

from moeconv.measure.workdir import Journal


def reseal(file: Path) -> None:
    """Instead of what the journal beside it notes of the file, what is in it now."""
    path = file.parent / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line).get("file") != file.name))
    Journal(path, json.loads(lines[0])["subject"]).seal(file)
