"""Docstring to summary line: pairs from public Python packages, split by whole package.

The input is a signature and the docstring's body, the target its first line, the document its package. Held-out and
calibration packages are read first, and a training row that repeats one of their summaries or inputs is dropped.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from calib_data import docstrings
from calib_data import manifest as manifests

SEED = 2026
ORDER = ("heldout", "calibration", "train")  # each split drops what an earlier one has
SKIPPED = ("/tests/", "/test/", "/_vendor/", "/externals/")


def package_rows(path: Path) -> list[dict[str, str]]:
    """Rows of all modules of one wheel, in the order of their names."""
    rows: list[dict[str, str]] = []
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".py") and not any(part in f"/{name}" for part in SKIPPED):
                rows += docstrings.pairs(archive.read(name).decode("utf-8", "replace"))
    return rows


def make(manifest: dict[str, Any], splits: list[str]) -> dict[str, list[manifests.Row]]:
    """Rows of the named splits; the packages of a split are fetched only when it or a later one is wanted."""
    last = max(ORDER.index(split) for split in splits)
    seen: set[str] = set()
    made: dict[str, list[manifests.Row]] = {}
    for split in ORDER[: last + 1]:
        rows: list[manifests.Row] = []
        for source in manifest["source"]:
            if source["split"] == split:
                found = package_rows(manifests.fetch_source(source))
                rows += found if split == "train" else [{**row, "document": source["wheel"]} for row in found]
        kept = docstrings.without_copies(rows, seen)
        made[split] = sorted(kept, key=lambda row: manifests.seeded_hash(row["input"], SEED))
    return {split: made[split] for split in splits}


if __name__ == "__main__":
    raise SystemExit(manifests.main("docline", make))
