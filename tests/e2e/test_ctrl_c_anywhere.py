"""Ctrl-C ends a run within a second wherever it is: a vocabulary of 2^24 tokens and 8 beams keep everything busy."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny_packs import DECODER_SHAPE, write_pack

MOMENTS = 6


@pytest.mark.slow
def test_a_vocabulary_of_2_24_tokens_and_8_beams_hear_ctrl_c(tmp_path: Path) -> None:
    spec = DECODER_SHAPE.but(vocab_size=1 << 24, d_model=8, tied=True).spec
    pack = write_pack(tmp_path / "m.pack", spec, paths=False)
    words = [sys.executable, "-m", "moert", "run", str(pack), "hello", "--tune", "beams=8", "--max-new-tokens", "300"]
    took: list[float] = []
    worked: list[float] = []
    for moment in range(MOMENTS):
        process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        time.sleep(2 + 1.4 * moment)
        assert process.poll() is None, "it was over before"
        sent, before, ended = time.monotonic(), _worked(process.pid), _ended()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        took.append(time.monotonic() - sent)
        worked.append(_ended() - ended - before)
        assert process.returncode == 130, err
        assert "Traceback" not in err
    assert max(map(min, took, worked)) < 1, (took, worked)  # other programs may have the processor


def _worked(pid: int) -> float:
    """Returns the processor time [s] of a process so far."""
    words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _ended() -> float:
    """Returns the processor time [s] of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
