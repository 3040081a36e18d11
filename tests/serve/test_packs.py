"""Several packs in one server: who is in memory, who leaves, who waits for whom, and how much each may take."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_packs import ENDLESS, write_chat_pack
from serving import Running, serving
from test_faults import until

from moert.chat import renderer
from moert.engine.engine import Engine
from moert.engine.regulator import Others
from moert.engine.settings import EngineSettings
from moert.errors import BudgetTooSmall
from moert.machine import held_bytes
from moert.serve import answers
from moert.serve.sharing import Need, Queue, Sharing, need_of, shares

HELLO = [{"role": "user", "content": "hello"}]
FOREVER = 1 << 20


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("packs")
    return [write_chat_pack(root / f"{name}.pack", ENDLESS) for name in ("one", "two", "three")]


def ask(url: str, model: str, count: int = 4) -> str:
    body = {"prompt": "hello", "max_tokens": count, "model": model}
    found = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert found.status_code == 200, found.text
    text: str = found.json()["choices"][0]["text"]
    return text


@contextmanager
def writing(url: str, model: str, most: int = FOREVER) -> Iterator[Iterator[str]]:
    """Holds an answer open, of which the first piece has come."""
    body = {"prompt": "hello", "max_tokens": most, "stream": True, "model": model}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


@pytest.fixture
def room_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets memory have room for this many packs."""

    def limit(count: int) -> None:
        def plan(self: Sharing, needs: Mapping[str, Need]) -> dict[str, int] | None:
            return dict.fromkeys(needs, 0) if len(needs) <= count else None

        monkeypatch.setattr(Sharing, "plan", plan)

    return limit


def there(running: Running) -> list[str]:
    found: list[str] = httpx.get(f"{running.url}/health").json()["models"]
    return found


def waiting(running: Running) -> list[Any]:
    found: list[Any] = httpx.get(f"{running.url}/health").json()["waiting"]
    return [(each["model"], each["requests"]) for each in found]


def test_shares_are_the_least_and_a_part_of_the_rest() -> None:
    needs = {"a": Need(10, 110), "b": Need(20, 320)}
    found = shares(130, needs)
    assert found is not None
    assert sum(found.values()) <= 130
    assert found["a"] - 10 == pytest.approx((found["b"] - 20) / 3, abs=1)
    assert shares(30, needs) == {"a": 10, "b": 20}
    assert shares(29, needs) is None


def test_threads_have_a_queue_in_the_order_in_which_they_came() -> None:
    queue, order, threads = Queue(), list[int](), list[threading.Thread]()

    def take(number: int) -> None:
        with queue.turn():
            order.append(number)

    with queue.turn():
        for number in range(5):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            until(lambda number=number: queue._next == number + 2)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


def test_models_answer_beside_each_other(packs: list[Path]) -> None:
    with serving(*packs[:2]) as running:
        with writing(running.url, "one") as lines:
            with Engine.open(packs[1]) as engine:
                assert ask(running.url, "two") == engine.generate("hello", max_new_tokens=4).text
            assert {each["model"] for each in httpx.get(f"{running.url}/slots").json()} == {"one"}
            next(lines)
        assert there(running) == ["one", "two"]
        loaded = {each["id"]: each["in_memory"] for each in httpx.get(f"{running.url}/v1/models").json()["data"]}
        assert loaded == {"one": True, "two": True}
        assert [each["name"] for each in httpx.get(f"{running.url}/api/ps").json()["models"]] == ["one", "two"]
        text = httpx.get(f"{running.url}/metrics").text
        assert 'moert_requests_total{model="two"} 1' in text
        assert text.count("# TYPE moert_requests_total") == 1


def test_the_idle_one_that_was_used_longest_ago_leaves(packs: list[Path], room_for: Callable[[int], None]) -> None:
    room_for(2)
    with serving(*packs) as running:
        for name in ("one", "two", "one", "three"):
            ask(running.url, name)
        assert there(running) == ["one", "three"]
        with writing(running.url, "one"):
            ask(running.url, "two")
            assert there(running) == ["one", "two"], "who has a request stays, though three was used later"


def test_who_waits_for_memory_is_not_passed_by_requests_for_what_is_there(
    packs: list[Path], room_for: Callable[[int], None]
) -> None:
    room_for(1)
    order = list[str]()

    def asks(url: str, name: str) -> None:
        ask(url, name)
        order.append(name)

    with serving(*packs) as running, ThreadPoolExecutor(3) as pool:
        with writing(running.url, "one"):
            asked = [pool.submit(asks, running.url, "two")]
            until(lambda: waiting(running) == [("two", 1)])
            asked.append(pool.submit(asks, running.url, "one"))
            until(lambda: waiting(running) == [("two", 1), ("one", 1)])
            asked.append(pool.submit(asks, running.url, "three"))
            until(lambda: len(waiting(running)) == 3)
            text = httpx.get(f"{running.url}/metrics").text
            assert 'moert_clients_for_memory{model="three"} 1' in text
        for each in asked:
            each.result(60)
        assert order == ["two", "one", "three"]
        assert waiting(running) == []


