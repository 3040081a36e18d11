"""Threads that share an engine take turns; nothing runs inside of a turn of its own thread."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tiny_packs import DECODER, PROMPTS, write_pack

from moert.engine.engine import Engine
from moert.engine.generation import GenerationSettings
from moert.engine.session import Turns
from moert.errors import Busy

SETTINGS = GenerationSettings(max_new_tokens=8)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("turns") / "decoder.pack", DECODER)


def test_the_second_waits_until_the_first_is_through() -> None:
    turns, order = Turns(), list[str]()

    def second() -> None:
        with turns.turn():
            order.append("second")

    with turns.turn():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.05)
        order.append("first")
        with pytest.raises(Busy, match="in this thread"), turns.turn():
            pass
    thread.join()
    assert order == ["first", "second"]
    with turns.turn():  # it is free again
        pass


def test_four_threads_may_share_an_engine(pack: Path) -> None:
    with Engine.open(pack, predict="none", cache=None, threads=1) as engine:
        alone = {prompt: engine.generate(prompt, SETTINGS).text for prompt in PROMPTS}
        found: list[tuple[str, str]] = []

        def ask(first: int) -> None:
            for at in range(3 * len(PROMPTS)):
                prompt = PROMPTS[(first + at) % len(PROMPTS)]
                found.append((prompt, engine.generate(prompt, SETTINGS).text))
            for prompt, answer in zip(PROMPTS, engine.generate_many(PROMPTS, SETTINGS), strict=True):
                found.append((prompt, answer.text))

        threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 4 * 4 * len(PROMPTS)
    assert all(text == alone[prompt] for prompt, text in found)


def test_a_request_inside_a_request_is_refused_and_the_engine_stays_usable(pack: Path) -> None:
    with Engine.open(pack, predict="none", threads=1) as engine:
        expected = engine.generate(PROMPTS[0], SETTINGS).text
        with pytest.raises(Busy, match="when it has ended"):
            engine.generate(PROMPTS[0], SETTINGS, lambda text: engine.generate(PROMPTS[1], SETTINGS) and None)
        assert engine.generate(PROMPTS[0], SETTINGS).text == expected


def test_what_a_signal_broke_off_does_not_keep_an_engine_from_closing(pack: Path) -> None:
    """An exception can come when a turn has begun and nothing can end it yet."""
    engine = Engine.open(pack, predict="none", threads=1)
    begun = engine.session()
    engine.close()
    del begun
    waiting, order = Turns(), list[str]()

    def close() -> None:
        with waiting.last():
            order.append("closed")

    with waiting.turn():
        thread = threading.Thread(target=close)
        thread.start()
        thread.join(0.05)
        order.append("ended")
        with waiting.last():
            order.append("closed here")
    thread.join()
    assert order == ["ended", "closed here", "closed"]
