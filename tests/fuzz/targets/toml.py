"""TOML: manifests of calibration sets, and recipes."""

from __future__ import annotations

from moeconv.calibration import catalogue
from moeconv.command.recipe import Recipe
from moeconv.errors import ConversionError
from tests.fuzz.target import Target
from tests.fuzz.targets.packs import folder

_NAME = "set"
_SET = """builder = "calib_data/set.py"
metric = "rouge2"
[splits.calibration]
file = "build/data/none.jsonl"
sha256 = "00"
[splits.heldout]
file = "build/data/none.jsonl"
sha256 = "00"
"""
_RECIPE = """model = "models/g2p"
calib = "g2p"
loss = 0.05
bits = [2, 4, 8]
quantizer = "group"
group_size = 32
seed = 0
[expect]
heldout_loss_at_most = 0.08
"""


def read(body: bytes) -> None:
    path = folder() / f"{_NAME}.toml"
    path.write_bytes(body)
    catalogue.CATALOGUE = folder()
    if b"model" in body:
        Recipe.load(path, folder() / "out")
    else:
        catalogue.find_entry(_NAME)


def seeds() -> list[bytes]:
    return [_SET.encode(), _RECIPE.encode()]


TARGET = Target(read, (ConversionError,), seeds)
