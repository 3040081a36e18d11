"""A client of a hub: the commit of a revision, and files of it, of which no more is taken than was promised."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from moert.errors import RunError

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
_ID = re.compile(rf"({_NAME}/{_NAME})(?::([A-Za-z0-9][A-Za-z0-9_./-]{{0,199}}))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHUNK, _MOST_JSON = 1 << 18, 1 << 22
_SECONDS = 30.0  # without a byte


class PackId(NamedTuple):
    """A pack of a hub: owner/name, and a branch, tag or commit of it."""

    repo: str
    revision: str

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}:{self.revision}"


class Commit(NamedTuple):
    """A state of a pack of a hub."""

    pack: PackId
    sha: str


def parse_id(text: str) -> PackId:
    """Returns the pack that owner/name or owner/name:revision names, with or without hf: before it. Raises
    RunError."""
    found = _ID.fullmatch(text.removeprefix("hf:"))
    if found is None or ".." in text:
        raise RunError(f"{text[:200]!r} names no pack of a hub: give owner/name, or owner/name:revision")
    return PackId(found[1], found[2] or "main")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows few redirections, none from https to http, and shows the token to the hub alone."""

    max_redirections = 5

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        if (before.scheme, after.scheme) == ("https", "http"):
            raise urllib.error.URLError(f"it leads to {newurl[:200]!r}")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None:
            if before.netloc != after.netloc:
                request.remove_header("Authorization")
            if "Range" in req.headers:
                request.add_header("Range", req.headers["Range"])
        return request


class Hub:
    """The hub that HF_ENDPOINT names, by default Hugging Face's, with the token of the environment or of `hf auth`.
    Raises RunError where HF_HUB_OFFLINE says that nothing may be fetched."""

    def __init__(self) -> None:
        from huggingface_hub import constants, get_token

        if os.environ.get("HF_HUB_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES:
            raise RunError("HF_HUB_OFFLINE is set, so that nothing is fetched from a hub: unset it")
        self.endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
        token = get_token()
        self._headers = {"User-Agent": "moert"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._opener = urllib.request.build_opener(_Redirects)

    def commit(self, pack: PackId) -> Commit:
        """Returns the commit that a revision stands for. Raises RunError."""
        url = f"{self.endpoint}/api/models/{pack.repo}/revision/{quote(pack.revision, safe='')}"
        try:
            found = json.loads(self._small(url, str(pack), _MOST_JSON))["sha"]
        except (ValueError, TypeError, KeyError, RecursionError):
            found = None
        if not isinstance(found, str) or _COMMIT.fullmatch(found) is None:
            raise RunError(f"{pack}: {self.endpoint} says no commit of it: try again later, or set HF_ENDPOINT")
        return Commit(pack, found)

    def manifest(self, at: Commit, most: int) -> bytes:
        """Returns the manifest.json of a commit. Raises RunError, also for one of more than `most` bytes."""
        return self._small(self._url(at, "manifest.json"), f"{at.pack}: manifest.json", most)

    def fetch(self, at: Commit, relative: str, out: Path, nbytes: int, got: Callable[[int], object]) -> None:
        """Writes a file of `nbytes` bytes to `out`, and goes on where an earlier call ended. `got` is called with the
        number of bytes that came. Raises RunError."""
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_name(out.name + ".part")
        have = part.stat().st_size if part.is_file() else 0
        if have >= nbytes:
            have = 0
        name = f"{at.pack}: {relative}"
        with self._opened(self._url(at, relative), name, have) as answer:
            if answer.status != 206:
                have = 0  # the hub sends all of it
            got(have)
            with open(part, "r+b" if have else "wb") as file:
                file.seek(have)
                while chunk := answer.read(min(_CHUNK, nbytes - have + 1)):
                    have += len(chunk)
                    if have > nbytes:
                        break
                    file.write(chunk)
                    got(len(chunk))
        if have != nbytes:
            if have > nbytes:
                part.unlink()
            found = f"more than {nbytes}" if have > nbytes else have
            raise RunError(
                f"{name} has {found} bytes, its manifest says {nbytes}: run the same again, or tell the pack's owner"
            )
        part.replace(out)

    def _url(self, at: Commit, relative: str) -> str:
        return f"{self.endpoint}/{at.pack.repo}/resolve/{at.sha}/{quote(relative)}"

    def _small(self, url: str, name: str, most: int) -> bytes:
        with self._opened(url, name) as answer:
            found: bytes = answer.read(most + 1)
        if len(found) > most:
            raise RunError(f"{name} has more than {most} bytes")
        return found

    @contextmanager
    def _opened(self, url: str, name: str, start: int = 0) -> Iterator[Any]:
        """Opens an address from a byte on. Raises RunError, in one line, for whatever goes wrong until it is closed."""
        headers = self._headers | ({"Range": f"bytes={start}-"} if start else {})
        try:
            with self._opener.open(urllib.request.Request(url, headers=headers), timeout=_SECONDS) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            error.close()
            raise RunError(f"{name} can't be fetched: {_meaning(error.code)}") from None
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, OSError) and error.filename is not None:
                raise  # of a file here, which names itself
            reason = getattr(error, "reason", None) or error
            raise RunError(
                f"{name} can't be fetched from {self.endpoint} ({str(reason)[:200] or type(error).__name__}): run the "
                "same again, which goes on where it ended"
            ) from None


def _meaning(status: int) -> str:
    if status in (401, 403):
        return "the hub asks for a token that may read it (hf auth login, or HF_TOKEN)"
    if status == 404:
        return "the hub has no such pack, revision or file"
    return f"the hub answers {status}"
