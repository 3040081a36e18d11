"""A minute of many clients: some leave, some send nonsense; nobody gets a wrong token, and memory does not grow."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from chat_packs import ENDLESS, write_chat_pack

from moert.engine.engine import Engine

CLIENTS, WARM_S, SECONDS, NEW = 16, 45.0, 30.0, 24
GROWS_KB = 8
"""Of a request. Kept beginnings take some of it until they have their room, and the allocator's gaps the rest."""
BODIES = (b"", b"{", b"[1]", b'{"prompt": 5}', b'{"prompt": "a", "n": -1}', b"[" * 5000, b'{"colour": 1}')


@contextmanager
def program(pack: Path) -> Iterator[tuple[int, str]]:
    command = [sys.executable, "-m", "moert", "serve", str(pack), "--port", "0", "--memory", "200MB"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().split()[0]
    finally:
        process.terminate()
        assert process.wait(60) == 143


def held_kb(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.slow
def test_many_clients_that_come_and_go(tmp_path: Path) -> None:
    pack = write_chat_pack(tmp_path / "tiny.pack", ENDLESS)
    prompts = ["hello world " * count for count in range(1, 33)]
    with Engine.open(pack) as engine:
        wanted = {each: engine.generate(each, max_new_tokens=NEW, temperature=0.8, seed=7).text for each in prompts}
    faults, asked = list[str](), list[int]()

    def behave(client: httpx.Client, chance: random.Random) -> None:
        prompt = chance.choice(prompts)
        body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0.8, "seed": 7}
        act = chance.randrange(5)
        asked.append(act)
        if act == 0:
            if client.post("/v1/completions", content=chance.choice(BODIES)).status_code != 400:
                faults.append("nonsense was not refused")
        elif act == 1:
            with client.stream("POST", "/v1/completions", json={**body, "max_tokens": 5000, "stream": True}) as answer:
                next(answer.iter_bytes())
        else:
            found = client.post("/v1/completions", json=body)
            if found.status_code != 429 and found.json()["choices"][0]["text"] != wanted[prompt]:
                faults.append(f"{found.status_code}: {found.text[:200]}")

    def live(url: str, number: int, until_s: float) -> None:
        chance = random.Random(number)
        while time.monotonic() < until_s:
            try:
                with httpx.Client(base_url=url, timeout=60) as client:
                    for _ in range(chance.randrange(1, 20)):
                        behave(client, chance)
            except Exception as error:
                faults.append(repr(error))
                return

    def crowd(url: str, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        threads = [threading.Thread(target=live, args=(url, number, until_s)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with program(pack) as (pid, url):
        crowd(url, WARM_S)
        before, began = held_kb(pid), len(asked)
        crowd(url, SECONDS)
        after = held_kb(pid)
        assert faults == []
        assert httpx.get(f"{url}/slots").json() == []
        assert after - before <= max(0.1 * before, GROWS_KB * (len(asked) - began)), "memory grows"
