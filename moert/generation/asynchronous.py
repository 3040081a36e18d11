"""A request of a program that waits for many things at once, by asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from moert.generation.session import Prompt, Session
from moert.generation.settings import GenerationSettings


async def text_of(session: Callable[[], Session], prompt: Prompt, settings: GenerationSettings) -> AsyncIterator[str]:
    """Gives text in pieces as they are made, by a thread of its own. Where a task is cancelled or goes away, the
    session closes after the token that is under way; one that still waits for its turn runs nothing.

    Raises what Session.add and Session.turn do.
    """
    loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "moert")
    opened: list[Session] = []

    def begin() -> None:
        opened.append(session())
        opened[0].add(prompt, settings)

    def end() -> None:
        for each in opened:
            each.close()

    try:
        await loop.run_in_executor(thread, begin)
        while pieces := await loop.run_in_executor(thread, opened[0].turn):
            if text := "".join(piece.text for _, piece in pieces):
                yield text
    finally:
        ending = thread.submit(end)
        thread.shutdown(wait=False)
        if opened:
            await asyncio.shield(asyncio.wrap_future(ending))
