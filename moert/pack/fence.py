"""Calls of a library that may break off in the middle or take for ever, for both programs.

A panic of Rust is not one of Python's errors, and is printed where it happens. And while the library works, Python does
not handle Ctrl-C; so another thread does the work, and is left behind.
"""

from __future__ import annotations

import _thread
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
_WORKER = "left behind when its work takes too long"
_STDERR = 2
_LONGEST = 200  # letters of a reason
_LOOK_S = 0.05  # between two looks at whether work has ended
_owned = ContextVar("stderr is ours", default=False)


class Broken(Exception):
    """The library broke off. The message says why, in one line."""


class Unfinished(Exception):
    """The work took longer than it may, and goes on although nobody waits for it."""


@contextmanager
def owned_stderr() -> Iterator[None]:
    """Declares that the program owns its process, as long as the block runs: see `unheard`."""
    before = _owned.set(True)
    try:
        yield
    finally:
        _owned.reset(before)


def unbroken(work: Callable[[], T]) -> T:
    """Returns the result of the work, done in this thread. Raises Broken, or the error that the work raises."""
    try:
        return work()
    except BaseException as error:
        if (reason := panic(error)) is None:
            raise
    raise Broken(reason)


def panic(error: BaseException) -> str | None:
    """Returns the reason in one line where the error is a panic of Rust, else None."""
    if type(error).__name__ != "PanicException":  # a class that can't be imported
        return None
    return " ".join(str(error).split())[:_LONGEST]


def locked(work: Callable[[], T]) -> T:
    """Returns the result of work that holds Python's lock all along, so that Python handles no signal, with stderr held
    back as in `unheard`. In a program that owns its process Ctrl-C and SIGTERM end the process at once. Raises Broken,
    or the error that the work raises."""
    ours = _owned.get() and threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if ours else ()
    before = {each: signal.getsignal(each) for each in numbers}
    with unheard():
        try:
            for number, handler in before.items():
                if handler is not signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
            return unbroken(work)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def fenced(work: Callable[[], T], most_s: float) -> T:
    """Returns the result of the work, done by another thread, with stderr held back as in `unheard`: if the work does
    not hold Python's lock, Ctrl-C and other signals are handled meanwhile. Raises Unfinished after `most_s` seconds,
    Broken, or the error that the work raises."""
    found: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            found.put((unbroken(work), None))
        except BaseException as error:
            found.put((None, error))

    with unheard():
        worker = threading.Thread(target=run, name=_WORKER, daemon=True)
        try:
            worker.start()
        except RuntimeError:
            raise MemoryError("there is no room for another thread") from None
        until_s = time.monotonic() + most_s
        while (ended := _look(found)) is None:
            if time.monotonic() > until_s:
                raise Unfinished(f"is not done after {most_s:.0f} s")
        worker.join()
        value, error = ended
        if error is not None:
            raise error
    return value  # type: ignore[return-value]


def heard(work: Callable[[], T], stop: Callable[[], object]) -> T:
    """Returns the result of the work, done by another thread, so that this one handles Ctrl-C and other signals
    meanwhile. Where a signal's handler raises, `stop` is called to end the work soon, and this thread waits for that
    end."""
    if threading.current_thread() is not threading.main_thread():  # nobody else is sent signals
        return work()
    found: list[tuple[T | None, BaseException | None]] = []
    abandoned, running, ended = list[bool](), list[bool](), list[bool]()
    bell = queue.SimpleQueue[None]()  # an Event, as in a Thread, may keep its lock if a handler raises

    def run() -> None:
        running.append(True)
        try:
            if not abandoned:
                found.append((work(), None))
        except BaseException as error:
            found.append((None, error))
        finally:
            ended.append(True)
            bell.put(None)

    try:
        _thread.start_new_thread(run, ())
        while not ended:
            _look(bell)
    except BaseException:
        waits = True
        while waits:  # whatever else comes; up to Python 3.12 a thread that a signal finds in join() seems dead
            with suppress(KeyboardInterrupt, SystemExit):
                abandoned.append(True)
                while running and not ended:
                    stop()
                    _look(bell)
                waits = False
        raise
    ((value, error),) = found
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _look(at: queue.SimpleQueue[T]) -> T | None:
    """Returns the next item, or None after a short wait: Python handles a signal that comes just before a wait only
    after it."""
    with suppress(queue.Empty):
        return at.get(timeout=_LOOK_S)
    return None


def left_behind() -> bool:
    """Returns whether work goes on that nobody waits for any more: then the process had better end at once than tidy
    up."""
    return any(thread.name == _WORKER for thread in threading.enumerate())


@contextmanager
def unheard() -> Iterator[None]:
    """Holds back text that is printed to stderr until the block ends, in a program that owns its process; drops the
    text if the block ends with Broken."""
    saved = _duplicate() if _owned.get() else None
    if saved is None:
        yield
        return
    kept = os.memfd_create("stderr") if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_RDWR)
    drop = False
    try:
        os.dup2(kept, _STDERR)
        yield
    except Broken:
        drop = True
        raise
    finally:
        os.dup2(saved, _STDERR)
        with suppress(OSError):
            nbytes = os.lseek(kept, 0, os.SEEK_END)
            os.lseek(kept, 0, os.SEEK_SET)
            if not drop and (said := os.read(kept, nbytes)):
                os.write(_STDERR, said)
        os.close(saved)
        os.close(kept)


def _duplicate() -> int | None:
    """Returns a duplicate of stderr's descriptor; None where there is no stderr."""
    with suppress(OSError, ValueError):
        sys.stderr.flush()
        return os.dup(_STDERR)
    return None
