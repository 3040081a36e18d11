"""Ctrl-C ends a native call that takes long within a second, and the threads that made it go on with others."""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType

import numpy as np
import pytest

from moert.engine.generation import ordered
from moert.kernels import open_backend
from moert.kernels.backend import I64, AttentionWeights, Floats, NormWeights, Positions, RouterWeights
from moert.kernels.native import NativeBackend, NativeMatrix
from moert.models.kv import Kept
from moert.pack import fence
from moert.pack.codec import F32, U8
from moert.pack.fence import heard
from moert.pack.layout import MatrixPlace, NeuronLayout
from moert.pack.parts import Act, Attention, Ffn, Latent, Norm, Router

Work = Callable[[], object]


def for_ever(work: Work) -> None:
    """Does it again and again: a fast machine may be done before it is interrupted."""
    while True:
        work()


def interrupted(work: Work, after_s: float = 0.2) -> float:
    """Returns seconds from Ctrl-C to the end of the work that it ends, which is done again and again until then; the
    processor's, if these are fewer: other programs may have it. Of three tries the first below one, or the last."""
    for _ in range(3):
        if (took := _interrupted(work, after_s)) < 1:
            break
    return took


def _interrupted(work: Work, after_s: float) -> float:
    sent = [0.0, 0.0]

    def send() -> None:
        sent[:] = time.monotonic(), time.process_time()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    timer = threading.Timer(after_s, send)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for_ever(work)
    return min(time.monotonic() - sent[0], time.process_time() - sent[1])


LONG: dict[str, Callable[[NativeBackend], Work]] = {}


def long(make: Callable[[NativeBackend], Work]) -> Callable[[NativeBackend], Work]:
    """A call that takes some seconds."""
    LONG[make.__name__] = make
    return make


def ones(*shape: int) -> F32:
    return np.ones(shape, np.float32)


def square(backend: NativeBackend, rows: int, cols: int) -> NativeMatrix:
    return backend.matrix(Floats("F32", np.full((rows, cols), 1 / cols, np.float32)))


def neurons(d_model: int, d_ff: int) -> tuple[NeuronLayout, U8, I64, Ffn]:
    """All of them in one block."""
    place, weights = MatrixPlace(16, 0, "F16", (0,), None), np.ones(d_model * d_ff, np.float16).view(np.uint8)
    layout = NeuronLayout(
        d_model, d_ff, d_ff, 1, {"up": place}, place, len(weights), len(weights), 0, 0, 0, 0, None
    )  # fmt: skip
    return layout, weights, np.zeros(1, np.int64), Ffn(d_ff, Act("relu"), gated=False)


@long
def attention(backend: NativeBackend) -> Work:
    part = Attention(4, 4, 64, 0.125, None, None, rope=None, buckets=None)
    matrices = dict.fromkeys("qkvo", square(backend, 256, 256))
    weights = AttentionWeights(part, True, False, 0, {"before": NormWeights(ones(256), None, 1e-5)}, matrices)
    kept, tokens = Kept(part, 200_000), 200_000
    start = kept.extend(tokens)
    return partial(backend.attend, weights, ones(tokens, 256), kept, start, Positions())


@long
def latent_attention(backend: NativeBackend) -> Work:
    part = Latent(4, None, 64, 64, 32, 64, 0.125, Norm(1e-5), rope=None)
    shapes = {"q": (256, 256), "q_turn": (128, 256), "kv_a": (64, 256), "k_turn": (32, 256), "keys": (256, 64)}
    shapes |= {"values": (256, 64), "o": (256, 256)}
    matrices = {name: square(backend, *shape) for name, shape in shapes.items()}
    norms = {"before": NormWeights(ones(256), None, 1e-5), "kv": NormWeights(ones(64), None, 1e-5)}
    weights = AttentionWeights(part, True, True, 0, norms, matrices)
    kept, tokens = Kept(part, 100_000), 100_000
    start = kept.extend(tokens)
    return partial(backend.attend, weights, ones(tokens, 256), kept, start, Positions())


@long
def products(backend: NativeBackend) -> Work:
    matrix = square(backend, 8192, 4096)
    return partial(backend.linear, ones(8192, 4096), matrix)


@long
def scores_of_experts(backend: NativeBackend) -> Work:
    router = Router(8, True, None)
    norm, matrix = NormWeights(ones(4096), None, 1e-5), square(backend, 8192, 4096)
    weights = RouterWeights(router, 1.0, norm, None, matrix, None, None)
    return partial(backend.scores, ones(8192, 4096), weights)


@long
def choosing_experts(backend: NativeBackend) -> Work:
    norm, matrix = NormWeights(ones(1), None, 1e-5), square(backend, 2048, 1)
    weights = RouterWeights(Router(128, True, None), 1.0, norm, None, matrix, None, None)
    return partial(backend.choose, ones(40_000, 2048), weights)


