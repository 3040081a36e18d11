"""What a training that was interrupted finds again: a folder of examples, and checkpoints."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moeconv.errors import ConversionError
from moeconv.measure.journal import digest_of, identity
from moeconv.strict_json import NotJson, bounded, parse
from moert.pack.files import write_atomically

_DONE = "examples.json"
_MOST_BYTES = 1 << 26
_SEAL_BYTES = 32  # of a checkpoint, before all else: the sha256 of the rest


def filled(folder: Path, about: str, fill: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `fill` said of the examples that it put into the empty folder. They are taken if they are `about` the same,
    and all of it is as it was; otherwise they are made anew. Raises ConversionError for what the disk refuses."""
    try:
        found = _said(folder)
        if found is None or found.get("about") != about or found.pop("seal", None) != _seal(folder, found):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            found = {"about": about, **fill()}
            sealed = {**found, "seal": _seal(folder, found)}
            write_atomically(folder / _DONE, json.dumps(sealed).encode())
    except OSError as error:
        raise ConversionError(
            f"can't use {folder}: {error.strerror or error}; free it or give another --work"
        ) from None
    return found


@contextmanager
def believed(folder: Path) -> Iterator[None]:
    """Around what opens the examples of a folder, which others may have written. Raises ConversionError."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise ConversionError(
            f"{folder} holds examples that are none ({reason}): delete it, and they are made again"
        ) from error


def _said(folder: Path) -> dict[str, Any] | None:
    try:
        found = parse(bounded(folder / _DONE, _MOST_BYTES), finite=False)
    except (FileNotFoundError, NotJson):
        return None
    return found if isinstance(found, dict) else None


def _seal(folder: Path, said: Mapping[str, Any]) -> str:
    """Returns the hash of what was said and of each file of examples."""
    files = {path.name: digest_of(path) for path in folder.iterdir() if path.name != _DONE}
    return identity(json.dumps(said, sort_keys=True), sorted(files.items()))


def load_checkpoint(path: Path, about: str) -> dict[str, Any] | None:
    """What `save_checkpoint` wrote; None where there is none, or one about another training. Raises ConversionError for
    one that can't be read."""
    try:
        body = path.read_bytes()
        if hashlib.sha256(body[_SEAL_BYTES:]).digest() != body[:_SEAL_BYTES]:
            raise ValueError("it was changed since it was made")
        found: dict[str, Any] = torch.load(io.BytesIO(body[_SEAL_BYTES:]), weights_only=True)
        return found if found["about"] == about else None
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConversionError(f"{path} can't be read ({text[:100]}): delete it, and training begins anew") from None


def save_checkpoint(path: Path, about: str, state: dict[str, Any]) -> None:
    """Raises ConversionError for what the disk refuses."""
    stream = io.BytesIO()
    torch.save({"about": about, **state}, stream)
    body = stream.getvalue()
    try:
        write_atomically(path, hashlib.sha256(body).digest() + body)
    except OSError as error:
        raise ConversionError(f"can't write {path}: {error.strerror}; free some space and run again") from None
