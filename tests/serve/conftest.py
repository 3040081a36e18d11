"""One server with a pack that can chat, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from chat_packs import ENDLESS, write_chat_pack
from serving import Running, serving


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
