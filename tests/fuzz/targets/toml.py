"""TOML: what is said of a calibration set in calib_data/."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from moeconv.calibration import load
from moeconv.errors import ConversionError
from tests.fuzz.target import Target
from tests.fuzz.targets.packs import folder

_FILE = Path(__file__).resolve()
_SET = """builder = "calib_data/set.py"
metric = "rouge2"
[splits.calibration]
file = "{file}"
sha256 = "{sha256}"
[splits.heldout]
file = "{file}"
sha256 = "{sha256}"
[[more]]
numbers = [1, 2.5e3, inf, 0x1f, 1979-05-27T07:32:00Z]
"""


def read(body: bytes) -> None:
    (folder() / "set.toml").write_bytes(body)
    before, load.CATALOGUE = load.CATALOGUE, folder()
    try:
        load.find_entry("set")
    finally:
        load.CATALOGUE = before


def seeds() -> list[bytes]:
    """One, of a set that is there."""
    return [_SET.format(file=_FILE, sha256=sha256(_FILE.read_bytes()).hexdigest()).encode()]


TARGET = Target(read, (ConversionError,), seeds)
