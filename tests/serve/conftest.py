"""One server with a pack that can chat, shared by the tests of a file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from chat_packs import ENDLESS, write_chat_pack
from serving import Running, serving

from moert.serve import openai


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws the same seeds in each run for the requests of a test that name none."""
    monkeypatch.setattr(openai, "drawn_seed", partial(next, itertools.count(1)))


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_pack(tmp_path_factory.mktemp("serve") / "tiny.pack", ENDLESS)


@pytest.fixture(scope="module")
def server(pack: Path) -> Iterator[Running]:
    with serving(pack) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made
