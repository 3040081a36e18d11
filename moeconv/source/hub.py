"""Models by name: a directory, a GGUF file, or a model of a hub, whose files are fetched and compared with their
hashes."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from moeconv.progress import Bar, bar
from moeconv.source.outline import (
    BLOBS,
    CODED,
    CONFIG,
    GENERATION_CONFIG,
    GGUF,
    INDEX,
    MOST_FILES,
    SINGLE,
    SPLIT,
    CheckpointError,
    indexed_files,
    json_object,
    line,
    split_names,
    stray,
)
from moert.machine import cache_folder
from moert.pack.reader import is_pack

_GGUF_OF_HUB = re.compile(rf"([\w-][\w.-]*/[\w-][\w.-]*)[:/]([\w-][\w./-]*{re.escape(GGUF)})")
_SETTINGS = (CONFIG, GENERATION_CONFIG, CODED)
_OF_TEXT = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja", "tokenization_*.py")
_COPIES = ("original/*", "consolidated*", "metal/*", "onnx/*", "openvino/*")
"""Files with copies of the weights in other forms, beside those that transformers reads."""
_NAMED_BY_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_CHUNK = 10**6
_OF_LIBRARY = ("name", "bar_format", "disable", "position")
"""Arguments of the library's bars that tqdm does not know, or that change how they look."""
_SECOND_BAR = "downloading bytes"  # how the name of a bar ends that counts the same as another


def find(path_or_hub_id: str, weights: bool = True) -> Path:
    """Returns a local directory or GGUF file, or those of a hub model, which are fetched (or found in the cache):
    without `weights` only its settings and index, or the whole GGUF file. Raises CheckpointError."""
    path = Path(path_or_hub_id)
    if path.is_dir():
        if (link := stray(path)) is not None:
            raise CheckpointError(f"{link} is a link that leads out of {path}: put the file itself there")
        if is_pack(path):
            raise CheckpointError(
                f"{path} is a pack, and no model: give the model that it was made from (moert info says what is in a "
                "pack)"
            )
        return path
    if path.suffix.lower() == GGUF:
        return _gguf(path_or_hub_id)
    if path.exists():
        raise CheckpointError(f"{path} is a file: give the directory that holds config.json and the weights")
    if path_or_hub_id.count("/") > 1 or path_or_hub_id.startswith((".", "/", "~")) or not path_or_hub_id:
        raise CheckpointError(f"there is no directory {path_or_hub_id!r}: give a local model or a hub id")
    return _from_hub(path_or_hub_id, weights)


def _gguf(path_or_hub_id: str) -> Path:
    """Returns the path of a local GGUF file, or of one that is fetched from the hub, with the others of a model in
    several: owner/name/FILE or owner/name:FILE. Raises CheckpointError."""
    if Path(path_or_hub_id).is_file():
        return Path(path_or_hub_id)
    named = _GGUF_OF_HUB.fullmatch(path_or_hub_id)
    if named is None:
        raise CheckpointError(f"there is no file {path_or_hub_id!r}: give a local model or a hub id")
    from huggingface_hub import hf_hub_download

    split = SPLIT.fullmatch(named[2])
    files = [named[2]] if split is None else split_names(split, min(int(split[3]), MOST_FILES))
    try:
        with _bars() as shown:
            fetched = [Path(hf_hub_download(named[1], file, tqdm_class=shown)) for file in files]
    except Exception as error:
        raise CheckpointError(
            f"{path_or_hub_id!r} is neither a local file nor a file of the hub that can be fetched now ({line(error)})"
        ) from None
    check_hashes(named[1], fetched)
    return fetched[0]


def _from_hub(hub_id: str, weights: bool) -> Path:
    """Returns the folder of a hub model's files in the cache; of several copies of its weights only the one that is
    read is fetched. Raises CheckpointError."""
    from huggingface_hub import snapshot_download

    def fetched(patterns: Sequence[str], revision: str | None = None) -> Path:
        with _bars() as shown:
            folder = Path(snapshot_download(
                hub_id, revision=revision, tqdm_class=shown, allow_patterns=[*patterns], ignore_patterns=[*_COPIES],
            ))  # fmt: skip
        there = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
        wanted = [name for name in there if _is_any(name, patterns) and not _is_any(name, _COPIES)]
        check_hashes(hub_id, [there[name] for name in wanted])
        return folder

    try:
        path = fetched([*_SETTINGS, INDEX, *(_OF_TEXT if weights else ())])
        if weights:
            index = json_object(path / INDEX)
            fetched([SINGLE] if index is None else sorted(set(indexed_files(path, index).values())), path.name)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{hub_id!r} is neither a local directory nor a hub model that can be fetched now ({line(error)})"
        ) from None
    return path


