"""Packs of earlier minor versions stay readable; one of a later major version is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeconv.matrices import matrices_of, read_expert
from moert.pack.errors import FormatTooNew
from moert.pack.manifest import MAJOR, parse_manifest
from moert.pack.reader import Pack

HERE = Path(__file__).parent
STORED = {"tiny.pack": 0, "neurons.pack": 3, "together.pack": 4, "trellis.pack": 6}
"""Stored packs: the minor version of each."""


def test_every_stored_pack_is_listed() -> None:
    assert {path.name for path in HERE.glob("*.pack")} == set(STORED)


@pytest.mark.parametrize("name", STORED)
def test_it_is_read_whole(name: str) -> None:
    pack = Pack.open(HERE / name)
    assert pack.manifest.minor == STORED[name]
    for key in pack.manifest.model.expert_keys():
        assert set(matrices_of(pack, key, read_expert(pack, key))) == set(pack.manifest.model.moe.ffn.projections)


def test_a_later_major_version_is_refused_as_the_docs_say() -> None:
    document = json.loads((HERE / "tiny.pack" / "manifest.json").read_bytes())
    with pytest.raises(FormatTooNew) as refused:
        parse_manifest(json.dumps({**document, "major": MAJOR + 1}))
    said = " ".join((HERE.parents[1] / "docs" / "format.md").read_text(encoding="utf-8").split())
    assert f"`{refused.value}`" in said
