"""Ctrl-C ends a run within a second wherever it is: a vocabulary of 2^24 tokens and 8 beams keep everything busy."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny_packs import DECODER_SHAPE, write_pack

MOMENTS = 12


@pytest.mark.slow
def test_a_vocabulary_of_2_24_tokens_and_8_beams_hear_ctrl_c(tmp_path: Path) -> None:
    spec = DECODER_SHAPE.but(vocab_size=1 << 24, d_model=8, tied=True).spec
    pack = write_pack(tmp_path / "m.pack", spec, paths=False)
    words = [sys.executable, "-m", "moert", "run", str(pack), "hello", "--tune", "beams=8", "--max-new-tokens", "300"]
    took: list[float] = []
    for moment in range(MOMENTS):
        process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        time.sleep(2 + 0.7 * moment)
        assert process.poll() is None, "it was over before"
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        took.append(time.monotonic() - sent)
        assert process.returncode == 130, err
        assert "Traceback" not in err
    assert max(took) < 1, took
