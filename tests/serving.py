"""Servers on loopback, in a thread of the test's own process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moert.serve.host import Host, ServerSettings
from moert.serve.server import bound, http_server


class Running:
    """A server that runs; `url` is its address."""

    def __init__(self, url: str, host: Host) -> None:
        self.url, self.host = url, host


@contextmanager
def serving(*packs: Path, **settings: Any) -> Iterator[Running]:
    """Runs a server while the with block does."""
    named = {pack.name.removesuffix(".pack"): pack for pack in packs}
    host = Host(ServerSettings(named, **settings))
    host.open(host.names[0])
    ready, loop = threading.Event(), asyncio.new_event_loop()
    with bound("127.0.0.1", 0) as listening:
        running = http_server(host)
        running.install_signal_handlers = lambda: None  # type: ignore[attr-defined]

        def run() -> None:
            asyncio.set_event_loop(loop)
            loop.call_soon(ready.set)
            loop.run_until_complete(running.serve(sockets=[listening]))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            while not running.started:
                assert thread.is_alive(), "the server did not start"
                ready.wait(0.01)
            yield Running(f"http://127.0.0.1:{listening.getsockname()[1]}", host)
        finally:
            running.should_exit = True
            thread.join()
            host.close()
            loop.close()


def until(true: Callable[[], bool]) -> None:
    """Waits, for some seconds, until something is true."""
    for _ in range(2000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("it did not come to be")
