"""The packs that were fetched from a hub, in a folder of their own: MOERT_HOME, or ~/.cache/moert."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from moert.errors import RunError
from moert.hub.client import Hub, PackId, parse_id
from moert.machine import locked
from moert.pack.errors import HashMismatch, PackError
from moert.pack.files import write_atomically
from moert.pack.manifest import parse_manifest
from moert.pack.reader import MANIFEST, Pack
from moert.pack.tensors import bound_of

_RECORD, _PART = ".pulled.json", ".part"
Say = Callable[[str], object]


class Pulled(NamedTuple):
    """A pack of the catalogue: its folder, its commit, and its bytes."""

    id: PackId
    folder: Path
    commit: str
    nbytes: int


def home() -> Path:
    """Returns the folder of the catalogue."""
    set_by_user = os.environ.get("MOERT_HOME")
    return Path(set_by_user) if set_by_user else Path.home() / ".cache" / "moert"


def listed() -> list[Pulled]:
    """Returns all packs of the catalogue, by name."""
    found = (_read(record) for record in sorted((home() / "packs").glob(f"*/*{_RECORD}")))
    return [each for each in found if each is not None]


def located(text: str, say: Say) -> Path:
    """Returns the folder of the pack hf:owner/name, which is fetched if it is not in the catalogue; the path of any
    other text as it is. Raises RunError or PackError."""
    if not text.startswith("hf:"):
        return Path(text)
    asked = parse_id(text)
    record = _read(_record(asked))
    return record.folder if record is not None else pull(asked, say).folder


def removed(asked: PackId) -> Pulled:
    """Removes a pack from the catalogue, whole or in part. Raises RunError for one that is not there."""
    folder, found = _folder(asked), _read(_record(asked))
    part = folder.with_name(folder.name + _PART)
    if found is None and not folder.exists() and not part.exists():
        known = ", ".join(str(each.id) for each in listed()) or "none"
        raise RunError(f"the catalogue in {home()} has no {asked}; it has: {known}")
    _record(asked).unlink(missing_ok=True)  # first, so that a pack with a record is whole
    for each in (folder, part):
        if each.exists():
            shutil.rmtree(each)
    return found or Pulled(asked, folder, "", 0)


def pull(asked: PackId, say: Say) -> Pulled:
    """Fetches a pack into the catalogue, or goes on with it: only the files that its manifest names, each of the size
    and the sha256 that stand there. A pack of the same name, of an older commit, is replaced when the new one is whole.
    Raises RunError or PackError."""
    hub = Hub()
    commit = hub.commit(asked)
    known = _read(_record(asked))
    if known is not None and known.commit == commit.sha:
        say(f"{asked} is here already, as of commit {commit.sha[:10]}")
        return known
    folder = _folder(asked)
    part = folder.with_name(folder.name + _PART)
    text = hub.manifest(commit, most_of_a_manifest())
    try:
        pack = Pack(part, parse_manifest(text))
    except PackError as error:
        error.args = (f"{asked}, as {hub.endpoint} gives it: {error}", *error.args[1:])
        raise
    sizes = pack.sizes()
    _make_room(part, sizes)
    with _alone(part, asked):
        with _bar(f"fetching {asked}", sum(sizes.values())) as got:
            for relative, nbytes in sizes.items():
                target = pack.file(relative)
                if target.is_file() and target.stat().st_size == nbytes:
                    got(nbytes)
                else:
                    hub.fetch(commit, relative, target, nbytes, got)
        _verify(pack, asked)
        write_atomically(part / MANIFEST, text)
        Pack.open(part)
        _record(asked).unlink(missing_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
        _drop_strangers(part, {MANIFEST, *sizes})
        part.rename(folder)
    found = Pulled(asked, folder, commit.sha, sum(sizes.values()))
    about = {"id": str(asked), "commit": commit.sha, "bytes": found.nbytes}
    write_atomically(_record(asked), (json.dumps(about, indent=1) + "\n").encode())
    say(f"{asked} is in {folder}")
    return found


@contextmanager
def _alone(part: Path, asked: PackId) -> Iterator[None]:
    """Keeps others from the folder of a pack that comes. Raises RunError if another process has it."""
    try:
        with locked(part):
            yield
    except BlockingIOError:
        raise RunError(f"{asked} is being fetched by another process: wait for it") from None


def most_of_a_manifest() -> int:
    """Returns the most bytes of a manifest.json."""
    return bound_of(MANIFEST).most_bytes


def _make_room(part: Path, sizes: Any) -> None:
    """Makes the folder of a pack that comes. Raises RunError if the disk has no room for the rest of it."""
    part.mkdir(parents=True, exist_ok=True)
    here = sum(path.stat().st_size for path in part.rglob("*") if path.is_file() and not path.is_symlink())
    missing, free = sum(sizes.values()) - here, shutil.disk_usage(part).free
    if missing > free:
        raise RunError(
            f"{part.parent} has room for {free / 1e9:.3g} GB, the rest of the pack has {missing / 1e9:.3g}: free some "
            "space, or set MOERT_HOME to a folder on another disk"
        )


def _verify(pack: Pack, asked: PackId) -> None:
    """Checks the sha256 of every piece, and deletes the files that have another. Raises HashMismatch."""
    left, wrong = list(pack.pieces()), []
    with _bar(f"checking {asked}", sum(piece.nbytes for piece in left)) as got:
        while left:
            done = 0
            try:
                for _ in pack.verify_hashes(left):
                    got(left[done].nbytes)
                    done += 1
            except HashMismatch:
                wrong.append(left[done].path)
                done += 1
            left = left[done:]
    for path in dict.fromkeys(wrong):
        pack.file(path).unlink()
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise HashMismatch(
            f"{asked}: {wrong[0]}{more} is not the file that the manifest describes (its sha256 differs), and was "
            "deleted: run the same again, or tell the pack's owner"
        )


def _drop_strangers(folder: Path, named: set[str]) -> None:
    """Deletes what a commit that was broken off has left."""
    for path in [*folder.rglob("*")]:
        if (path.is_symlink() or path.is_file()) and path.relative_to(folder).as_posix() not in named:
            path.unlink()


@contextmanager
def _bar(name: str, total: int) -> Iterator[Callable[[int], object]]:
    """A progress bar of bytes, with time left, on a terminal."""
    from tqdm import tqdm

    with tqdm(total=total, desc=name, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        yield bar.update


def _folder(asked: PackId) -> Path:
    owner, name = asked.repo.split("/")
    return home() / "packs" / owner / f"{name}@{quote(asked.revision, safe='')}"


def _record(asked: PackId) -> Path:
    folder = _folder(asked)
    return folder.with_name(folder.name + _RECORD)


def _read(record: Path) -> Pulled | None:
    """Returns the pack of a record; None for no record, or if its folder is gone."""
    folder = record.with_name(record.name.removesuffix(_RECORD))
    name, _, revision = folder.name.partition("@")
    try:
        about = json.loads(record.read_text("utf-8"))
        found = Pulled(
            PackId(f"{record.parent.name}/{name}", unquote(revision)), folder, about["commit"], int(about["bytes"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if folder.is_dir() else None
