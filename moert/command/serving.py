"""moert serve: from options to a server, and its lines for people."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from moert.command import console
from moert.engine.generation import GenerationSettings
from moert.engine.settings import EngineSettings
from moert.errors import InputInvalid, RunError
from moert.pack.messages import NotASize, in_one_line, parse_size

if TYPE_CHECKING:
    from moert.engine.archive import Folder

_MOST_KEY_BYTES = 4096
_USUAL_SIZE = "2GB"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:]+\]|[a-z0-9_.-]+)(:[1-9][0-9]{0,4})?")
_USUAL_PORT = re.compile(r"http://.*:80|https://.*:443")


def run_server(
    packs: Sequence[Path],
    address: tuple[str, int],
    key_file: Path | None,
    origins: Sequence[str],
    most_waiting: int,
    folder: Folder | None,
    defaults: GenerationSettings,
    engine: EngineSettings,
) -> None:
    """Runs a server until a signal ends it. Raises RunError, or the errors of Engine.open."""
    names = names_of(packs)
    check_origins(origins)
    key = None if key_file is None else _key(key_file)
    try:
        from moert.serve.host import ServerSettings
        from moert.serve.server import bound, serve
    except ImportError as error:
        if (error.name or "").split(".")[0] in ("starlette", "uvicorn"):
            raise RunError("moert serve needs further packages: pip install 'moert[serve]'") from None
        raise
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="moert: %(message)s")
    settings = ServerSettings(names, engine, defaults, key, origins, most_waiting, folder)
    with bound(*address) as listening:
        serve(settings, listening, lambda found: _ready(found, names, key is None))


def names_of(packs: Sequence[Path]) -> dict[str, Path]:
    """Returns the packs by the names of their folders, without .pack. Raises RunError where two have the same."""
    found: dict[str, Path] = {}
    for pack in packs:
        name = pack.resolve().name.removesuffix(".pack") or "model"
        if name in found:
            raise RunError(f"{found[name]} and {pack} have the same name {name}: rename the folder of one")
        found[name] = pack
    return found


def check_origins(origins: Sequence[str]) -> None:
    """Raises RunError for an origin that no browser sends, so that no page would be let in."""
    for each in origins:
        sent = each in ("*", "null") or (_ORIGIN.fullmatch(each) and not _USUAL_PORT.fullmatch(each))
        if not sent:
            raise RunError(
                f"--origin {each!r} is no origin: give one as browsers send it, such as https://example.org or "
                "http://localhost:3000 (small letters, no path, no usual port), or *"
            )


def folder_of(path: Path | None, most: str | None) -> Folder | None:
    """Returns the folder where conversations are kept, which nobody else may read where it is new. Raises RunError, or
    InputInvalid."""
    if path is None:
        if most is not None:
            raise RunError("--cache-size has no effect without --cache-dir: leave it out")
        return None
    from moert.engine.archive import Folder

    try:
        most_bytes = parse_size(_USUAL_SIZE if most is None else most)
        path.mkdir(0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            return Folder(path, most_bytes)
    except NotASize as error:
        raise RunError(f"--cache-size {error}") from None
    except OSError as error:
        raise InputInvalid(f"--cache-dir {path} can't be written: {error.strerror or error}") from None


def _key(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_KEY_BYTES).decode("ascii").strip()
    except OSError as error:
        raise InputInvalid(f"{path} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputInvalid(f"{path} is no key: letters beyond ASCII can't stand in a header") from None
    if not text or any(letter.isspace() for letter in text):
        raise InputInvalid(f"{path} holds no key: give a file with one word")
    return text


def _ready(address: str, names: dict[str, Path], keyless: bool) -> None:
    print(in_one_line(f"{address} answers for {', '.join(names)}"), flush=True)
    host = address.partition("//")[2].rpartition(":")[0]
    if keyless and host not in ("127.0.0.1", "localhost", "[::1]"):
        console.note(f"anyone who reaches {host} can use this server: --api-key-file asks clients for a key")
