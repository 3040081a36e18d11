"""A checkpoint of each family, and text for each."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from conversions import words
from tiny import tiny_of, tiny_olmoe, tiny_switch


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, rng = tmp_path_factory.mktemp("sources"), random.Random(0)
    tiny_switch(root / "switch")
    tiny_olmoe(root / "olmoe")
    pairs = [{"input": words(rng, 3) + str(i % 10), "target": words(rng, 2)} for i in range(48)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    rows = [{"text": words(rng, 18)} for _ in range(60)]
    (root / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {path.stem: path for path in root.iterdir()}


@pytest.fixture(scope="session")
def firing(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An encoder-decoder, gated experts of which a token has several, and a dense decoder with biases."""
    root = tmp_path_factory.mktemp("relu")
    return {
        **sources, "olmoe": tiny_olmoe(root / "olmoe", hidden_act="relu"), "opt": tiny_of("opt")(root / "opt"),
    }  # fmt: skip


@pytest.fixture
def damaged(pack: Path, tmp_path: Path) -> Path:
    """A copy of a module's `pack`, to do harm to."""
    return Path(shutil.copytree(pack, tmp_path / "m.pack"))