@long
def neurons_that_fire(backend: NativeBackend) -> Work:
    layout, base, offsets, spec = neurons(2048, 32768)
    return partial(backend.fire, layout, base, offsets, ones(2048, 2048), spec)


@long
def columns_of_neurons(backend: NativeBackend) -> Work:
    layout, base, offsets, _ = neurons(1024, 8192)
    return partial(backend.project, layout, base, offsets, ones(5_000, 8192), None)


@long
def columns_of_some_neurons(backend: NativeBackend) -> Work:
    layout, base, offsets, _ = neurons(1024, 8192)
    hidden = np.zeros((20_000, 8192), np.float32)
    for first in range(4):
        hidden[first::4, first::4] = 1
    return partial(backend.project, layout, base, offsets, hidden, None)


@long
def convolution(backend: NativeBackend) -> Work:
    return partial(backend.conv, ones(100_000, 256), ones(2048, 256), None, ones(2047, 256), True)


@long
def delta_rule(backend: NativeBackend) -> Work:
    tokens, heads, size = 20_000, 8, 256
    keys, gates = ones(tokens, heads, size), ones(tokens, heads)
    return partial(backend.delta, keys, keys, keys, -gates, gates, ones(heads, size, size))


@long
def scan(backend: NativeBackend) -> Work:
    tokens, heads, size, n = 200_000, 8, 16, 256
    x, steps, groups = ones(tokens, heads, size), ones(tokens, heads), ones(tokens, 1, n)
    return partial(backend.scan, x, steps, -ones(heads, 1), groups, groups, ones(heads), ones(heads, size, n))


@long
def lstm(backend: NativeBackend) -> Work:
    tokens, width = 20_000, 512
    recurrent = np.full((width, 4 * width), 1 / width, np.float32)
    return partial(backend.lstm, ones(tokens, 4 * width), recurrent, ones(1, 2, width), [tokens])


@long
def sparse_attention(backend: NativeBackend) -> Work:
    rows = np.random.default_rng(0).normal(size=(40_000, 64)).astype(np.float32)
    spans = np.tile(np.array([0, len(rows)], np.int32), (len(rows), 1))
    return partial(backend.attend_sparsely, rows, rows, rows, spans)


@pytest.mark.parametrize("name", LONG)
def test_a_long_call_hears_ctrl_c_and_the_pool_goes_on(name: str) -> None:
    backend = open_backend("auto", 2)
    assert isinstance(backend, NativeBackend)
    try:
        assert interrupted(LONG[name](backend)) < 1
        unit = backend.matrix(Floats("F32", np.eye(256, dtype=np.float32)))
        assert np.array_equal(backend.linear(ones(2, 256), unit), ones(2, 256))
    finally:
        backend.close()


def test_sorting_2_24_numbers_hears_ctrl_c() -> None:
    scores = np.random.default_rng(0).normal(size=1 << 24).astype(np.float32)
    assert interrupted(lambda: ordered(scores)) < 1


def test_work_ends_before_its_interrupt_however_many_signals_come() -> None:
    """Else it would go on with numbers that are not there any more."""
    stopped, ended = queue.SimpleQueue[None](), list[float]()
    interrupt = partial(signal.pthread_kill, threading.main_thread().ident or 0, signal.SIGINT)

    def work() -> None:
        interrupt()
        stopped.get(timeout=30)
        for _ in range(3):
            interrupt()
            time.sleep(0.3)
        ended.append(time.monotonic())

    with pytest.raises(KeyboardInterrupt):
        heard(work, partial(stopped.put, None))
    assert ended


class CtrlC:
    """A profiler that interrupts `heard`, in it and in the library's threads, at one of the places where Python looks
    for signals: the beginning of a function, the end of a call into C."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename in (fence.__file__, threading.__file__):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


def test_whenever_ctrl_c_comes_work_that_began_ends_and_is_waited_for() -> None:
    """An interrupt inside an Event may leave its lock taken: nobody hears from the work then."""
    at = 1
    while interrupted_at(at):
        at += 1
    assert at > 5


def interrupted_at(place: int) -> bool:
    """Returns whether there was a place of that number."""
    stopped, began, ended, looks = queue.SimpleQueue[None](), list[int](), list[int](), list[int]()

    def work() -> None:
        began.append(place)
        with suppress(queue.Empty):
            stopped.get(timeout=0.01)
        ended.append(place)

    def stop() -> None:
        looks.append(place)
        assert len(looks) < 100, f"interrupt {place}: the end of the work was not heard"
        stopped.put(None)

    interrupt = CtrlC(place)
    sys.setprofile(interrupt)
    try:
        heard(work, stop)
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    assert began == ended
    return interrupt.left <= 0