def test_who_waits_for_a_model_is_sent_away_when_the_server_ends(
    packs: list[Path], room_for: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    room_for(1)
    monkeypatch.setattr("moert.serve.host.GRACE_S", 0.1)
    with serving(*packs[:2]) as running, ThreadPoolExecutor(1) as pool, writing(running.url, "one") as lines:
        body = {"prompt": "hello", "max_tokens": 4, "model": "two"}
        asked = pool.submit(httpx.post, f"{running.url}/v1/completions", json=body, timeout=60)
        until(lambda: waiting(running) == [("two", 1)])
        running.host.close()
        assert asked.result(60).status_code == 503
        assert "[DONE]" in "".join(lines)


def test_a_model_that_can_not_be_opened_leaves_the_others(packs: list[Path], tmp_path: Path) -> None:
    broken = write_chat_pack(tmp_path / "broken.pack", ENDLESS)
    (broken / "manifest.json").write_text("{}")
    with serving(packs[0], broken) as running:
        body = {"prompt": "a", "max_tokens": 2, "model": "broken"}
        assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 500
        ask(running.url, "one")
        assert (there(running), waiting(running)) == (["one"], [])


def test_answers_go_on_while_a_template_is_rendered(packs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    begun, over, sound = threading.Event(), threading.Event(), renderer._run

    def slow(request: bytes, limits: renderer.Limits) -> tuple[bytes, int]:
        begun.set()
        assert over.wait(60)
        return sound(request, limits)

    monkeypatch.setattr(renderer, "_run", slow)

    def written() -> int:
        (slot,) = httpx.get(f"{running.url}/slots", timeout=20).json()
        count: int = slot["new_tokens"]
        return count

    with serving(packs[0]) as running, ThreadPoolExecutor(1) as pool, writing(running.url, "one"):
        body = {"messages": HELLO, "max_tokens": 2}
        asked = pool.submit(httpx.post, f"{running.url}/v1/chat/completions", json=body, timeout=60)
        try:
            assert begun.wait(60)
            before = written()
            until(lambda: written() > before + 10)
            assert not asked.done()
        finally:
            over.set()
        assert asked.result(60).status_code == 200


def test_the_place_in_the_queue_is_told(packs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ALIVE_S", 0.02)
    with serving(packs[0]) as running:
        gate = running.host.there["one"].engine._admission
        monkeypatch.setattr(gate, "together", lambda running, waiting: max(0, 1 - len(running)))
        body = {"prompt": "hello", "max_tokens": 3, "stream": True}
        begins = partial(httpx.stream, "POST", f"{running.url}/v1/completions", json=body, timeout=60)
        with writing(running.url, "one"), begins() as second:
            assert second.headers["x-queue-place"] == "1"
            assert [each["place"] for each in httpx.get(f"{running.url}/slots").json()] == [0, 1]
            with begins() as third:
                assert third.headers["x-queue-place"] == "2"
            assert next(line for line in second.iter_lines() if line) == ": place 1 in the queue"
        ended = httpx.post(f"{running.url}/v1/completions", json={**body, "stream": False}, timeout=60)
        assert (ended.status_code, ended.headers["x-queue-place"]) == (200, "0")


def test_an_engine_leaves_room_to_others(packs: list[Path]) -> None:
    with Engine.open(packs[0]) as engine:
        limit = held_bytes() + (engine.smallest_memory(8, 8) - 54_000_000) + 60_000_000
    with Engine.open(packs[0], memory=limit, others=Others(lambda: 0, 10_000_000)) as engine:
        with engine.session(16) as session:
            request = session.add("hello", max_new_tokens=30)
            session.turn()
            with pytest.raises(BudgetTooSmall):
                engine.refit(limit)
            assert engine._regulator.promised_bytes == 10_000_000, "and nothing has changed"
            engine.refit(5_000_000)
            with pytest.raises(BudgetTooSmall, match="beside the model"):
                engine.reserve_aside(limit, "work beside the model")
            engine.reserve_aside(1_000_000, "work")
            engine.release_aside(1_000_000)
            while session.unfinished:
                session.turn()
        assert len(request.answer.tokens) == 30
        with pytest.raises(BudgetTooSmall):
            Engine.open(packs[0], memory=limit, others=Others(lambda: 0, limit)).close()


def test_a_request_that_needs_more_than_a_share_gets_it(packs: list[Path]) -> None:
    held = held_bytes()
    least = need_of(packs[0], EngineSettings(), held).least
    limit = held + 2 * least + 20_000_000
    with serving(*packs[:2], engine=EngineSettings(memory=limit)) as running:
        text = ask(running.url, "one")
        assert ask(running.url, "two") == text
        assert there(running) == ["one", "two"]
        smallest = running.host.there["one"].engine.smallest_memory
        most = next(1 << at for at in range(30) if smallest(8, 1 << at) > limit - least)
        assert smallest(8, most) < limit
        with writing(running.url, "one", most):
            assert there(running) == ["one"]
        assert ask(running.url, "two") == text
        assert there(running) == ["one", "two"], "and the room is given back"
        body = {"prompt": "hello", "max_tokens": 1 << 26, "model": "one"}
        found = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
        assert found.status_code == 400
        assert "this request needs memory=" in found.json()["error"]["message"]


@pytest.mark.slow
def test_the_limit_holds_for_all_models_together(packs: list[Path]) -> None:
    limit = 260_000_000
    command = [sys.executable, "-m", "moert", "serve", *map(str, packs), "--port", "0", "--memory", str(limit)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        texts = {ask(url, each, 20) for each in ("one", "two", "three") * 3}
        assert len(texts) == 1, "they are copies of one pack"
        shared = httpx.get(f"{url}/api/ps").json()["models"]
        assert len(shared) >= 2
        assert sum(each["memory_share_bytes"] for each in shared) < limit
        body = {"prompt": "hello " * 2000, "max_tokens": 20, "model": "one"}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code in (200, 400)
        peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        assert peak is not None
        assert int(peak[1]) * 1024 <= limit
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