def _is_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, each) for each in patterns)


@contextmanager
def _bars() -> Iterator[Any]:
    """Yields a class of progress bars for the library. On a terminal one bar is shown: bytes, and the time left. All
    bars that it made are closed at the end."""
    from tqdm import tqdm

    made: list[Any] = []

    class Bytes(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            second = str(named.get("desc")).lower().endswith(_SECOND_BAR)
            seen = named.get("unit") == "B" and not second and sys.stderr.isatty()
            kept = {name: value for name, value in named.items() if name not in _OF_LIBRARY}
            super().__init__(*arguments, **kept | {"desc": "fetching", "leave": False, "disable": not seen})
            made.append(self)

        def set_description(self, *_: Any, **__: Any) -> None:
            """Keeps the description that it has."""

    try:
        yield Bytes
    finally:
        for each in made:
            each.close()


# The hub's cache names a file by its hash: sha256 of a large one, and git's own of a small one.


def check_hashes(hub_id: str, files: Iterable[Path]) -> None:
    """Compares files of the hub's cache with the hashes that they are named by, each once until it changes. One with
    another hash is deleted. Raises CheckpointError."""
    named = {blob: file for file in files if _is_named(blob := file.resolve())}
    try:
        unknown = {blob: file for blob, file in named.items() if not _is_known(blob)}
        if not unknown:
            return
        with bar(f"checking {hub_id}", sum(-(-blob.stat().st_size // _CHUNK) for blob in unknown), "MB") as shown:
            for blob, file in unknown.items():
                state = _state(blob)
                if _hash(blob, shown) != blob.name:
                    raise CheckpointError(_differs(hub_id, file, blob))
                _remember(blob, state)
    except OSError as error:
        raise CheckpointError(f"{hub_id}: its files in the hub's cache can't be read ({line(error)})") from None


def _differs(hub_id: str, file: Path, blob: Path) -> str:
    """Deletes a file of the cache that has another hash, and returns a message on that."""
    said = f"{hub_id}: {file.name} is not the file that the hub has (its hash differs), and"
    try:
        file.unlink()
        blob.unlink(missing_ok=True)
    except OSError as error:
        return f"{said} can't be deleted ({error.strerror}): delete {blob} and run the same again"
    return f"{said} was deleted: run the same again, with a connection"


def _hash(blob: Path, shown: Bar) -> str:
    """Returns the hash of a file's bytes, of the kind that the file is named by."""
    algorithm = hashlib.sha256() if len(blob.name) == 64 else hashlib.sha1(usedforsecurity=False)
    if algorithm.name == "sha1":
        algorithm.update(b"blob %d\0" % blob.stat().st_size)
    with blob.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            algorithm.update(chunk)
            shown.update(1)
    return algorithm.hexdigest()


def _is_named(blob: Path) -> bool:
    return blob.parent.name == BLOBS and _NAMED_BY_HASH.fullmatch(blob.name) is not None


def _is_known(blob: Path) -> bool:
    """Returns whether a file was compared with its hash before, and did not change. Raises OSError for a file that
    can't be looked at."""
    state, mark = _state(blob), _mark(blob)
    try:
        return mark is not None and mark.read_text("utf-8") == state
    except (OSError, UnicodeDecodeError):
        return False


def _remember(blob: Path, state: str) -> None:
    """Remembers that a file in this state has its hash, where the user has a folder for that."""
    mark = _mark(blob)
    with suppress(OSError):
        if mark is not None:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(state, "utf-8")


def _mark(blob: Path) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "moeconv" / "checked" / blob.name


def _state(blob: Path) -> str:
    found = blob.stat()
    return f"{blob}\n{found.st_size} {found.st_mtime_ns}\n"
