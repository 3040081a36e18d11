"""Ctrl-C ends a native call that takes long within a second."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest

from moert.generation.sampling import ordered
from moert.kernels import open_backend
from moert.kernels.backend import AttentionWeights, Floats, NormWeights, Positions
from moert.models.kv import Kept
from moert.pack.parts import Attention


def interrupted(work: object, after_s: float = 0.4) -> float:
    """Seconds from Ctrl-C to the end of what it ends."""
    sent = [0.0]

    def send() -> None:
        sent[0] = time.monotonic()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    timer = threading.Timer(after_s, send)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        work()  # type: ignore[operator]
    return time.monotonic() - sent[0]


def test_attention_over_200000_tokens_hears_ctrl_c_and_the_pool_goes_on() -> None:
    backend = open_backend("auto", 2)
    try:
        part = Attention(4, 4, 64, 0.125, None, None, rope=None, buckets=None)
        norm = NormWeights(np.ones(256, np.float32), None, 1e-5)
        square = backend.matrix(Floats("F32", np.eye(256, dtype=np.float32)))
        weights = AttentionWeights(part, True, False, 0, {"before": norm}, dict.fromkeys("qkvo", square))
        tokens = 200_000
        kept = Kept(part, tokens)
        x = np.ones((tokens, 256), np.float32)
        start = kept.extend(tokens)
        assert interrupted(lambda: backend.attend(weights, x, kept, start, Positions()), 2) < 1
        assert np.array_equal(backend.linear(x[:2], square), x[:2])
    finally:
        backend.close()


def test_sorting_2_24_numbers_hears_ctrl_c() -> None:
    scores = np.random.default_rng(0).normal(size=1 << 24).astype(np.float32)
    assert interrupted(lambda: ordered(scores)) < 1
