"""A minute of many clients, or as long as SOAK_S says: some leave, some send nonsense; nobody gets a wrong token, and
memory does not grow."""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from chat_packs import ENDLESS, write_chat_pack

from moert.engine.engine import Engine

CLIENTS, NEW = 16, 24
SECONDS = float(os.environ.get("SOAK_S", "30"))
WARM = 40_000 if SECONDS >= 600 else 4_000  # requests
WARM_S = 0.3 * WARM  # at most, where others have the processor
PATIENCE_S = 300.0  # of clients, who share their processor with others: a hang lasts longer
GROWS = 0.02 if SECONDS >= 600 else 0.05  # of all memory, between the ends of the warming up and of all
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


def held_kb(pid: int, kind: str = "RssAnon") -> int:
    """Returns the memory of a process: its own, since pages of its programs come and go with the memory of others."""
    found = re.search(rf"{kind}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


def kept_kb(url: str) -> int:
    figures = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    found = re.search(r"^moert_prefix_bytes.* (\d+)$", figures, re.MULTILINE)
    assert found is not None
    return int(found[1]) >> 10


@pytest.mark.slow
@pytest.mark.timeout(WARM_S + SECONDS + 300)
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

    def live(url: str, number: int, over: Callable[[], bool]) -> None:
        chance = random.Random(number)
        while not over():
            try:
                with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
                    for _ in range(chance.randrange(1, 20)):
                        behave(client, chance)
            except Exception as error:
                faults.append(repr(error))
                return

    def crowd(pid: int, url: str, over: Callable[[], bool]) -> float:
        """Returns the median of the memory [KiB], but for kept beginnings, in the last quarter of the looks."""
        threads = [threading.Thread(target=live, args=(url, number, over)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        held = list[int]()
        while not over():
            time.sleep(SECONDS / 100)
            held.append(held_kb(pid) - kept_kb(url))
            print(f"{len(asked)} requests, {held[-1]} KiB, {len(faults)} faults", flush=True)
        for thread in threads:
            thread.join()
        return statistics.median(held[-(len(held) // 4 or 1) :])

    with program(pack) as (pid, url):
        until_s = time.monotonic() + WARM_S
        before = crowd(pid, url, lambda: len(asked) >= WARM or time.monotonic() > until_s)
        all_kb, until_s = held_kb(pid, "VmRSS"), time.monotonic() + SECONDS
        after = crowd(pid, url, lambda: time.monotonic() > until_s)
        assert faults == []
        assert httpx.get(f"{url}/slots").json() == []
        assert after - before <= GROWS * all_kb, "memory grows"
